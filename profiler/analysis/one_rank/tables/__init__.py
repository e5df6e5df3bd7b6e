"""Makes the tables that one looks up figures in: kernels, operators, roofline, launches, memory, annotations.

In: a `Trace` with its details, and what `origins` says of its rows.  Out: `report_tables.TraceTables`.  Start at
`all_tables.tables_of`.
"""
