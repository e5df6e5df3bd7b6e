"""DeepSpeed's engine on two gloo ranks: ZeRO's sizes change live, DeepSpeed acts on it, and trains the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility
from world import LIBRARIES, REAL

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Rank = dict[str, Any]

JOBS: dict[str, dict[str, Any]] = {
    "zero 1": {"stage": 1, "tune": "exact"},
    "zero 1 untuned": {"stage": 1, "tune": None},
    "zero 2": {"stage": 2, "tune": "exact", "overlap": True},
    "zero 2 untuned": {"stage": 2, "tune": None, "overlap": True},
    "zero 3": {"stage": 3, "tune": "exact"},
    "zero 3 untuned": {"stage": 3, "tune": None},
    "a subclass": {"stage": 1, "tune": "exact", "own": True, "steps": 25},
    "another version": {"stage": 1, "tune": "exact", "version": "0.1", "steps": 25},
}

STAGES = [("stand-in", 1), *(pytest.param("real", stage, marks=pytest.mark.full) for stage in (1, 2, 3))]
"""The stand-in has ZeRO 1."""

LIVE = {1: {"zero_bucket_bytes"}, 2: {"zero_bucket_bytes"}, 3: {"zero_bucket_bytes", "zero_prefetch_bytes"}}


@pytest.fixture(scope="module", params=LIBRARIES)
def jobs(run_job: Callable[..., list[list[Rank]]], request: pytest.FixtureRequest) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes."""
    wanted = {name: job for name, job in JOBS.items() if request.param == "real" or job["stage"] == 1}
    answers = run_job("deepspeed", "job_deepspeed.py", [("train", job) for job in wanted.values()], request.param)
    return dict(zip(wanted, answers, strict=True))


@pytest.mark.parametrize(("jobs", "stage"), STAGES, indirect=["jobs"])
def test_its_sizes_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
    jobs: dict[str, list[Rank]], stage: int
) -> None:
    tuned, untuned = jobs[f"zero {stage}"], jobs[f"zero {stage} untuned"]
    assert set(compatibility.turned(tuned[0]["switches"])) == LIVE[stage]
    assert [rank["switches"] for rank in tuned] == [tuned[0]["switches"]] * 2, "at the same steps on both ranks"
    for rank, plain in zip(tuned, untuned, strict=True):
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-5)
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("jobs", "stage"), STAGES, indirect=["jobs"])
def test_deepspeed_itself_acts_on_the_new_sizes(jobs: dict[str, list[Rank]], stage: int) -> None:
    """Smaller buckets are more collectives, in the same step in which the size changed; counted in deepspeed.comm."""
    sizes = jobs[f"zero {stage}"][0]["sizes"]
    calls: dict[int, set[int]] = {}
    for size, number, _ in sizes[5:]:
        calls.setdefault(size, set()).add(number)
    assert len(calls) >= 3
    per_step = [min(calls[size]) for size in sorted(calls)]
    assert per_step == sorted(per_step, reverse=True)
    assert per_step[0] > per_step[-1]
    plain = jobs[f"zero {stage} untuned"][0]["sizes"]
    assert len({tuple(row) for row in plain[5:]}) == 1


@pytest.mark.parametrize("jobs", [REAL], indirect=True)
def test_zero_3_gathers_further_ahead_when_told_to(jobs: dict[str, list[Rank]]) -> None:
    answer = jobs["zero 3"][0]
    ahead: dict[int, set[int]] = {}
    switches = answer["switches"]
    for (step, values), (until, _) in zip(switches, [*switches[1:], (len(answer["sizes"]), None)], strict=True):
        for _, _, gathered in answer["sizes"][step + 2 : until]:  # in forward after the next step's beginning
            ahead.setdefault(values["zero_prefetch_bytes"], set()).add(gathered)
    most = [max(ahead[size]) for size in sorted(ahead)]
    assert len(most) >= 3
    assert most == sorted(most)
    assert most[0] < most[-1]


def test_a_step_is_an_update_of_the_engine_whatever_the_optimizers_inside_do(jobs: dict[str, list[Rank]]) -> None:
    """The model has two groups of parameters, so ZeRO steps torch's optimizer twice an update."""
    for name in {"zero 1", "zero 2", "zero 3"} & set(jobs):
        for rank in jobs[name]:
            assert rank["steps"] == 50
            assert set(rank["micro_batches"]) == {2}
            assert {"forward", "backward", "optimizer", "data_wait"} <= set(rank["measured"])
            assert rank["step_is_its_own"], "given back"


def test_what_is_not_live_is_said(jobs: dict[str, list[Rank]]) -> None:
    refused = jobs["zero 1"][0]["refused"]
    assert "counts its micro-batches" in refused["micro_batch"]
    assert "gather no parameters ahead" in refused["zero_prefetch_bytes"]


@pytest.mark.parametrize("jobs", [REAL], indirect=True)
def test_what_is_not_live_is_said_and_advised(jobs: dict[str, list[Rank]]) -> None:
    answer = jobs["zero 2"][0]
    assert "overlap_comm" in answer["refused"]["bucket_bytes"]
    assert "counts its micro-batches" in answer["refused"]["micro_batch"]
    assert "gather no parameters ahead" in answer["refused"]["zero_prefetch_bytes"]
    assert any("needs a restart" in line for line in answer["advice"])


@pytest.mark.parametrize(
    ("job", "why"), [("a subclass", "the engine is a OwnStep"), ("another version", "outside the tested versions 0.1")]
)
def test_what_is_unknown_is_measured_and_not_tuned_and_one_line_says_so(
    jobs: dict[str, list[Rank]], job: str, why: str
) -> None:
    first, second = jobs[job]
    for rank in (first, second):
        assert rank["steps"] == 25
        assert rank["switches"] == []
        assert {"forward", "backward", "optimizer"} <= set(rank["measured"])
    assert sum(why in line for line in first["lines"]) == 1
    assert not any(why in line for line in second["lines"])


@pytest.mark.parametrize(("jobs", "stage"), STAGES[1:], indirect=["jobs"])
def test_the_table_says_what_ran(jobs: dict[str, list[Rank]], stage: int) -> None:
    answer = jobs[f"zero {stage}"][0]
    compatibility.ran(f"deepspeed_zero{stage}", "deepspeed", answer["version"], f"engine, ZeRO {stage}", answer)


def test_at_the_end_nothing_is_measured_any_more(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if not rank.get("is_over", True)} == set()
