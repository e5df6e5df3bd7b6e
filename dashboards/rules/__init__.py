"""Prometheus rules: alerts of nodes and jobs, and the recordings they rest on.

In come metrics of the catalog, out go rule files.
Start with `rule_files`, which writes them; `alerts_node` and `alerts_job` are the alerts, `recording` the recorded
series.
"""
