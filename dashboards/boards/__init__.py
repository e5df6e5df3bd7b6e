"""Builds the Grafana dashboards, one module for each, from metrics of the catalog.

Start with `fleet` (with `gpu_hours`).  The others are `node` (with `node_gpu`, `node_host`, `node_links`,
`node_system`), `job` (with `pace`, `ledgers`, `efficiency_and_memory`, `whatif`), `tuning` and `itself`.  `ranking`
builds tables with the worst row first.
"""
