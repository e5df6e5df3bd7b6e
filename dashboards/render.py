"""Renders all dashboards as JSON and all rules as YAML, by file name."""

from __future__ import annotations

import json
from typing import Any

from grafanalib._gen import DashboardEncoder

from .boards.fleet import fleet_dashboard
from .boards.itself import itself_dashboard
from .boards.job import job_dashboard
from .boards.node import node_dashboard
from .boards.tuning import tuning_dashboard
from .kubernetes import kustomization
from .rules.rule_files import render_rules
from .tidy import dumps, tidy

__all__ = ["render"]

_DRAWN = {
    "fleet.json": fleet_dashboard, "node.json": node_dashboard, "job.json": job_dashboard,
    "tuning.json": tuning_dashboard, "itself.json": itself_dashboard,
}  # fmt: skip


def render() -> dict[str, str]:
    """Return file name -> text of every dashboard (JSON), of the rules (YAML), and of the dashboards' kustomization."""
    drawn = {name: dumps(_plain(draw())) for name, draw in _DRAWN.items()}
    return drawn | render_rules() | {"kustomization.yaml": kustomization(drawn)}


def _plain(dashboard: object) -> Any:  # noqa: ANN401  a JSON value is of any type
    """Return `dashboard`, with grafanalib's nested objects, as plain, tidy JSON values."""
    return tidy(json.loads(json.dumps(dashboard, cls=DashboardEncoder)))
