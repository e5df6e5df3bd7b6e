"""Makes the report of a run (`pacecar report`): what it did, what was changed in it and what that brought, on one page.

    command, run         the options; the files and the exit code
    reading              reads the records twice, joins the steps of all ranks and adds them up
    sections             computes the parts of the document: events, ranks, utilization, costs, losses
    build, document      puts the document together; its types, which are the public face
    figures              spread and intervals (block bootstrap)
    significance         what may be claimed of a difference
    comparison           how several runs are compared
    formatting, output   figures as words; page, markdown and terminal

A run of a week is gigabytes of records, so nothing is kept that grows with it: files are read twice, in pieces, and
what is added up has a bounded number of bins.  Before and after can only be told apart when all verdicts are known;
that is what the first reading is for.

Pure but for `reading.inputs` and `run`, and the small files that `loss_log` and `utilization_rows` of `sections` read.
No torch and no numpy: a report is made wherever the folder lies.
"""
