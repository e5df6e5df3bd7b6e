"""Exchanges the ranks' figures on their last steps, without ever waiting for another rank.

In: each rank's finished steps.  Out: ranges that all ranks have sent, row by row, and their ledgers (`totals`).
Start at `gather_schedule`, which decides when a rank sends.  `step_partition` cuts steps into ranges, the same on all
ranks; `phase_sums_message` encodes them, and `gloo_transport` carries them on a group of our own.  In large jobs this
happens in `subgroups`, whose leaders report to rank 0 (`leader_reports`).
"""
