"""The daemon's state as metrics, for Prometheus and OTLP.

Snapshots, jobs and the own samples of the daemon's parts come in, series go out.  Start with `job_samples`, which is
pure.  `pages` writes samples as text and, with `protobuf`, as Prometheus' protocol buffers; `metric_writer` remembers
what was written.  `prometheus` serves the pages and writes them in advance when `scrape_beat` expects a scrape.  `otlp`
pushes the same samples.
"""
