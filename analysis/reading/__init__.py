"""Finds, reads and analyzes trace files: in this process, in several processes or on a dask cluster.

`rank_window` does so for steps that the ranks of a running job recorded together, in processes beside them.
"""
