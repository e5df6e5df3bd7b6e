"""What bench_tuning prints of its runs: ratios of the right things, nothing lost by how runs are kept."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest

from bench.tuning_figures import STOLEN_MAX, Run, compact, summary, table

NEVER = [1.0] * 10
TRIAL = [
    {"type": "tuner", "state": "warming"},
    {"type": "decision", "decision": 1, "expected_gain_ratio": 0.2},
    {"type": "verdict", "decision": 1, "measured_gain_ratio": 0.25, "trial_steps": 4},
    {"type": "decision", "decision": 2, "expected_gain_ratio": None},
    {"type": "verdict", "decision": 2, "measured_gain_ratio": -0.1, "trial_steps": 2},
]


def _case(*runs: Run, finals: dict[str, list[list[float]]] | None = None) -> dict[str, Any]:
    return {
        "case": "wide, 2 ranks, 1 Gbit/s",
        "curve_seconds": {"0": [1.00004, 1.00006]},
        "best_bytes": 1,
        "finals": finals or {},
        "runs": [asdict(run) for run in runs],
    }


def _rows(text: str) -> dict[str, list[str]]:
    """First cell of the head row -> cells of the (only) case."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith("|---")]
    return {lines[i - 1].split("|")[1].strip(): [c.strip() for c in lines[i + 1].split("|")[2:-1]] for i in heads}


@pytest.fixture
def case() -> dict[str, Any]:
    exact = Run("exact", [1.0] * 4 + [1.3] + [0.75] * 5, TRIAL, {"bucket_bytes": 1})
    finals = {"oracle, exact": [[0.7], [0.8]], "default": [[1.05], [1.0]]}
    never = Run("never", NEVER, stolen_ratio=0.02, stolen=[0.031] + [0.029] * 9)
    return _case(never, Run("oracle", [0.7] * 10, stolen_ratio=0.001), exact, finals=finals)


def test_each_table_says_what_its_head_says(case: dict[str, Any]) -> None:
    rows = _rows(summary([case]))
    assert rows["total against never"] == ["10", "2.0%", "1", "-30.0%", "-9.5%"]
    assert rows["end against oracle"] == ["+37.5% (+25.0% .. +50.0%)", "+0.0% (+0.0% .. +0.0%)"]
    assert rows["trial steps, slowest, slow steps"] == ["6, 10%, 1"]
    assert rows["expected and measured gain of each trial"] == ["20.0% / 25.0%", ""]
    assert "10%" in table("", ["never", "exact"], [Run(**run) for run in case["runs"]])


def test_a_short_summary_leaves_out_the_trials_and_where_others_arrived(case: dict[str, Any]) -> None:
    case["runs"].append(asdict(Run("tpe", [0.8] * 10)))
    rows = _rows(summary([case], is_short=True))
    assert list(rows) == ["total against never", "end against oracle"]
    assert rows["end against oracle"] == ["+37.5% (+25.0% .. +50.0%)", "+0.0% (+0.0% .. +0.0%)"]
    assert len(rows["total against never"]) == len(_rows(summary([case]))["total against never"])


def test_where_nothing_ran_side_by_side_the_end_is_the_typical_step_of_the_last_fifth(case: dict[str, Any]) -> None:
    assert _rows(summary([{**case, "finals": {}}]))["end against oracle"] == ["~ +42.9%", "~ +7.1%"]


def test_an_arm_that_was_not_run_has_empty_cells_and_one_without_trials_says_none(case: dict[str, Any]) -> None:
    lossy = Run("lossy", NEVER)
    other = _case(Run("never", NEVER), Run("oracle", NEVER), lossy)
    text = summary([case, other])
    assert "| 0, none, 0 |" in text
    first = next(line for line in text.splitlines() if line.startswith("| wide"))
    assert first.split("|")[-2].strip() == "", "lossy was not run in the first case"


def test_what_is_kept_in_a_file_gives_the_same_tables(case: dict[str, Any]) -> None:
    kept = json.loads(json.dumps(compact(case)))
    assert summary([kept]) == summary([case])
    assert kept["curve_seconds"]["0"] == [1.0, 1.0001]
    assert all(record["type"] != "tuner" for run in kept["runs"] for record in run["records"])


def test_files_from_before_the_stolen_time_was_kept_are_read(case: dict[str, Any]) -> None:
    for run in case["runs"]:
        del run["stolen_ratio"], run["stolen"]
    assert _rows(summary([case]))["total against never"][1:4] == ["", "", "-30.0%"]


def test_the_nearest_calm_steps_stand_for_a_disturbed_one(case: dict[str, Any]) -> None:
    loud = STOLEN_MAX + 0.01
    paces = [1.0, 2.0, 3.0, 9.0, 5.0, 5.0, 8.0]
    run = Run("exact", paces, stolen=[0.0, 0.0, 0.0, loud, STOLEN_MAX, 0.0, loud])
    assert run.calm_paces == [1.0, 2.0, 3.0, 4.0, 5.0, 5.0, 4.0]
    assert run.total == 24.0
    assert run.final == 4.0, "the last fifth is one step"
    assert run.slow_steps(4.0) == 2
    assert Run("exact", paces, stolen=[loud] * 7).total == sum(paces), "nothing to put in their place"
    case["runs"][0]["stolen"] = [loud, loud] + [0.0] * 8
    assert _rows(summary([case]))["total against never"][2] == "2"


def test_a_case_without_an_oracle_is_left_out(case: dict[str, Any]) -> None:
    assert "wide" not in summary([_case(Run("never", NEVER), Run("exact", NEVER))])
    assert "wide" in summary([case])
