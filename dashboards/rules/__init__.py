"""Defines the Prometheus rules: alerts about nodes and jobs, and the recorded series that they use.

Start with `rule_files`, which renders them.  `alerts_node` and `alerts_job` have the alerts, `recording` the recorded
series.

To add an alert: an `Alert` in `dashboards/rules/alerts_node.py` or `dashboards/rules/alerts_job.py`, cases in
`tests/dashboards/alert_cases.py`, a section in `docs/runbook.md`, then `make dashboards`.
"""
