"""Where a step's time went: compute, exposed communication, copies, data wait, idle.

In come spans of a step, out goes a ledger that adds up to the nanosecond.
Start with `attribution`; `estimate` does it without a window, `what_if_bounds` says what could be gained.
"""
