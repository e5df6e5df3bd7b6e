"""Analyzes trace files of one or more ranks: ledgers, collectives, late ranks, what-if (`pacecar analyze`).

In: trace files of torch.profiler, one for each rank.  Out: a `document.report.TraceDocument`, shown on a terminal, as a
page or a picture, or as another trace.  Start at `reading.parallel_reading.analyze`.  Apart from that: `hang` judges
why a job hangs, from flight recorder dumps or from what the ranks of a running job say.

Stage by stage, each knowing only those before it:

    trace         bytes of a file to one `Trace` of columns, and its steps
    plausibility  does a trace contradict itself?  the sound part goes on
    align         which rows of several traces are one collective, and all clocks on one axis
    graph         what each rank did and waited for, with all ranks joined; replay, and the critical path
    verdict       who held the job up, in what, and what a fix would save
    one_rank      one trace: ledger, steps, collectives, families of kernels, tables
    all_ranks     all ranks: who waited for whom, and the answers of the stages before
    document      the types of the result, printed by `--json`; `compare` compares two of them
    reading       files at the edge: in this process, in other processes, on a dask cluster
    hang          who holds up a job that hangs; no traces
    output        terminal, page, picture, CSV files, another trace for Perfetto

Everything is numpy, linear in the events, with integers of nanoseconds and without torch.  All is pure except
`hang.dumps`, `shelf` (columns of many ranks, some in a file) and `reading`, where only `cluster` uses dask.  Only the
modules named `...text` and the command use rich.
"""
