"""Computes the parts of the report's document, each from the index and the sums of a run.

In: `reading.run_index.RunIndex` and `reading.step_sums.StepSums`.  Out: types of `document`; `build` calls all of them.

    events                decisions, orders, stragglers, hangs and stops; start here
    hangs                 sentences about hangs and stops
    rank_totals           what each rank did, and pacecar's overhead
    utilization_rows      how busy devices were, partly from the daemons' recordings (`recorded_utilization`)
    power_limits          a step's time and energy by the GPUs' power limit, from the same recordings
    communicators         bandwidths, from the files of NCCL's Inspector
    costs, loss_log       prices; first and last losses
"""
