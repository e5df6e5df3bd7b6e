"""Holds the doctor's rules: pure functions from facts (`facts.model`) to findings, one module per subject.

Start with `registry`, which lists all rules.

To add a finding: a check and a row in a module here, a fault in `tests/commands/doctor/faults.py`, then
`make dashboards`, which writes `docs/doctor.md`.
"""
