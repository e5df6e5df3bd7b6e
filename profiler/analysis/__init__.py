"""Analyzes trace files of one or several ranks: ledgers, collectives, late ranks, what-if bounds (`pacecar analyze`).

In: `Trace`s from `pacecar.profiler.trace`, one for each rank.  Out: a `report.TraceDocument`, and tables, an SVG
picture or another trace of it.  Start at `reading.parallel_reading.analyze`.

    reading     files at the edge: in this process, in processes of their own, on a dask cluster
    plausibility  does a trace contradict itself?  what is sound of it goes on
    one_rank    one trace: ledger, steps, collectives, families of kernels
    all_ranks   several: clocks, who waited for whom, what the causal model says
    output      tables and picture; `page` is the HTML page, `merged_trace` another trace for Perfetto
    report      the types of the document, what `--json` prints, with those of its tables in `report_tables`;
                `compare` sets two documents side by side

Pure but for `reading`, of which `cluster` alone knows dask.  Only the modules named `...text` and the command know
rich.  With the hook this shares `ledger/`, and how rows of a CPU job become spans (`windows.trace_spans`).
"""
