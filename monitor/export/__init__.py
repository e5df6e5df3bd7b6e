"""The daemon's state as metrics: samples for Prometheus and for OTLP.

In come snapshots, the state of jobs and what the daemon's parts yield of themselves, out go series.
Start with `job_samples`, which is pure; `pages`, the only file that knows prometheus_client, writes them as text and,
by `protobuf`, as Prometheus' protocol buffers, and `metric_writer` remembers what was written; `prometheus` has that
done at the ticks for which `scrape_beat` foresees a scrape, and serves it; `otlp` pushes the same samples.
"""
