"""Says where the rows of a trace came from, and what time is theirs: the ground that the tables stand on.

In: a `Trace` with its details.  Out: `calls.Calls` (operator, shapes, module and python line of each row), numbered by
`grouping`, and `window.TableWindow` (what of each device row counts).  Start at `calls.calls_of`.
"""
