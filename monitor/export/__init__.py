"""The daemon's state as metrics: samples for Prometheus and for OTLP.

In come snapshots and the state of jobs, out go series.
Start with `samples`, which is pure; `prometheus`, the only file that knows prometheus_client, writes the page at the
tick and serves it, `otlp` pushes the same samples.
"""
