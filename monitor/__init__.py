"""The daemon, one per node: samples the machine, hears the training jobs, serves both to Prometheus.

Start at `daemon`; see ARCHITECTURE.md for the roads through it.
"""
