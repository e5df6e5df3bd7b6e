"""Tunes a running job: forecasts settings, tests them by A/B trials, and keeps those that are proven faster.

In come finished steps, node signals and people's commands; out go knob changes that all ranks make at the same step,
and records.  Start with `tuner` (one rank's part) and `policy.tuning_policy` (the decisions); see ARCHITECTURE.md.
"""
