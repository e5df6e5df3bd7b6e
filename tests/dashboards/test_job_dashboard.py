"""The dashboard of a job is one that Grafana can load and that people can read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from pacecar.catalog import CATALOG, by_name
from pacecar.dashboards.palette import HEADING_COLOURS
from pacecar.dashboards.queries import JOB, NODE, metrics_in
from pacecar.records import LEDGER_HEADINGS

SELECTOR = re.compile(r"(pacecar_[a-z0-9_]+)\{([^}]*)\}")
NAMED = re.compile(r"\bpacecar_[a-z0-9_]+")


def walk(value: Any, path: str = "$") -> Iterator[tuple[str, Any]]:
    yield path, value
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in children:
        yield from walk(item, f"{path}.{key}")


def boxes(panels: list[dict[str, Any]]) -> Iterator[tuple[str, set[tuple[int, int]]]]:
    for panel in panels:
        g = panel["gridPos"]
        assert g["x"] >= 0, panel["title"]
        assert g["x"] + g["w"] <= 24, panel["title"]
        yield (
            panel["title"],
            {(x, y) for x in range(g["x"], g["x"] + g["w"]) for y in range(g["y"], g["y"] + g["h"])},
        )


def test_nothing_is_null_or_an_empty_string(dashboard):
    """Where nothing was set grafanalib leaves both, and Grafana's code takes an empty string for a list."""
    assert [path for path, value in walk(dashboard) if value is None or value == ""] == []


def test_thresholds_are_lists_that_rise_from_a_base_without_a_value(panels):
    for panel in panels:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert isinstance(steps, list), panel["title"]
        assert "value" not in steps[0], panel["title"]
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(set(values)), panel["title"]


def test_panel_ids_are_unique(dashboard, panels):
    ids = [panel["id"] for panel in (*panels, *(p for p in dashboard["panels"] if p["type"] == "row"))]
    assert len(ids) == len(set(ids)) > 40


def test_titles_are_unique(panels):
    titles = [(panel["title"], panel["type"]) for panel in panels]
    assert len(titles) == len(set(titles))


def test_no_two_panels_overlap(dashboard):
    for one, two in combinations(boxes(dashboard["panels"]), 2):
        assert not one[1] & two[1], f"{one[0]} and {two[0]} overlap"
    for row in dashboard["panels"]:
        for one, two in combinations(boxes(row.get("panels", [])), 2):
            assert not one[1] & two[1], f"{one[0]} and {two[0]} overlap"


def test_every_panel_has_help_a_unit_and_a_word_for_nothing(panels):
    for panel in panels:
        defaults = panel["fieldConfig"]["defaults"]
        assert defaults["unit" if panel["type"] not in {"state-timeline"} else "noValue"], panel["title"]
        assert len(defaults["noValue"]) > 5, panel["title"]
        text, _, catalog = panel["description"].partition("\n\n")
        assert text.endswith("."), panel["title"]
        for metric in metrics_in(target["expr"] for target in panel["targets"]):
            assert metric.help in catalog, panel["title"]


def test_every_metric_in_an_expression_is_in_the_catalog_with_the_labels_used(expressions):
    for where, expression in expressions.items():
        selectors = SELECTOR.findall(expression)
        assert len(selectors) == len(NAMED.findall(expression)) > 0, f"{where}: a metric without a selector"
        for name, matchers in selectors:
            used = re.findall(r"(\w+)(?:=~|!~|!=|=)\"", matchers)
            assert set(used) <= {*by_name(name).labels, NODE}, f"{where}: {name} has no such label: {used}"
            assert {JOB, NODE} & set(used), f"{where}: {name} is not bound to the job or its nodes"


def test_every_grouping_and_legend_label_exists(panels):
    for panel in panels:
        for target in panel["targets"]:
            known = {NODE, *(label for metric in metrics_in([target["expr"]]) for label in metric.labels)}
            groups = re.findall(r"(?:by|on) \(([^)]*)\)", target["expr"])
            named = {label.strip() for group in groups for label in group.split(",") if label.strip()}
            named |= set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert named <= known, f"{panel['title']}: {named - known}"


def test_every_metric_of_the_catalog_is_drawn_or_left_out_with_a_reason(expressions):
    from pacecar.dashboards.job import NOT_DRAWN

    drawn = {metric.name for metric in metrics_in(expressions.values())}
    assert {metric.name for metric in CATALOG} - drawn == set(NOT_DRAWN)
    assert all(len(reason) > 10 for reason in NOT_DRAWN.values())


def test_counters_are_never_drawn_raw(panels):
    """The height of a counter says when the process was started; only totals that are read as totals stand alone."""
    read_as_totals = {"pacecar_tuner_decisions_total", "pacecar_tuner_verdicts_total"}
    for panel in panels:
        for target in panel["targets"]:
            for name, matchers in SELECTOR.findall(target["expr"]):
                raw = f"{name}{{{matchers}}}["
                if name.endswith("_total") and name not in read_as_totals:
                    assert raw in target["expr"], f"{panel['title']}: {name} without rate or increase"


def test_each_heading_keeps_its_colour_and_its_place_on_every_panel(panels):
    stacks = [p for p in panels if {"byName"} == {o["matcher"]["id"] for o in p["fieldConfig"].get("overrides", [])}]
    stacks = [p for p in stacks if p["fieldConfig"]["overrides"][0]["matcher"]["options"] == "compute"]
    assert len(stacks) == 4
    for panel in stacks:
        colours = {
            o["matcher"]["options"]: o["properties"][0]["value"]["fixedColor"]
            for o in panel["fieldConfig"]["overrides"]
        }
        assert colours == HEADING_COLOURS
        if panel["type"] == "timeseries":
            assert tuple(target["legendFormat"] for target in panel["targets"]) == LEDGER_HEADINGS


def test_variables_are_datasource_job_rank_and_node(dashboard):
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "rank", "node"]
    assert variables["rank"]["includeAll"]
    assert variables["rank"]["allValue"] == ".+", "All of 10 000 ranks must not become a regex of 10 000 numbers"
    assert "pacecar_rank_info" in variables["job"]["query"]


def test_every_query_goes_to_the_chosen_data_source(panels):
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])
