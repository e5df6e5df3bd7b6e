"""Computes the parts of the report's document, each from the index and the sums of a run.

In: `reading.run_index.RunIndex` and `reading.step_sums.StepSums`.  Out: types of `document`; `build` calls all of them.
Start at `events`: decisions, orders, stragglers, hangs and stops, of which `hangs` makes sentences.  `rank_totals`
says what each rank did and what pacecar cost; `utilization_rows` how busy devices were, with what the daemons recorded
(`recorded_utilization`); `costs` is the price, `loss_log` the first and the last loss.
"""
