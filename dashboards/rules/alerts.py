"""What is worth waking somebody, and what only a look?  The alert rules, a group a subject.

An alert that fires on a healthy machine is switched off by the second week.  So each has a bound with a source or a
reason, waits (`for`) as long as the thing may pass by itself, and is left out where a number is normal: a GPU at its
power limit, an Xid of the program's own making, a finished job that says nothing.

`critical`: work is lost or stands still until somebody acts.  `warning`: it is slower or less safe than it could be.
Every alert leads to a section of docs/runbook.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["BY", "RUNBOOK", "Alert", "Group", "anchor"]

RUNBOOK = "docs/runbook.md"

BY = "GPU {{ $labels.gpu }} of {{ $labels.instance }}"
"""How a GPU is called in the words of an alert."""


def anchor(name: str) -> str:
    """Return the heading's anchor of the alert `name` in the runbook, as GitHub and Grafana make it."""
    return name.lower()


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule: when it fires, how long it must hold, and what is said then."""

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
