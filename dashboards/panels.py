"""Builds panels, each with a title, a sentence of help, queries, a unit and a text for no data, and places them.

grafanalib lets each of these be left out.  The result is a panel that says "No data", and nobody can tell whether that
is good news.  So here none of them has a default.  The help of each panel ends with what the catalog says about the
metrics that it draws.

Positions are computed: panels of a row flow from left to right, so that none can overlap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from grafanalib import core

from .palette import LINE_COLOURS, NEUTRAL
from .queries import CLUSTER, GPU, JOB, NODE, RANK, metrics_in

__all__ = [
    "DATASOURCE",
    "Panelled",
    "Query",
    "Section",
    "Steps",
    "bar_chart",
    "colour",
    "columns",
    "heads",
    "in_order",
    "look",
    "place",
    "stat",
    "state_timeline",
    "table",
    "thresholds_of",
    "time_series",
]

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GRID_COLUMNS = 24
ROW_HEIGHT = 1

Steps = Sequence[tuple[float, str]]
"""Thresholds: from this value on, this colour.  Below the first the colour is neutral."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of its series; `instant` asks for the last value only."""

    expression: str
    legend: str
    instant: bool = False


Panelled: TypeAlias = tuple[int, int, core.Panel]
"""Width, height and panel."""


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the dashboard, panels in reading order."""

    title: str
    panels: Sequence[Panelled]
    collapsed: bool = False


def _targets(queries: Sequence[Query], *, as_table: bool = False) -> list[core.Target]:
    assert 0 < len(queries) <= 26, "refIds are one letter"
    return [
        core.Target(
            expr=query.expression,
            legendFormat=query.legend,
            refId=chr(ord("A") + index),
            instant=query.instant,
            format="table" if as_table else "time_series",
            datasource=DATASOURCE,
        )
        for index, query in enumerate(queries)
    ]


def _help(text: str, queries: Sequence[Query]) -> str:
    lines = [f"- `{metric.name}`: {metric.help}" for metric in metrics_in(q.expression for q in queries)]
    return "\n".join([text, "", *lines])


def thresholds_of(steps: Steps, base: str = NEUTRAL) -> list[dict[str, Any]]:
    """Return `steps` as Grafana writes them: null for the base, which is minus infinity.

    The base must not be left out: Grafana's code compares with it, and would stop at the first step for every value.
    """
    return [{"color": base, "value": None}, *({"value": value, "color": shade} for value, shade in steps)]


def colour(series: str, shade: str) -> dict[str, Any]:
    """Return the override that draws the series called `series` in `shade`."""
    return look(series, color={"mode": "fixed", "fixedColor": shade})


def look(series: str, *, regex: bool = False, **properties: Any) -> dict[str, Any]:  # noqa: ANN401  a property is of any type
    """Return an override of field properties for the series called `series` (dots are written `__`)."""
    return {
        "matcher": {"id": "byRegexp" if regex else "byName", "options": series},
        "properties": [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()],
    }


NAMES = {
    CLUSTER: "Cluster", JOB: "Job", NODE: "Node", GPU: "GPU", "cuda": "CUDA", "uuid": "UUID", "mig": "MIG",
    "os": "Distribution", "pid": "PID", "pci_bus_id": "PCI bus id", "remote_pci_bus_id": "Remote PCI bus id",
}  # fmt: skip
"""Headings of columns whose label is not readable as it is."""


def heads(label: str) -> str:
    """Return the heading of the column of `label`, in English words."""
    words = label.replace("_", " ")
    return NAMES.get(label) or words[0].upper() + words[1:]


def _told_apart(queries: Sequence[Query], overrides: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `overrides`, and a colour for each line whose name is fixed, from the palette for the colour-blind.

    Grafana has no such palette of its own.  Lines named by labels (ranks, GPUs) get Grafana's colours and a legend.
    """
    taken = {rule["matcher"]["options"] for rule in overrides if any(p["id"] == "color" for p in rule["properties"])}
    names = [query.legend for query in queries if "{{" not in query.legend and query.legend not in taken]
    return [*(colour(name, shade) for name, shade in zip(names, LINE_COLOURS, strict=False)), *overrides]


def in_order(*names: str) -> list[dict[str, Any]]:
    """Return overrides that give the lines called `names` the colours of the palette, whichever of them there are."""
    return [colour(name, shade) for name, shade in zip(names, LINE_COLOURS, strict=False)]


def columns(*names: str) -> list[dict[str, Any]]:
    """Return the transformations that keep the columns `names` of a table and put them in this order."""
    order = {name: index for index, name in enumerate(names)}
    return [
        {"id": "filterFieldsByName", "options": {"include": {"names": list(names)}}},
        {"id": "organize", "options": {
            "indexByName": order, "excludeByName": {}, "renameByName": {name: heads(name) for name in names}}},
    ]  # fmt: skip


def time_series(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str,
    empty: str,
    stacked: bool = False,
    stepped: bool = False,
    limit: float | None = None,
    low: float | None = None,
    soft_limit: float | None = None,
    decimals: int | None = None,
    thresholds: Steps = (),
    overrides: Iterable[Mapping[str, Any]] = (),
    repeat: str | None = None,
) -> core.TimeSeries:
    """Return a panel of lines over time.  `empty` is what it says when there is no series at all.

    `limit` and `low` fix the ends of the axis (1 and 0 for shares of a whole); `soft_limit` is the least that the axis
    reaches up to, so that a bound is in the picture.  `repeat` names the variable to repeat it for.
    """
    if unit == "none" and soft_limit is None:
        soft_limit = 1  # counts that are all zero would get an axis up to a hundred
    # A table of sixteen ranks leaves no room for their lines; the tooltip has the numbers.
    many = any(f"{{{{{label}}}}}" in query.legend for query in queries for label in (RANK, GPU))
    return core.TimeSeries(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries),
        unit=unit,
        thresholds=thresholds_of(thresholds),
        thresholdsStyleMode="dashed" if thresholds else "off",
        fillOpacity=80 if stacked else 0,
        lineWidth=0 if stacked else 1,
        stacking={"mode": "normal", "group": "A"} if stacked else {"mode": "none", "group": "A"},
        lineInterpolation="stepAfter" if stepped else "linear",
        showPoints="never",
        legendDisplayMode="list" if many else "table",
        legendCalcs=[] if many else ["mean", "max", "lastNotNull"],
        tooltipMode="multi",
        tooltipSort="none" if stacked else "desc",
        overrides=_told_apart(queries, list(overrides)),
        maxDataPoints=None,
        repeat=core.Repeat("h", repeat, 4) if repeat else core.Repeat(),
        extraJson={"fieldConfig": {"defaults": {
            "noValue": empty, "min": 0 if stacked or limit == 1.0 else low, "max": limit, "decimals": decimals,
            "custom": {"axisSoftMax": soft_limit, "axisSoftMin": 0 if unit == "none" else None}}}},
    )  # fmt: skip


def stat(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str,
    empty: str,
    thresholds: Steps = (),
    decimals: int | None = None,
    show: Literal["value", "name", "value_and_name"] = "value",
) -> core.Stat:
    """Return a panel of one big number per series, or of its name, or of both."""
    return core.Stat(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries),
        format=unit,
        noValue=empty,
        decimals=decimals,
        color={"mode": "thresholds"},
        colorMode="value",
        graphMode="area" if show == "value" else "none",
        reduceCalc="lastNotNull",
        textMode=show,
        maxDataPoints=None,
        # Stat has a `thresholds` of its own that it never writes; the panel's would stay "".
        extraJson={
            "fieldConfig": {"defaults": {"thresholds": {"mode": "absolute", "steps": thresholds_of(thresholds)}}}
        },
    )


def state_timeline(title: str, text: str, queries: Sequence[Query], *, empty: str, shade: str) -> core.StateTimeline:
    """Return a panel with one bar per series, drawn in `shade` while the series is there.

    Grafana's state timeline does not show `empty` yet (grafana#88004, open); it is set all the same.
    """
    return core.StateTimeline(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries),
        mergeValues=True,
        showValue="never",
        fillOpacity=80,
        colorMode="fixed",
        maxDataPoints=None,
        thresholds=thresholds_of(()),
        extraJson={"fieldConfig": {"defaults": {"noValue": empty, "color": {"mode": "fixed", "fixedColor": shade}}}},
    )


def table(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    empty: str,
    transformations: Sequence[Mapping[str, Any]],
    unit: str = "none",
    overrides: Iterable[Mapping[str, Any]] = (),
) -> core.Table:
    """Return a table of the last values, one row a series, after `transformations`."""
    return core.Table(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries, as_table=True),
        transformations=list(transformations),
        unit=unit,
        thresholds=thresholds_of(()),
        overrides=list(overrides),
        maxDataPoints=None,
        extraJson={
            "fieldConfig": {
                "defaults": {"noValue": empty, "custom": {"cellOptions": {"type": "auto"}, "minWidth": 70}}
            },
            "options": {"cellHeight": "sm"},
        },
    )


def bar_chart(
    title: str,
    text: str,
    queries: Sequence[Query],
    *,
    unit: str,
    empty: str,
    x_field: str,
    transformations: Sequence[Mapping[str, Any]],
    overrides: Iterable[Mapping[str, Any]],
    limit: float,
    is_lying: bool = False,
) -> core.BarChart:
    """Return stacked bars, one per value of `x_field`, of the table that `transformations` leave.

    With `is_lying` the bars are horizontal, which leaves room for long names beside them.
    """
    return core.BarChart(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries, as_table=True),
        transformations=list(transformations),
        stacking="normal",
        orientation="horizontal" if is_lying else "auto",
        showValue="never",
        fillOpacity=80,
        tooltipMode="multi",
        overrides=list(overrides),
        thresholdSteps=thresholds_of(()),
        maxDataPoints=None,
        extraJson={
            "options": {"xField": x_field},
            "fieldConfig": {"defaults": {"noValue": empty, "unit": unit, "min": 0, "max": limit}},
        },
    )


def place(sections: Sequence[Section]) -> list[core.Panel]:
    """Return the panels of all sections with positions and ids, a row panel before each section."""
    placed: list[core.Panel] = []
    y = 0
    for section in sections:
        row = core.RowPanel(title=section.title, collapsed=section.collapsed, maxDataPoints=None)
        row.gridPos = core.GridPos(h=ROW_HEIGHT, w=GRID_COLUMNS, x=0, y=y)
        y += ROW_HEIGHT
        panels = [panel for _, _, panel in section.panels]
        bottom = _flow(section, y)
        if section.collapsed:
            row.panels = panels  # what a collapsed row holds takes no room until it is opened
            placed.append(row)
        else:
            placed += [row, *panels]
            y = bottom
    for number, panel in enumerate((p for top in placed for p in (top, *getattr(top, "panels", ()))), start=1):
        panel.id = number
    return placed


def _flow(section: Section, top: int) -> int:
    """Set positions from left to right and line by line, beginning at `top`; return where the section ends."""
    x, y, bottom = 0, top, top
    for width, height, panel in section.panels:
        assert 0 < width <= GRID_COLUMNS, f"{panel.title}: {width} columns"
        if x + width > GRID_COLUMNS:
            x, y = 0, bottom
        panel.gridPos = core.GridPos(h=height, w=width, x=x, y=y)
        x, bottom = x + width, max(bottom, y + height)
    return bottom
