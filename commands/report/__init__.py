"""Makes the report of a run (`pacecar report`): what it did, what was changed in it and what that brought, on one page.

    command, run    the options; the files and the exit code
    inputs          what is in a run folder or a recording
    run_index       first reading: who ran, what was decided      before_after  which steps count as before and after
    step_join       second reading: the steps of all ranks, joined by number
    step_sums       sums over the steps, in bounded memory        windows      rates of windows of a few steps
    rank_totals     what each rank did, and what pacecar cost
    figures         spread and intervals (block bootstrap)        significance what may be claimed of a difference
    hangs           says first that the run stood still
    events, utilization_rows, recorded_utilization, costs, loss_log    parts of the document
    notices         what was wrong with the input, damaged or not
    build, document the document, which is the public face
    html (page.html.jinja, style.css), charts, markdown, terminal (for the demo)    how it is shown, by the same tables:
    tables, utilization_tables, comparison_tables, formatting
    comparison      how several runs are compared

A run of a week is gigabytes of records, so nothing is kept that grows with it: files are read twice, in pieces, and
what is added up has a bounded number of bins.  Before and after can only be told apart when all verdicts are known;
that is what the first reading is for.

Pure but for `inputs` and `run`, and the small files that `loss_log`, `utilization_rows` and `html` read.  No torch
and no numpy: a report is made wherever the folder lies.
"""
