"""Computes where a step's time went: compute, exposed communication, copies, data wait, idle.

In: intervals of work and of host phases.
Out: a `Ledger` whose headings sum to the wall time, to the nanosecond.
Start at `attribution`; `estimate` does it without a profiled window, `what_if_bounds` bounds what could be gained.
"""
