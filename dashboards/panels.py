"""Builds panels, each with a title, help, queries, a unit and a text for "no data", and places them.

None of these has a default, unlike in grafanalib: a panel that just says "No data" does not tell whether that is good
news.  The help of each panel ends with the catalog's description of its metrics.

Panels of a row are placed from left to right, so that they cannot overlap.
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
"""Thresholds: (value, colour from there on).  Below the first the colour is neutral."""


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression and the name of its series; `instant` requests only the last value."""

    expression: str
    legend: str
    instant: bool = False


Panelled: TypeAlias = tuple[int, int, core.Panel]
"""Width, height and panel."""


@dataclass(frozen=True, slots=True)
class Section:
    """A row of the dashboard, with panels in reading order."""

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
    """Return `steps` in Grafana's format.  The base has the value null, meaning minus infinity, and must be present."""
    return [{"color": base, "value": None}, *({"value": value, "color": shade} for value, shade in steps)]


def colour(series: str, shade: str) -> dict[str, Any]:
    """Return the override that draws the series called `series` in `shade`."""
    return look(series, color={"mode": "fixed", "fixedColor": shade})


def look(series: str, *, regex: bool = False, **properties: Any) -> dict[str, Any]:  # noqa: ANN401  a property is of any type
    """Return an override of field properties for the series `series`; `__` in names of properties is a dot."""
    return {
        "matcher": {"id": "byRegexp" if regex else "byName", "options": series},
        "properties": [{"id": name.replace("__", "."), "value": value} for name, value in properties.items()],
    }


NAMES = {
    CLUSTER: "Cluster", JOB: "Job", NODE: "Node", GPU: "GPU", "cuda": "CUDA", "uuid": "UUID", "mig": "MIG",
    "os": "Distribution", "pid": "PID", "pci_bus_id": "PCI bus id", "remote_pci_bus_id": "Remote PCI bus id",
}  # fmt: skip
"""Headings of columns whose label is not readable."""


def heads(label: str) -> str:
    """Return the heading for the column of `label`."""
    words = label.replace("_", " ")
    return NAMES.get(label) or words[0].upper() + words[1:]


def _told_apart(queries: Sequence[Query], overrides: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return `overrides`, and for each line with a fixed name a colour that colour-blind people can distinguish.

    Lines named by labels (ranks, GPUs) get Grafana's colours and a legend.
    """
    taken = {rule["matcher"]["options"] for rule in overrides if any(p["id"] == "color" for p in rule["properties"])}
    names = [query.legend for query in queries if "{{" not in query.legend and query.legend not in taken]
    return [*(colour(name, shade) for name, shade in zip(names, LINE_COLOURS, strict=False)), *overrides]


def in_order(*names: str) -> list[dict[str, Any]]:
    """Return overrides that give the lines `names` the colours of the palette, in order."""
    return [colour(name, shade) for name, shade in zip(names, LINE_COLOURS, strict=False)]


def columns(*names: str) -> list[dict[str, Any]]:
    """Return the transformations that keep the columns `names` of a table, in this order."""
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
    """Return a panel of lines over time; `empty` is its text without series.

    `limit` and `low` fix the ends of the axis (1 and 0 for shares of a whole); the axis reaches at least to
    `soft_limit`, so that a bound is visible.  `repeat` is the variable to repeat the panel for.
    """
    if unit == "none" and soft_limit is None:
        soft_limit = 1  # the axis of counts that are all zero would reach up to a hundred
    # A legend table of sixteen ranks would leave no room for lines; the tooltip has the numbers.
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
    """Return a panel with one big number per series, or its name, or both."""
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
        # grafanalib never writes the `thresholds` of a Stat; the panel's would stay "".
        extraJson={
            "fieldConfig": {"defaults": {"thresholds": {"mode": "absolute", "steps": thresholds_of(thresholds)}}}
        },
    )


def state_timeline(title: str, text: str, queries: Sequence[Query], *, empty: str, shade: str) -> core.StateTimeline:
    """Return a panel with one bar per series, drawn in `shade` while the series exists.

    Grafana's state timeline does not show `empty` yet (grafana#88004, open).
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
    """Return a table of the last values, one row per series, after `transformations`."""
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
    is_horizontal: bool = False,
) -> core.BarChart:
    """Return stacked bars, one per value of `x_field`, from the table after `transformations`.

    With `is_horizontal` there is room for long names beside the bars.
    """
    return core.BarChart(
        title=title,
        description=_help(text, queries),
        dataSource=DATASOURCE,
        targets=_targets(queries, as_table=True),
        transformations=list(transformations),
        stacking="normal",
        orientation="horizontal" if is_horizontal else "auto",
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
            row.panels = panels  # they take no room until the row is opened
            placed.append(row)
        else:
            placed += [row, *panels]
            y = bottom
    for number, panel in enumerate((p for top in placed for p in (top, *getattr(top, "panels", ()))), start=1):
        panel.id = number
    return placed


def _flow(section: Section, top: int) -> int:
    """Set positions from left to right, line by line, starting at `top`; return where the section ends."""
    x, y, bottom = 0, top, top
    for width, height, panel in section.panels:
        assert 0 < width <= GRID_COLUMNS, f"{panel.title}: {width} columns"
        if x + width > GRID_COLUMNS:
            x, y = 0, bottom
        panel.gridPos = core.GridPos(h=height, w=width, x=x, y=y)
        x, bottom = x + width, max(bottom, y + height)
    return bottom
