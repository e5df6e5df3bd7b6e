"""Reads a run's records twice and sums them in bounded memory.

In: a run folder or a recording of the daemon (`inputs`).  Out: `step_sums.StepSums`, and `notices` about the input.

The first reading (`run_index`) finds the ranks and the decisions, from which `before_after` derives which steps are
before and which after.  In the second, `step_join` joins the steps of all ranks by number, and `step_sums` sums them,
in `windows` of a few steps for the spread of rates.
"""
