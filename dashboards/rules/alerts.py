"""Defines the type of an alert rule (expression, duration, severity, texts) and of a group of rules.

An alert that fires on a healthy machine is switched off by the second week.  So each has a bound with a source or a
reason, and waits (`for`) as long as the condition may pass by itself.  There is none where a number is normal: a GPU at
its power limit, an Xid that the program caused, a finished job that sends nothing.

`critical`: work is lost or stands still until somebody acts.  `warning`: it is slower or less safe than it could be.
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
    """Return the anchor of the alert `name` in the runbook, as GitHub and Grafana make it of the heading."""
    return name.lower()


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: its condition, how long that must hold, and the texts sent then."""

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
