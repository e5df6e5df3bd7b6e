"""Has all ranks of a job record the same steps when one seems late, and applies the verdict on them.

In: suspicions and ledgers of all ranks.  Out: `Straggler` records that confirm, correct or take back a name.
Start at `cross_rank_window`; `window_trigger` decides when, `step_recording` records on the training thread.
"""
