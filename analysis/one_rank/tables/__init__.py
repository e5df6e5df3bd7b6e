"""Makes the tables of one trace: kernels, operators, roofline, launches, memory, annotations.

In: a `Trace` with its details, and the `origins` of its rows.  Out: `report_tables.TraceTables`.  Start at
`all_tables.tables_of`.

To add a table: its row's type in `analysis/document/report_tables.py`; a module here, called in `all_tables`; how
terminal and page show it in `analysis/output/tables/work_tables.py`, and a line in `analysis/output/csv_tables.py`;
in `tests/analysis/one_rank/tables/` the same figures by plain arithmetic.
"""
