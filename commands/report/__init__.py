"""Makes the report of a run (`pacecar report`): what the run did, what tuning changed, and what that brought.

    command, run_report  options; files and exit code
    reading              reads the records twice, joins the steps of all ranks and sums them
    sections             the parts of the document: events, ranks, utilization, costs, losses
    build, document      assembles the document; its types, which are public
    figures              spread and intervals (block bootstrap)
    significance         when a difference counts as shown
    comparison           several runs against the first
    formatting, output   figures as text; page, markdown and terminal

A week's run is gigabytes of records, so memory must not grow with it: files are read twice, in pieces, into a bounded
number of bins.  The first reading finds the verdicts, which decide which steps are before and which are after.

Only `reading.inputs`, `run_report`, and `loss_log`, `communicators` and `utilization_rows` in `sections` touch files.
There is no torch and no numpy, so a report can be made on any machine that has the folder.
"""
