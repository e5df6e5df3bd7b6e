"""Defines the type of an alert rule (expression, duration, severity, texts) and of a group of rules.

An alert that fires on a healthy machine is soon switched off.  So each bound has a source or a reason, and each alert
waits (`for`) as long as the condition may pass by itself.  Normal states have no alert: a GPU at its power limit, an
Xid that the program caused, a finished job that sends nothing.

`critical`: work is lost or stopped until a person acts.  `warning`: work is slower or less safe than it could be.
Every alert links to a section of docs/runbook.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY", "RUNBOOK", "Alert", "Group", "anchor"]

RUNBOOK = "docs/runbook.md"

BY = "GPU {{ $labels.gpu }} of {{ $labels.instance }}"
"""The name of a GPU in the texts of an alert."""


def anchor(name: str) -> str:
    """Return the anchor of the alert `name` in the runbook, as GitHub and Grafana derive it from the heading."""
    return name.lower()


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert rule: its condition, how long it must hold, severity and texts."""

    name: str
    expression: str
    lasting: str
    severity: Literal["critical", "warning"]
    summary: str
    description: str


@dataclass(frozen=True, slots=True)
class Group:
    """Rules that Prometheus evaluates together."""

    name: str
    alerts: tuple[Alert, ...]
