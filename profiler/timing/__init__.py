"""Times the phases of a step on host and device, and keeps the cost of measuring within the overhead budget.

In: instants that the hooks note, events on a CUDA stream, what measuring cost.
Out: durations by phase, and whether a window may open or fewer steps must be measured.
Start at `step_timer`; `overhead_budget` keeps the budget, `cuda_timer` reads the device without waiting for it.
"""
