"""Shows a report's document as a page, as markdown or on a terminal, by the same tables.

In: `document.Report` or `document.RunComparison`.  Out: text.
Start at `html`, the page, with its `charts`; `markdown` is for an issue, `terminal` for the demo.  The tables, as text,
are in `tables` (the run), `utilization_tables` (devices, cost, incidents, ranks) and `comparison_tables`.
"""
