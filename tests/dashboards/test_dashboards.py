"""Every dashboard is one that Grafana can load and that people can read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

from pacecar.dashboards.palette import BAD, GOOD, HEADING_COLOURS, NEUTRAL, WARN
from pacecar.dashboards.queries import CLUSTER, JOB, NODE, metrics_in
from pacecar.metrics.catalog import CATALOG
from pacecar.records import LEDGER_HEADINGS
from tests.dashboards.conftest import drawing_panels

COLOURS = {*HEADING_COLOURS.values(), GOOD, WARN, BAD, NEUTRAL}

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
    found = [path for path, value in walk(dashboard) if value is None or value == ""]
    # The base of thresholds is null: Grafana's word for minus infinity.
    assert [path for path in found if not path.endswith("steps.0.value")] == []


def test_thresholds_are_lists_that_rise_from_minus_infinity(panels):
    for panel in panels:
        steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
        assert isinstance(steps, list), panel["title"]
        assert steps[0]["value"] is None, panel["title"]
        values = [step["value"] for step in steps[1:]]
        assert values == sorted(set(values)), panel["title"]


def test_panel_ids_are_unique(dashboard, panels):
    ids = [panel["id"] for panel in (*panels, *(p for p in dashboard["panels"] if p["type"] == "row"))]
    assert len(ids) == len(set(ids)) > 15


def test_titles_are_unique(panels):
    titles = [panel["title"] for panel in panels]
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
            (metric,) = metrics_in([name])
            assert set(used) <= {*metric.labels, NODE, CLUSTER}, f"{where}: {name} has no such label: {used}"
            assert {JOB, NODE} & set(used), f"{where}: {name} is not bound to the job or its nodes"
            assert CLUSTER in used, f"{where}: {name} is not bound to the cluster"


def test_every_grouping_and_legend_label_exists(panels):
    for panel in panels:
        for target in panel["targets"]:
            known = {
                NODE,
                CLUSTER,
                "le",
                *(label for metric in metrics_in([target["expr"]]) for label in metric.labels),
            }
            groups = re.findall(r"(?:by|on|group_left) \(([^)]*)\)", target["expr"])
            named = {label.strip() for group in groups for label in group.split(",") if label.strip()}
            named |= set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            assert named <= known, f"{panel['title']}: {named - known}"


NOT_DRAWN = {
    "pacecar_daemon_config_last_reload_success_timestamp_seconds": "for alerts; success is drawn",
    "pacecar_gpu_memory_free_bytes": "size minus used, and both are drawn",
    **{
        f"pacecar_daemon_otlp_{name}": "for daemons that push; a store that does not scrape has its own dashboards"
        for name in ("exports_total", "export_duration_seconds", "success_age_seconds")
    },
    "pacecar_job_hang_collectives": "for the alert about hangs, which names the rank with the fewest",
    "pacecar_job_samples_guessed": "the help of the panels of samples says it",
    "pacecar_job_start_time_seconds": "orders the launches to choose from",
}
"""Metric -> why it is on no panel."""


def test_every_metric_of_the_catalog_is_drawn_or_left_out_with_a_reason(expressions):
    drawn = {metric.name for metric in metrics_in(expressions.values())}
    assert {metric.name for metric in CATALOG} - drawn == set(NOT_DRAWN)
    assert all(len(reason) > 10 for reason in NOT_DRAWN.values())


def test_counters_are_never_drawn_raw(panels):
    """The height of a counter says when the process was started; only totals that are read as totals stand alone."""
    read_as_totals = {
        "pacecar_tuner_decisions_total", "pacecar_tuner_verdicts_total", "pacecar_tuner_orders_total",
        "pacecar_job_step_wall_seconds_total", "pacecar_gpu_driver_openings_total",
        "pacecar_job_stragglers_total",
    }  # fmt: skip
    for panel in panels:
        for target in panel["targets"]:
            for name, matchers in SELECTOR.findall(target["expr"]):
                raw = f"{name}{{{matchers}}}["
                if name.endswith("_total") and name not in read_as_totals:
                    assert raw in target["expr"], f"{panel['title']}: {name} without rate or increase"


def test_each_heading_keeps_its_colour_and_its_place_on_every_panel(drawn):
    panels = drawing_panels(drawn["job"])
    stacks = [p for p in panels if {"byName"} == {o["matcher"]["id"] for o in p["fieldConfig"].get("overrides", [])}]
    stacks = [p for p in stacks if p["fieldConfig"]["overrides"][1:2]]
    stacks = [p for p in stacks if p["fieldConfig"]["overrides"][1]["matcher"]["options"] == "exposed_communication"]
    assert len(stacks) == 4
    for panel in stacks:
        colours = {
            o["matcher"]["options"]: o["properties"][0]["value"]["fixedColor"]
            for o in panel["fieldConfig"]["overrides"]
            if o["properties"][0]["id"] == "color"
        }
        assert colours == HEADING_COLOURS
        if panel["type"] == "timeseries":
            assert tuple(target["legendFormat"] for target in panel["targets"]) == LEDGER_HEADINGS


def test_all_colours_are_told_apart_by_the_colour_blind(dashboard):
    """Those of Okabe and Ito, and no red against green."""
    written = {str(value) for _, value in walk(dashboard) if isinstance(value, str)}
    assert {text for text in written if re.fullmatch("#[0-9A-Fa-f]{6}", text)} <= COLOURS
    assert not written & {"green", "red", "dark-red", "semi-dark-green", "yellow"}


def variables_of(dashboard: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {variable["name"]: variable for variable in dashboard["templating"]["list"]}


def test_each_dashboard_has_the_variables_that_it_needs(drawn):
    assert {name: list(variables_of(dashboard)) for name, dashboard in drawn.items()} == {
        "fleet": ["datasource", "cluster", "job", "node"],
        "node": ["datasource", "cluster", "node", "gpu"],
        "job": ["datasource", "cluster", "job", "launch", "node", "gpu", "rank"],
        "tuning": ["datasource", "cluster", "job", "launch", "node", "rank"],
        "itself": ["datasource", "cluster", "job", "node"],
    }


def test_every_variable_that_is_used_is_there(dashboard):
    known = {
        *variables_of(dashboard),
        "__rate_interval",
        "__interval",
        "__interval_ms",
        "__range",
        "__value",
        "__data",
        "__url_time_range",
        "__all",
    }
    for where, value in walk(dashboard):
        if isinstance(value, str):
            used = set(re.findall(r"\$\{?(\w+)", value))
            assert used <= known, f"{where}: {used - known}"


def test_a_variable_asks_only_for_what_stands_left_of_it(dashboard):
    known = {"datasource", "__range"}
    for name, variable in variables_of(dashboard).items():
        if variable["type"] == "query":
            assert set(re.findall(r"\$(\w+)", variable["query"])) <= known, name
        known.add(name)


def test_all_is_a_short_regex_that_matches_what_has_no_such_label(dashboard):
    """All of 10 000 ranks must not become a regex of 10 000 numbers; and few have several clusters."""
    for name, variable in variables_of(dashboard).items():
        if variable["includeAll"]:
            assert variable["current"]["value"] == ["$__all"], f"{name} must begin at All"
            one_job = not variables_of(dashboard).get("job", {"multi": True})["multi"]
            short = ".+" if name == "rank" else ".*"
            assert variable.get("allValue") == (None if one_job and name == "node" else short), name


def test_every_dashboard_leads_to_all_others_and_takes_the_selection_along(drawn):
    uids = {dashboard["uid"] for dashboard in drawn.values()}
    for dashboard in drawn.values():
        assert {link["url"] for link in dashboard["links"]} == {f"/d/{uid}" for uid in uids - {dashboard["uid"]}}
        assert all(link["includeVars"] and link["keepTime"] for link in dashboard["links"])


def test_what_a_table_leads_to_exists_and_knows_the_variable(drawn):
    known = {dashboard["uid"]: variables_of(dashboard) for dashboard in drawn.values()}
    found = [value for _, value in walk(drawn) if isinstance(value, str) and value.startswith("/d/")]
    to_one = [url for url in found if "?" in url]
    assert len(to_one) >= 6
    for url in to_one:
        uid, variable = re.match(r"/d/([\w-]+)\?var-(\w+)=", url).groups()
        assert variable in known[uid], url


def test_a_ranking_names_and_sorts_by_columns_that_its_queries_give(dashboard):
    for panel in drawing_panels(dashboard):
        steps = {step["id"]: step["options"] for step in panel.get("transformations", [])}
        if "merge" not in steps:
            continue
        renamed = steps["organize"]["renameByName"]
        values = [f"Value #{target['refId']}" for target in panel["targets"]]
        assert [key for key in renamed if key.startswith("Value #")] == values, panel["title"]
        assert steps["sortBy"]["sort"][0]["field"] in renamed.values(), panel["title"]
        grouped = {tuple(re.findall(r"by \(([^)]*)\)", target["expr"])[:1]) for target in panel["targets"]}
        assert len(grouped) == 1, f"{panel['title']}: rows that merge must be grouped alike: {grouped}"
        titles = set(renamed.values())
        for override in panel["fieldConfig"]["overrides"]:
            assert override["matcher"]["id"] == "byType" or override["matcher"]["options"] in titles, panel["title"]


def test_what_is_asked_first_is_seen_without_scrolling_on_a_laptop(dashboard):
    """1440 x 900 shows some 20 rows of the grid (30 pixels and a gap of 8 each) under Grafana's own bars."""
    first = [panel for panel in dashboard["panels"] if panel["type"] != "row" and panel["gridPos"]["y"] < 20]
    assert {"stat"} < {panel["type"] for panel in first}


def test_every_query_goes_to_the_chosen_data_source(panels):
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


def test_the_title_of_a_narrow_panel_is_not_cut(panels):
    for panel in panels:
        if panel["gridPos"]["w"] == 3:
            assert len(panel["title"]) <= 12, panel["title"]


LAPTOP_PIXELS = 1366 - 30
"""Of a small laptop, without Grafana's margins."""


def test_a_table_of_the_worst_shows_all_its_columns_on_a_laptop(panels):
    """Names are not cut, and what they get is not taken from the last column."""
    for panel in panels:
        if panel["type"] != "table" or panel["transformations"][-1]["id"] != "sortBy":
            continue
        columns = set(panel["transformations"][1]["options"]["renameByName"].values())
        widths: dict[str, int] = {}
        for rule in panel["fieldConfig"]["overrides"]:
            said = {one["id"]: one["value"] for one in rule["properties"]}
            assert "custom.minWidth" not in said, f"{panel['title']}: Grafana adds it to the shares"
            if "custom.width" in said:
                widths[rule["matcher"]["options"]] = said["custom.width"]
        assert {"Job", "Node", "Knob"} & columns <= widths.keys(), panel["title"]
        least = panel["fieldConfig"]["defaults"]["custom"]["minWidth"]
        wanted = sum(widths.get(column, least) for column in columns)
        assert wanted <= LAPTOP_PIXELS * panel["gridPos"]["w"] / 24, f"{panel['title']}: {wanted} pixels"
