"""The generated dashboards, their panels and their expressions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("fleet", "node", "job", "tuning", "itself")


@pytest.fixture(scope="session")
def drawn() -> dict[str, dict[str, Any]]:
    """Name -> the dashboard as Grafana gets it, drawn anew."""
    pytest.importorskip("grafanalib", reason="the extra `dashboards` is not installed")
    from pacecar.dashboards.render import render

    texts = render()
    return {name: json.loads(texts[f"{name}.json"]) for name in NAMES}


@pytest.fixture(scope="session", params=NAMES)
def dashboard(request: pytest.FixtureRequest, drawn: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Each dashboard in turn."""
    return drawn[request.param]


def all_panels(dashboard: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every panel and row, including those in collapsed rows."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels", ())


def drawing_panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Every panel that draws something."""
    return [panel for panel in all_panels(dashboard) if panel["type"] != "row"]


@pytest.fixture(scope="session")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    """Every panel of one dashboard that draws something."""
    return drawing_panels(dashboard)


def expressions_of(name: str, dashboard: dict[str, Any]) -> dict[str, str]:
    """Place of an expression -> the expression, annotations included."""
    panels = drawing_panels(dashboard)
    found = {f"{name}: {p['title']} {t['refId']}": t["expr"] for p in panels for t in p["targets"]}
    found.update({f"{name}: annotation {a['name']}": a["expr"] for a in dashboard["annotations"]["list"]})
    return found


@pytest.fixture(scope="session")
def expressions(drawn: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The expressions of all dashboards."""
    return {where: text for name, dashboard in drawn.items() for where, text in expressions_of(name, dashboard).items()}
