"""A loop under Accelerate on two ranks: knobs turn while it trains, and it trains to the same numbers."""

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
    "plain loop": {"uses": False},
    "untested": {"untested": True},
    "off": {"tune": "off"},
    "resumed": {"resume_at": 30},
}


@pytest.fixture(scope="module", params=LIBRARIES)
def jobs(run_job: Callable[..., list[list[Rank]]], request: pytest.FixtureRequest) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes."""
    wanted = {("untuned", name): {"tune": None} | options for name, options in PLAIN.items()}
    wanted |= {("tuned", name): {"tune": "exact"} | options for name, options in PLAIN.items()}
    wanted |= {("other", name): {"tune": "exact"} | options for name, options in OTHER.items()}
    calls = [("train", options) for options in wanted.values()]
    *answers, mistakes = run_job("accelerate", "job_accelerate.py", [*calls, ("mistakes", {})], request.param)
    return {" ".join(key): ranks for key, ranks in zip(wanted, answers, strict=True)} | {"mistakes": mistakes}


def assert_alike(ranks: list[Rank], untuned: list[Rank]) -> None:
    for rank, plain in zip(ranks, untuned, strict=True):
        assert rank["models_agree"]
        assert rank["bodies"] == plain["bodies"], "the body of the loop runs as often as before"
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-4)
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)
        assert rank["accumulation"] == plain["accumulation"]
        assert rank["rate"] == plain["rate"]


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
    compatibility.ran("accelerate", "accelerate", answer["version"], "loop with `train_batch`, DDP", answer)


def test_a_loop_that_keeps_its_own_backward_has_its_buckets_tuned(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other plain loop"]
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert "train_batch" in ranks[0]["refused"]["micro_batch"]
    assert_alike(ranks, jobs["untuned whole updates"])


def test_a_saved_and_loaded_state_changes_nothing(jobs: dict[str, list[Rank]]) -> None:
    assert_alike(jobs["other resumed"], jobs["untuned whole updates"])


def test_an_untested_version_is_measured_and_not_tuned_and_one_line_says_so(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other untested"]
    assert ranks[0]["steps"] == 60
    assert ranks[0]["switches"] == []
    assert len([line for line in ranks[0]["lines"] if "measured, not tuned: accelerate" in line]) == 1


@pytest.mark.parametrize("name", ["untested", "off"])
def test_where_nothing_is_tuned_losses_are_equal_to_the_last_bit(jobs: dict[str, list[Rank]], name: str) -> None:
    untuned = jobs["untuned whole updates"]
    assert [rank["weights"] for rank in jobs[f"other {name}"]] == [rank["weights"] for rank in untuned]


def test_what_was_typed_wrongly_is_an_error_that_names_it(jobs: dict[str, list[Rank]]) -> None:
    said = jobs["mistakes"][0]
    assert said["no accelerator"].startswith("TypeError: attach(accelerator=...): an Accelerator is needed, not Linear")
    assert "accelerator.prepare(model)" in said["not prepared"]
    assert said["no such option"].startswith("TypeError: attach() has no option 'bucket_size'")
    assert said["no such mode"].startswith("ConfigError")


def test_at_the_end_nothing_is_measured_any_more(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if not rank.get("is_over", True)} == set()
