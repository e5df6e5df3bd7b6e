"""Reads the doctor's facts: one module per source, and their types in `model`.

In: `/proc`, `/sys`, the driver, logs, scripts and run folders, through `host_access`.  Out: frozen facts, not judged.
Start with `model`.
"""
