"""Which files are generated, and what are they called?  The one place where drawing becomes text."""

from __future__ import annotations

import json
from typing import Any

from grafanalib._gen import DashboardEncoder

from pacecar.dashboards.fleet import fleet_dashboard
from pacecar.dashboards.itself import itself_dashboard
from pacecar.dashboards.job import job_dashboard
from pacecar.dashboards.node import node_dashboard
from pacecar.dashboards.rules import render_rules
from pacecar.dashboards.tidy import dumps, tidy
from pacecar.dashboards.tuning import tuning_dashboard

__all__ = ["render"]

_DRAWN = {
    "fleet.json": fleet_dashboard, "node.json": node_dashboard, "job.json": job_dashboard,
    "tuning.json": tuning_dashboard, "itself.json": itself_dashboard,
}  # fmt: skip


def render() -> dict[str, str]:
    """Return file name -> text of every dashboard (JSON) and of the rules (YAML)."""
    return {name: dumps(_plain(draw())) for name, draw in _DRAWN.items()} | render_rules()


def _plain(dashboard: object) -> Any:  # noqa: ANN401  a JSON value is of any type
    """Return `dashboard` as plain, tidy JSON values; grafanalib leaves its own objects at every depth."""
    return tidy(json.loads(json.dumps(dashboard, cls=DashboardEncoder)))
