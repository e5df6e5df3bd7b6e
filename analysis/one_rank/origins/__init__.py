"""Finds where the rows of a trace came from, and how much time counts for each: the basis of the tables.

In: a `Trace` with its details.  Out: `calls.Calls` (operator, shapes, module and python line of each row), numbered by
`grouping`, and `window.TableWindow` (how much of each device row counts).  Start at `calls.calls_of`.
"""
