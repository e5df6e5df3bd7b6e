"""Defines each table of an analysis once, as values that the terminal and the page draw.

In: the document.  Out: `pacecar.formatting.tables.Table`.  The renderer chooses the number of rows, the table the
columns that fit a terminal.  Pure, and without rich.

    trace_tables        of one trace or of all: ledger, steps, idle, collectives, kernel families, what-if
    job_tables          of all ranks: verdict, critical path, ranks, collectives one by one, clocks, incidents
    work_tables         of one trace's work: kernels, operators, roofline, launches, memory, annotations
    comparison_tables   of two runs: ledger, and the greatest changes
"""
