"""Has all ranks of a job record the same steps when one seems late, and applies the verdict on them.

In: suspicions, ranges and ledgers of all ranks.  Out: `Straggler` records that confirm, correct or add a name.
Start at `cross_rank_window`; `window_trigger` decides when, `step_recording` records on the training thread,
`named_ranks` joins the verdict with what the always-on detector says.
"""
