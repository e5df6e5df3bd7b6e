"""Holds the catalog of every metric: its name, unit, labels and meaning.

Start with `catalog`, one row a metric; `metric` says what a row may hold, `value_ranges` what its values can be.
"""
