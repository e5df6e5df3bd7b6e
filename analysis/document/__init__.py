"""Defines the document of an analysis, what `pacecar analyze --json` prints.

`report` has the types of traces and jobs, `report_tables` those of the tables of `--tables`.
"""
