"""Holds the catalog of every metric: its name, unit, labels and meaning.  Start with `catalog`."""
