"""Aligns the traces of several ranks: finds the rows of one collective, and puts the ranks' clocks on one axis.

In: the ranks' `Trace`s.  Out: matched rows, how many could not be matched, and each trace's clock correction with its
error.  Start at `collective_matching`; it uses `sequence_alignment` (which call of one rank is which call of another)
and `message_batches` (the sends and receives of one kernel).  `host_clocks` decides which traces share a clock;
`clock_fit` estimates offset and drift of all clocks at once.
"""
