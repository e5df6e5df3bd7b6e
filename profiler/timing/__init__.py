"""Clocks, and the overhead budget that they are paid from.

In come stretches of a step, out go durations, what measuring cost, and whether more may be spent.
Start with `step_timer`; `overhead_budget` keeps the promise, `cuda_timer` asks the device without waiting for it.
"""
