"""What the tests of dashboards share: the drawn dashboard, its panels and its expressions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def dashboard() -> dict[str, Any]:
    """The job dashboard as Grafana gets it, drawn anew."""
    pytest.importorskip("grafanalib", reason="the extra `dashboards` is not installed")
    from pacecar.dashboards.render import render

    drawn: dict[str, Any] = json.loads(render()["job.json"])
    return drawn


def all_panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel and row, those inside collapsed rows too."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


@pytest.fixture(scope="session")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Every panel that draws something."""
    return [panel for panel in all_panels(dashboard) if panel["type"] != "row"]


@pytest.fixture(scope="session")
def expressions(dashboard: dict[str, Any], panels: list[dict[str, Any]]) -> dict[str, str]:
    """Where an expression stands -> the expression, annotations included."""
    found = {f"{p['title']} {t['refId']}": t["expr"] for p in panels for t in p["targets"]}
    found.update({f"annotation {a['name']}": a["expr"] for a in dashboard["annotations"]["list"]})
    return found
