"""The Grafana dashboards, one module for each, and the rows that several share.

In come metrics of the catalog, out go grafanalib dashboards: `fleet` (with `gpu_hours`), `node` (with `node_gpu`,
`node_host`, `node_links`, `node_system`), `job` (with `pace`, `ledgers`, `efficiency_and_memory`, `whatif`), `tuning`,
`itself`.  `ranking` builds tables with the worst first.
Start with `fleet`.
"""
