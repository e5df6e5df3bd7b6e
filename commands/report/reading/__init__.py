"""Reads a run's records twice and adds them up in bounded memory.

In: a run folder or a recording of the daemon (`inputs`).  Out: `step_sums.StepSums`, and `notices` of what was wrong.
Start at `run_index`, the first reading: who ran, and what was decided.  `before_after` then says which steps count as
before and which as after; in the second reading `step_join` joins the steps of all ranks by number, and `step_sums`
adds them up, with `windows` of a few steps for the spread of rates.
"""
