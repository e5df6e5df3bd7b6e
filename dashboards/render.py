"""Which dashboards are there, and what are their files called?  The one place where drawing becomes JSON text."""

from __future__ import annotations

import json
from typing import Any

from grafanalib._gen import DashboardEncoder

from pacecar.dashboards.job import job_dashboard
from pacecar.dashboards.tidy import dumps, tidy

__all__ = ["render"]


def render() -> dict[str, str]:
    """Return file name -> JSON text of every dashboard."""
    return {"job.json": dumps(_plain(job_dashboard()))}


def _plain(dashboard: object) -> Any:  # noqa: ANN401  a JSON value is of any type
    """Return `dashboard` as plain, tidy JSON values; grafanalib leaves its own objects at every depth."""
    return tidy(json.loads(json.dumps(dashboard, cls=DashboardEncoder)))
