"""Computes where a step's time went: compute, exposed communication, copies, data wait, idle.

In: intervals of work and of host phases.
Out: a `Ledger` whose headings sum to the wall time, to the nanosecond.
Start at `attribution`, which with `classification` (of rows) and `intervals` is pure and shared by windows in memory
and trace files.  `estimate` splits the timers of an unprofiled step in the last windows' proportions, `what_if_bounds`
bounds what could be gained, `bus_bandwidth` has nccl-tests' factors.
"""
