"""Analyzes trace files of one or several ranks: ledgers, collectives, late ranks, what-if bounds (`pacecar analyze`).

In: `Trace`s from `pacecar.profiler.trace`, one for each rank.  Out: a `report.TraceDocument`, and tables, an SVG
picture or another trace of it.  Start at `parallel_reading.analyze`; `one_trace` analyzes one trace, `all_ranks`
compares several, `report` has the types: what `--json` prints.

Pure from `one_trace` over `all_ranks` to `report`.  Files are read at the edge: in this process, in processes of their
own (`workers`), or on a dask cluster (`cluster`, the only module that knows dask); `one_file` is what is done there.
Only the modules named `...text` and the command know rich.  With the hook this shares `ledger/`, and how rows of a CPU
job become spans (`windows.trace_spans`).
"""
