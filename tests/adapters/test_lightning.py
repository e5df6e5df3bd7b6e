"""Lightning's own Trainer on two ranks: knobs turn while it trains, and it trains to the same numbers."""

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

PLAIN: dict[str, dict[str, Any]] = {
    "whole updates": {},
    "epochs that end in an update": {"remainder": 2},
    "no accumulation": {"accumulation": 1, "batch": 8},
}
OTHER: dict[str, dict[str, Any]] = {
    "no word": {"micro_batch": False},
    "untested": {"untested": True},
    "off": {"tune": "off"},
    "broken": {"breaks": True},
    "resumed": {"save_at": 20},
    "manual": {"module": "Manual"},
    "two optimizers": {"module": "Twice"},
}


@pytest.fixture(scope="module", params=LIBRARIES)
def jobs(run_job: Callable[..., list[list[Rank]]], request: pytest.FixtureRequest) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes."""
    wanted = {("untuned", name): {"tune": None} | options for name, options in PLAIN.items()}
    wanted |= {("tuned", name): {"tune": "exact"} | options for name, options in PLAIN.items()}
    wanted |= {("other", name): {"tune": "exact"} | options for name, options in OTHER.items()}
    wanted[("untuned", "resumed")] = {"tune": None, "save_at": 20}
    answers = run_job(
        "lightning", "job_lightning.py", [("train", options) for options in wanted.values()], request.param
    )
    return {" ".join(key): ranks for key, ranks in zip(wanted, answers, strict=True)}


def assert_alike(ranks: list[Rank], untuned: list[Rank]) -> None:
    for rank, plain in zip(ranks, untuned, strict=True):
        assert rank["models_agree"]
        assert rank["bodies"] == plain["bodies"], "the Trainer counts the same batches"
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-4)
        assert rank["means"] == pytest.approx(plain["means"], rel=1e-4), "what training_step logs for the epoch"
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("name", PLAIN)
def test_bucket_and_accumulation_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
    jobs: dict[str, list[Rank]], name: str
) -> None:
    ranks = jobs[f"tuned {name}"]
    assert {"bucket_bytes", "micro_batch"} <= set(compatibility.turned(ranks[0]["switches"]))
    assert ranks[0]["switches"] == ranks[1]["switches"]
    assert len(set(ranks[0]["micro_batches"])) >= 3, "more and fewer forward and backward passes in an update"
    assert_alike(ranks, jobs[f"untuned {name}"])


@pytest.mark.parametrize("jobs", [REAL], indirect=True)
def test_the_table_says_what_ran(jobs: dict[str, list[Rank]]) -> None:
    answer = jobs["tuned whole updates"][0]
    compatibility.ran("lightning", "lightning", answer["version"], "`Trainer`, `DDPStrategy`", answer)


def test_without_the_caller_s_word_the_buckets_are_tuned_and_the_micro_batch_stays(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other no word"]
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert "micro_batch=True" in ranks[0]["refused"]["micro_batch"]
    assert set(ranks[0]["micro_batches"]) == {4}
    assert_alike(ranks, jobs["untuned whole updates"])


def test_a_resumed_run_ends_where_the_untuned_resumed_one_does(jobs: dict[str, list[Rank]]) -> None:
    for rank, plain in zip(jobs["other resumed"], jobs["untuned resumed"], strict=True):
        assert rank["checkpoint_ns"] > 0
        assert rank["resumed"]["weights"] == pytest.approx(plain["resumed"]["weights"], rel=1e-3, abs=1e-5)
        assert rank["resumed"]["steps"] == 60 - 20
        assert rank["resumed"]["switches"], "it turned after it was resumed, too"


def test_manual_optimization_is_measured_and_has_its_buckets_tuned(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other manual"]
    assert ranks[0]["steps"] == 60
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert [line for line in ranks[0]["lines"] if "the micro-batch is not tuned: the LightningModule" in line]
    assert ranks[0]["models_agree"]


@pytest.mark.parametrize(("name", "says"), [("untested", "lightning 2."), ("two optimizers", "2 optimizers")])
def test_what_is_unclear_is_measured_and_not_tuned_and_one_line_says_so(
    jobs: dict[str, list[Rank]], name: str, says: str
) -> None:
    ranks = jobs[f"other {name}"]
    assert ranks[0]["steps"] >= 30
    assert ranks[0]["switches"] == []
    assert len([line for line in ranks[0]["lines"] if f"measured, not tuned: {says}" in line]) == 1
    assert not [line for line in ranks[1]["lines"] if "measured, not tuned" in line], "one rank says it"


@pytest.mark.parametrize("name", ["untested", "off"])
def test_where_nothing_is_tuned_losses_are_equal_to_the_last_bit(jobs: dict[str, list[Rank]], name: str) -> None:
    untuned = jobs["untuned whole updates"]
    assert [rank["weights"] for rank in jobs[f"other {name}"]] == [rank["weights"] for rank in untuned]


def test_the_trainer_has_its_own_methods_again_afterwards(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if rank["left_behind"]} == set()


def test_what_fails_in_ours_is_one_message_and_the_trainer_trains_on(jobs: dict[str, list[Rank]]) -> None:
    ranks, untuned = jobs["other broken"], jobs["untuned whole updates"]
    assert [rank["lines"] for rank in ranks] == [["pacecar does not measure this training"]] * 2
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in untuned]
    assert [rank["history"] for rank in ranks] == [rank["history"] for rank in untuned]


def test_at_the_end_nothing_is_measured_any_more(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if not rank.get("is_over", True)} == set()
