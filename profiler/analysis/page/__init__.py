"""Writes the page of an analysis, `pacecar analyze --html`: one file that needs no network.

In: an `Analysis`, the document with the columns and times behind it.  Out: HTML.  Start with `page.write_page`, which
decides what stands where.  The pieces of any page are `pacecar.formatting.page`.

    page             headline, tiles, sections
    job_tables       of all ranks: verdict, critical path, ranks, clocks, incidents
    trace_tables     of one trace or of all: ledger, steps, collectives, what-if, families, gaps
    work_tables      of one trace's work: kernels, operators, roofline, launches, memory, annotations
    charts           ledgers as bars, what-if as lengths
    rank_timeline    some steps of the ranks on one axis, with the critical path
"""
