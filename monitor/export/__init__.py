"""The daemon's state as metrics: samples for Prometheus and for OTLP.

In come snapshots and the state of jobs, out go series.
Start with `samples`; `prometheus` serves them, `otlp` pushes them.
"""
