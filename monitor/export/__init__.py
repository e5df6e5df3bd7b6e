"""The daemon's state as metrics: samples for Prometheus and for OTLP.

In come snapshots, the state of jobs and what the daemon's parts yield of themselves, out go series.
Start with `job_samples`, which is pure; `prometheus`, the only file that knows prometheus_client, writes the page at
the tick and serves it, `otlp` pushes the same samples.
"""
