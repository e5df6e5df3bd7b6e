"""Computes where a step's time went: compute, exposed communication, copies, data wait, idle.

In: intervals of work and of host phases.  Out: a `Ledger` whose headings sum to the wall time, to the nanosecond.
Start at `attribution`.  With `classification` (of rows) and `intervals`, it serves both windows in memory and trace
files.  `attempts` charges a job's life over its restarts by `attempt_rows`, `what_if_bounds` bounds gains,
`bus_bandwidth` has nccl-tests' factors.  Everything is pure.
"""
