"""Prometheus itself understands every expression, and each finds something in the series of the catalog."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest

from pacecar.dashboards.boards.fleet import NODES_TOP
from pacecar.metrics.catalog import CATALOG, Metric, MetricKind
from pacecar.records import LEDGER_HEADINGS
from tests.dashboards.conftest import drawing_panels
from tests.dashboards.promql import VARIABLES, check, filled_in
from tests.kit.tools import find_tool

LAUNCH = VARIABLES["$launch"]
VALUES = {
    "training_job": ["train"], "launch": [LAUNCH], "rank": ["0", "1"], "heading": list(LEDGER_HEADINGS),
    "mode": ["idle", "user"],
    "outcome": ["ok", "failed", "kept", "rolled_back", "barred", "abandoned", "miss"], "clock": ["sm", "memory"],
    "knob": ["bucket_bytes", "micro_batch"], "phase": ["forward", "backward"], "state": ["frozen", "watching"],
    "reason": ["hw_thermal_slowdown"], "severity": ["uncorrected"], "lifetime": ["volatile"], "kind": ["some"],
    "since": ["probe", "later"], "spare": ["none", "few"],
}  # fmt: skip
"""Labels that expressions match on; any other label gets one value."""


@pytest.fixture
def promtool() -> Path:
    return find_tool("promtool")


AT_ZERO = {"pacecar_gpu_up", "pacecar_gpu_nvlink_link_state"}
"""Gauges for which zero is what panels look for."""


def series() -> list[dict[str, str]]:
    """Every series of the catalog for two ranks on one node: gauges stand at 1, counters grow by 8 every 15 s.

    The headings of the ledger grow by 1 each, so that they sum to the wall time, and overlapped communication is half
    of all communication.
    """
    made = []
    for metric in CATALOG:
        choices = [VALUES.get(label, ["x"]) for label in metric.labels]
        growth = {
            "pacecar_job_ledger_seconds_total": 1,
            "pacecar_job_step_wall_seconds_total": len(LEDGER_HEADINGS),
            "pacecar_job_overlapped_communication_seconds_total": 4,
        }
        values = (
            f"0+{growth.get(metric.name, 8)}x40"
            if metric.kind is MetricKind.COUNTER
            else f"{int(metric.name not in AT_ZERO)}x40"
        )
        if metric.kind is MetricKind.HISTOGRAM:
            made += histogram_series(metric)
            continue
        for combination in itertools.product(*choices):
            pairs = dict(zip(metric.labels, combination, strict=True)) | {"instance": "node1:9850"}
            labels = ", ".join(f'{label}="{value}"' for label, value in pairs.items())
            made.append({"series": f"{metric.name}{{{labels}}}", "values": values})
    return made


def histogram_series(metric: Metric) -> list[dict[str, str]]:
    """The buckets of a histogram of which half is below a second, for a Prometheus that knows no native ones."""
    labels = ", ".join(f'{label}="{VALUES[label][0]}"' for label in metric.labels) + ', instance="node1:9850"'
    growth = {"0.5": 0, "1.0": 5, "2.0": 10, "+Inf": 10}
    return [
        {"series": f'{metric.name}_bucket{{{labels}, le="{bound}"}}', "values": f"0+{by}x40"}
        for bound, by in growth.items()
    ]


@pytest.mark.slow
def test_percentiles_are_those_of_the_buckets_where_there_is_no_native_histogram(promtool, drawn, tmp_path):
    """Half of the steps take up to a second, the others up to two: within a bucket Prometheus takes them as spread."""
    panel = next(p for p in drawing_panels(drawn["job"]) if p["title"] == "Step time: median and slowest")
    asked = [
        {"expr": filled_in(t["expr"]), "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}
        for t, value in zip(panel["targets"], (1.0, 1.9, 1.98), strict=True)
    ]
    check(promtool, tmp_path, *asked, series=series())


def test_promtool_parses_every_expression(promtool, expressions, tmp_path):
    rules = [
        {"record": f"panel:{index}:expr", "expr": filled_in(expression), "labels": {"where": where}}
        for index, (where, expression) in enumerate(expressions.items())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}), encoding="utf-8")
    ran = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert f"{len(expressions)} rules found" in ran.stdout


@pytest.mark.slow
def test_no_expression_is_empty_when_every_metric_is_there(promtool, expressions, tmp_path):
    """`absent` of an expression is empty exactly when the expression is not."""
    questions = [
        {"expr": f"absent({filled_in(expression)})", "eval_time": "5m", "exp_samples": []}
        for expression in expressions.values()
    ]
    check(promtool, tmp_path, *questions, series=series())


@pytest.mark.slow
def test_an_empty_expression_would_be_noticed(promtool, tmp_path):
    question = {"expr": 'absent(pacecar_job_steps_total{training_job="other"})', "eval_time": "5m", "exp_samples": []}
    with pytest.raises(AssertionError, match="got:"):
        check(promtool, tmp_path, question, series=series())


@pytest.mark.slow
def test_ledger_shares_sum_to_one_and_overlap_is_what_was_put_in(promtool, drawn, tmp_path):
    panels = drawing_panels(drawn["job"])
    by_title = {panel["title"]: [filled_in(t["expr"]) for t in panel["targets"]] for panel in panels}
    total = " + ".join(f"({expression})" for expression in by_title["Ledger"])
    by_rank = by_title["Ledger by rank"][0]
    whole = [{"labels": "{}", "value": 1000000}]
    ranks = [{"labels": f'{{rank="{rank}"}}', "value": 1000000} for rank in (0, 1)]
    halves = [{"labels": f'{{rank="{rank}"}}', "value": 0.5} for rank in (0, 1)]
    check(
        promtool,
        tmp_path,
        {"expr": f"round(1000000 * ({total}))", "eval_time": "5m", "exp_samples": whole},
        {"expr": f"round(1000000 * sum by (rank) ({by_rank}))", "eval_time": "5m", "exp_samples": ranks},
        {"expr": by_title["Overlap ratio"][0], "eval_time": "5m", "exp_samples": halves},
        series=series(),
    )


def test_the_first_decision_of_a_job_is_marked_and_the_mark_goes(promtool, expressions, tmp_path):
    """A counter that is born at 1 never increases: without more care the first decision would have no mark."""
    mark = filled_in(expressions["tuning: annotation Decisions"])
    born = {
        "series": f'pacecar_tuner_decisions_total{{training_job="train", launch="{LAUNCH}", knob="micro_batch",'
        ' kind="trial"}',
        "values": "_x8 1x40",  # appears at 2m
    }
    seen = [{"labels": born["series"], "value": 1}]
    check(
        promtool,
        tmp_path,
        {"expr": mark, "eval_time": "1m45s", "exp_samples": []},
        {"expr": mark, "eval_time": "2m", "exp_samples": seen},
        {"expr": mark, "eval_time": "3m30s", "exp_samples": []},
        series=[born],
    )


def rows(promtool, folder, drawn, title, column, *, series, expected):
    """Ask for one column of a table of the Fleet dashboard, of all nodes."""
    panel = next(panel for panel in drawing_panels(drawn["fleet"]) if panel["title"].startswith(title))
    renamed = panel["transformations"][1]["options"]["renameByName"]
    ref = next(key.removeprefix("Value #") for key, name in renamed.items() if name == column and "#" in key)
    expression = next(target["expr"] for target in panel["targets"] if target["refId"] == ref)
    question = {"expr": filled_in(expression.replace("$node", ".*")), "eval_time": "5m", "exp_samples": expected}
    check(promtool, folder, question, series=series)


@pytest.mark.slow
def test_the_link_of_a_node_is_busy_whichever_way_it_is(promtool, drawn, tmp_path):
    """`a or b` of two metrics with the same labels is a alone: a node that only sends looked idle."""
    series = [{"series": 'pacecar_build_info{instance="n1"}', "values": "1x40"}]
    for way, interface, share in (("receive", "eth0", 0.1), ("transmit", "eth0", 0.9), ("receive", "eth1", 0.3)):
        name = f'pacecar_host_network_{way}_utilization_ratio{{instance="n1", interface="{interface}"}}'
        series.append({"series": name, "values": f"{share}x40"})
    expected = [{"labels": '{instance="n1"}', "value": 0.9}]
    rows(promtool, tmp_path, drawn, "Nodes, ", "Link", series=series, expected=expected)


def test_nvlinks_that_a_board_does_not_connect_are_not_down(promtool, drawn, tmp_path):
    gpu = 'instance="n1", gpu="0"'
    series = [
        {"series": f'pacecar_gpu_nvlink_link_state{{{gpu}, link="{link}"}}', "values": f"{state}x40"}
        for link, state in enumerate((0, 0, 1))
    ]
    series.append({"series": f'pacecar_gpu_nvlink_info{{{gpu}, link="1"}}', "values": "1x40"})
    expected = [{"labels": f"{{{gpu}}}", "value": 1}]
    rows(promtool, tmp_path, drawn, "GPUs with faults", "NVLinks down", series=series, expected=expected)


@pytest.mark.slow
def test_the_table_of_nodes_is_bounded_and_has_those_whose_network_is_ill(promtool, drawn, tmp_path):
    series = []
    for number in range(80):
        node = f'instance="n{number:02}"'
        again = 9 if number == 0 else 0  # the node that stalls least
        series += [
            {"series": f"pacecar_build_info{{{node}}}", "values": "1x40"},
            {"series": f"pacecar_host_cpu_utilization_ratio{{{node}}}", "values": "0.5x40"},
            {"series": f"pacecar_host_tcp_segments_sent_total{{{node}}}", "values": "0+100x40"},
            {"series": f"pacecar_host_tcp_segments_retransmitted_total{{{node}}}", "values": f"0+{again}x40"},
        ]
        if number < 79:  # the last node's kernel does not count it
            stalled = f'pacecar_host_pressure_stalled_seconds_total{{{node}, kind="some", resource="io"}}'
            series.append({"series": stalled, "values": f"0+{number / 8}x40"})
    panel = next(panel for panel in drawing_panels(drawn["fleet"]) if panel["title"].startswith("Nodes, "))
    for target in panel["targets"]:
        lines = filled_in(target["expr"].replace("$node", ".*"))
        over = {"expr": f"count({lines}) > {NODES_TOP * 2}", "eval_time": "5m", "exp_samples": []}
        check(promtool, tmp_path, over, series=series)
    cpu = filled_in(panel["targets"][1]["expr"].replace("$node", ".*"))
    shown = [{"labels": f'{{instance="n{number:02}"}}', "value": 0.5} for number in (0, 78)]
    both = {"expr": f'({cpu}) and on (instance) pacecar_build_info{{instance=~"n00|n78"}}', "exp_samples": shown}
    check(promtool, tmp_path, both | {"eval_time": "5m"}, series=series)


def test_fast_times_are_of_the_range_shown_at_each_point_of_a_graph(promtool, expressions, tmp_path):
    """Without `@ end()` each point would compare with a range of its own, and read it anew."""
    looking_back = [text for text in expressions.values() if "quantile_over_time" in text]
    assert len(looking_back) >= 3
    for text in looking_back:
        assert text.count("[$__range] @ end()") == text.count("quantile_over_time"), text
    slower = next(text for where, text in expressions.items() if "Pace against its own baseline" in where)
    series = [
        {"series": f'pacecar_job_pace_seconds{{training_job="train", launch="{LAUNCH}"}}', "values": "0.5x20 1x20"}
    ]
    expected = [{"labels": "{}", "value": 1}]
    check(promtool, tmp_path, {"expr": filled_in(slower), "eval_time": "6m", "exp_samples": expected}, series=series)


@pytest.mark.parametrize("page", ["identity.md", "start/kubernetes.md", "metrics.md"])
def test_the_documented_join_holds_with_two_jobs_of_one_name_on_two_nodes(promtool, tmp_path, page):
    """By name and rank alone both sides have two series for one: a many-to-many match, which is an error."""
    text = (Path(__file__).resolve().parents[2] / "docs" / page).read_text(encoding="utf-8")
    joins = re.findall(
        r"pacecar_job_step_duration_seconds\s+\* on \([^)]*\) group_left \([^)]*\) pacecar_rank_info", text
    )
    assert joins
    labels = [f'training_job="torchrun-29500", rank="0", instance="n{n}", launch="{n:016x}"' for n in (1, 2)]
    planted = [
        {"series": f"{metric}{{{of}{extra}}}", "values": f"{value}x20"}
        for value, of in enumerate(labels, start=1)
        for metric, extra in (("pacecar_job_step_duration_seconds", ""), ("pacecar_rank_info", ', host="h", pid="1"'))
    ]
    planted = [row | ({"values": "1x20"} if "rank_info" in row["series"] else {}) for row in planted]
    asked = [
        {"expr": f"sum by (launch) ({join})", "eval_time": "2m", "exp_samples": [
            {"labels": f'{{launch="{n:016x}"}}', "value": n} for n in (1, 2)]}
        for join in joins
    ]  # fmt: skip
    check(promtool, tmp_path, *asked, series=planted)
