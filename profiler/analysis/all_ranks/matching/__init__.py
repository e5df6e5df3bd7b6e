"""Matches the rows of several ranks' traces that belong to one collective, whatever their clocks say.

In: the ranks' `Trace`s.  Out: rows that belong together, and how many could not be matched.
Start at `collective_matching`; `sequence_alignment` says which call of one rank is which call of another, and
`message_batches` which sends and receives one kernel does at once.
"""
