"""Prometheus itself understands every expression, and each finds something in the series of the catalog."""

from __future__ import annotations

import itertools
import json
import subprocess
from pathlib import Path

import pytest

from pacecar.catalog import CATALOG, Kind
from pacecar.records import LEDGER_HEADINGS
from tests.dashboards.conftest import drawing_panels
from tests.dashboards.promql import check, filled_in
from tests.tools import find_tool

VALUES = {
    "training_job": ["train"], "rank": ["0", "1"], "heading": list(LEDGER_HEADINGS), "mode": ["idle", "user"],
    "outcome": ["ok", "failed", "kept", "rolled_back", "barred", "abandoned", "miss"], "clock": ["sm", "memory"],
    "knob": ["bucket_bytes", "micro_batch"], "phase": ["forward", "backward"], "state": ["frozen", "watching"],
    "reason": ["hw_thermal_slowdown"], "severity": ["uncorrected"], "lifetime": ["volatile"], "kind": ["some"],
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
        growth = {"pacecar_job_ledger_seconds_total": 1, "pacecar_job_overlapped_communication_seconds_total": 4}
        values = (
            f"0+{growth.get(metric.name, 8)}x40"
            if metric.kind is Kind.COUNTER
            else f"{int(metric.name not in AT_ZERO)}x40"
        )
        for combination in itertools.product(*choices):
            pairs = dict(zip(metric.labels, combination, strict=True)) | {"instance": "node1:9850"}
            labels = ", ".join(f'{label}="{value}"' for label, value in pairs.items())
            made.append({"series": f"{metric.name}{{{labels}}}", "values": values})
    return made


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


def test_no_expression_is_empty_when_every_metric_is_there(promtool, expressions, tmp_path):
    """`absent` of an expression is empty exactly when the expression is not."""
    questions = [
        {"expr": f"absent({filled_in(expression)})", "eval_time": "5m", "exp_samples": []}
        for expression in expressions.values()
    ]
    check(promtool, tmp_path, *questions, series=series())


def test_an_empty_expression_would_be_noticed(promtool, tmp_path):
    question = {"expr": 'absent(pacecar_job_steps_total{training_job="other"})', "eval_time": "5m", "exp_samples": []}
    with pytest.raises(AssertionError, match="got:"):
        check(promtool, tmp_path, question, series=series())


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
        "series": 'pacecar_tuner_decisions_total{training_job="train", knob="micro_batch", kind="trial"}',
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
