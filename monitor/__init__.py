"""The daemon, one per node: samples the machine, receives the jobs' records, and serves both to Prometheus.

Start at `daemon`; ARCHITECTURE.md shows how data flow through it.
"""
