"""Times the phases of a step on host and device, and keeps the cost of measuring within the overhead budget.

In: times recorded by the hooks, events on a CUDA stream, the cost of measuring.
Out: durations by phase; whether a window may open and how many steps to measure.
Start at `step_timer`; `overhead_budget` keeps the budget and the ranks' turns at windows, `cuda_timer` reads the
device without waiting for it.

    sample_counts                 samples, tokens and totals
    step_sampling                 how many steps to measure when steps are very short
    hook_cost                     the time torch takes to call hooks
    preemption, process_stops     time taken by other programs; when this process did not run at all
    garbage_collections           time taken by Python's garbage collector
    failure_guard                 the one boundary that stops our exceptions
    torch_compile, fork_safety    keep torch.compile out of the hooks, and forked children out of the job
"""
