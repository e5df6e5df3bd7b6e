"""Reads the facts of the doctor: one module for each source, and `model` with the types of all.

In come `/proc`, `/sys`, the driver, logs, scripts and run folders, through `host_access`; out go frozen facts.
Start with `model`.  Nothing is judged here.
"""
