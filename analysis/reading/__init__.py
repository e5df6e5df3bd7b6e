"""Finds, reads and analyzes trace files: in this process, in several processes or on a dask cluster."""
