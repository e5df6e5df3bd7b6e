"""The Grafana dashboards, one module for each, and the rows that several share.

In come metrics of the catalog, out go grafanalib dashboards.
Start with `fleet`.
"""
