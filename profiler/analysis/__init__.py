"""Analyzes trace files of one or several ranks: ledgers, collectives, late ranks, what-if bounds (`pacecar analyze`).

In: `Trace`s from `pacecar.profiler.trace`, one for each rank.  Out: a `report.TraceDocument`, and tables, an SVG
picture or another trace of it.  Start at `parallel_reading.analyze`; `one_trace` analyzes one trace, `all_ranks`
compares several, `report` has the types.
"""
