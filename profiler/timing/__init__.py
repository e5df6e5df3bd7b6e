"""Times the phases of a step on host and device, and keeps the cost of measuring within the overhead budget.

In: instants that the hooks note, events on a CUDA stream, what measuring cost.
Out: durations by phase, and whether a window may open or fewer steps must be measured.
Start at `step_timer`; `overhead_budget` keeps the budget, `cuda_timer` reads the device without waiting for it.

    sample_counts                 samples, tokens and totals
    step_sampling                 how many of very short steps are measured at all
    turns                         which rank may open a window at which step
    hook_cost, aftermath          what torch takes to call hooks; what a window costs a device after it
    preemption, process_stops     what others had of the processor; when this process did not run at all
    failure_guard                 the one boundary at which exceptions of ours end
    torch_compile, fork_safety    keep torch.compile out of the hooks, and forked children out of the job
"""
