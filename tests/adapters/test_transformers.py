"""transformers' own Trainer on two ranks: knobs turn while it trains, and it trains to the same numbers."""

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
    "language model": {},
    "padded to each batch": {"pads": True},
    "a mean and no items": {"model": "regression"},
    "epochs that end in an update": {"pads": True, "epochs": True},
    "a mean, epochs that end in an update": {"model": "regression", "epochs": True},
    "one sample in a batch": {"batch": 1},
}
"""Each trains once without a callback and once tuned."""

REAL_ONLY = {"epochs that end in an update", "a mean, epochs that end in an update"}
"""With the stand-in, accelerate's and lightning's tests end epochs so, by the same Regrouper."""

PLAIN_JOBS = [
    *(("stand-in", name) for name in PLAIN if name not in REAL_ONLY),
    *(pytest.param("real", name, marks=pytest.mark.full) for name in PLAIN),
]

OTHER: dict[str, dict[str, Any]] = {
    "resumed": {"save_at": 28},
    "own step": {"trainer": "OwnStep"},
    "own loss": {"trainer": "OwnLoss"},
    "vouched for": {"trainer": "OwnLoss", "micro_batch": True},
    "ruled out": {"micro_batch": False},
    "untested": {"untested": True},
    "off": {"tune": "off"},
    "broken": {"breaks": True},
    "ignorant": {"model": "ignorant"},
    "contrast": {"model": "contrast"},
}


@pytest.fixture(scope="module", params=LIBRARIES)
def jobs(run_job: Callable[..., list[list[Rank]]], request: pytest.FixtureRequest) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes: importing transformers takes longer than they do."""
    wanted = {("untuned", name): {"tune": None} | options for name, options in PLAIN.items()}
    wanted |= {("tuned", name): {"tune": "exact"} | options for name, options in PLAIN.items()}
    wanted |= {("other", name): {"tune": "exact"} | options for name, options in OTHER.items()}
    if request.param == "stand-in":
        wanted = {key: options for key, options in wanted.items() if key[1] not in REAL_ONLY}
    answers = run_job(
        "transformers", "job_transformers.py", [("train", options) for options in wanted.values()], request.param
    )
    return {" ".join(key): ranks for key, ranks in zip(wanted, answers, strict=True)}


def assert_alike(ranks: list[Rank], untuned: list[Rank]) -> None:
    for rank, plain in zip(ranks, untuned, strict=True):
        assert rank["models_agree"]
        assert rank["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert rank["history"] == pytest.approx(plain["history"], rel=1e-4)
        assert rank["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("jobs", "name"), PLAIN_JOBS, indirect=["jobs"])
def test_bucket_and_accumulation_turn_while_it_trains_to_the_untuned_run_s_losses_and_weights(
    jobs: dict[str, list[Rank]], name: str
) -> None:
    ranks, untuned = jobs[f"tuned {name}"], jobs[f"untuned {name}"]
    assert {"bucket_bytes", "micro_batch"} <= set(compatibility.turned(ranks[0]["switches"]))
    assert ranks[0]["switches"] == ranks[1]["switches"]
    assert len(set(ranks[0]["micro_batches"])) >= 3, "more and fewer forward and backward passes in an update"
    assert_alike(ranks, untuned)


@pytest.mark.parametrize("jobs", [REAL], indirect=True)
def test_the_table_says_what_ran(jobs: dict[str, list[Rank]]) -> None:
    answer = jobs["tuned language model"][0]
    compatibility.ran("transformers", "transformers", answer["version"], "`Trainer`, DDP", answer)


def test_steps_are_optimizer_updates_with_their_samples_and_the_save_is_a_checkpoint(
    jobs: dict[str, list[Rank]],
) -> None:
    answer = jobs["tuned language model"][0]
    assert answer["steps"] == 60
    assert answer["samples"] == [16]
    assert answer["checkpoint_ns"] == 0
    assert jobs["other resumed"][0]["checkpoint_ns"] > 0


def test_a_resumed_run_ends_where_the_one_that_was_not_interrupted_does(jobs: dict[str, list[Rank]]) -> None:
    """Resumed after 28 updates of 60: the knobs are learnt again, and the remaining samples are the same."""
    for rank, plain in zip(jobs["other resumed"], jobs["untuned language model"], strict=True):
        assert rank["resumed"]["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)
        assert rank["resumed"]["steps"] == 60 - 28
        assert len(rank["resumed"]["switches"]) >= 2


def test_the_trainer_has_its_own_methods_again_afterwards(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if rank["left_behind"]} == set()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own step", "the micro-batch is not tuned: OwnStep has a training_step of its own"),
        ("own loss", "the micro-batch is not tuned: OwnLoss has a compute_loss of its own"),
    ],
)
def test_a_subclass_is_measured_and_has_its_buckets_tuned_and_one_line_says_why_not_its_micro_batch(
    jobs: dict[str, list[Rank]], name: str, says: str
) -> None:
    ranks = jobs[f"other {name}"]
    assert ranks[0]["steps"] == 60
    assert compatibility.turned(ranks[0]["switches"])[0] == "bucket_bytes"
    assert set(ranks[0]["micro_batches"]) == {4}
    assert [line for line in ranks[0]["lines"] if says in line]
    assert not [line for line in ranks[1]["lines"] if says in line], "one rank says it"
    assert_alike(ranks, jobs["untuned language model"])


def test_who_says_that_his_own_loss_is_a_mean_has_the_micro_batch_tuned(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other vouched for"]
    assert "micro_batch" in compatibility.turned(ranks[0]["switches"])
    assert_alike(ranks, jobs["untuned language model"])


@pytest.mark.parametrize("name", ["ignorant", "contrast"])
def test_a_loss_that_does_not_add_up_is_found_out_before_anything_is_turned(
    jobs: dict[str, list[Rank]], name: str
) -> None:
    """One that ignores num_items_in_batch although it accepts it; one that compares samples."""
    refused = jobs[f"other {name}"][0]["refused"]
    assert "depends on how a batch is cut" in refused["micro_batch"]
    assert set(jobs[f"other {name}"][0]["micro_batches"]) == {4}


def test_an_untested_version_is_measured_and_not_tuned_and_one_line_says_so(jobs: dict[str, list[Rank]]) -> None:
    ranks = jobs["other untested"]
    assert ranks[0]["steps"] == 60
    assert ranks[0]["switches"] == []
    assert [line for line in ranks[0]["lines"] if "measured, not tuned: transformers" in line]
    assert_alike(ranks, jobs["untuned language model"])


@pytest.mark.parametrize("name", ["untested", "off"])
def test_where_nothing_is_tuned_losses_are_equal_to_the_last_bit(jobs: dict[str, list[Rank]], name: str) -> None:
    ranks, untuned = jobs[f"other {name}"], jobs["untuned language model"]
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in untuned]
    assert [rank["loss"] for rank in ranks] == [rank["loss"] for rank in untuned]


def test_micro_batch_false_is_respected(jobs: dict[str, list[Rank]]) -> None:
    assert jobs["other ruled out"][0]["refused"]["micro_batch"] == "micro_batch=False"
    assert set(jobs["other ruled out"][0]["micro_batches"]) == {4}


def test_what_fails_in_ours_is_one_message_and_the_trainer_trains_on(jobs: dict[str, list[Rank]]) -> None:
    ranks, untuned = jobs["other broken"], jobs["untuned language model"]
    assert [rank["lines"] for rank in ranks] == [["pacecar does not measure this training"]] * 2
    assert [rank["weights"] for rank in ranks] == [rank["weights"] for rank in untuned]
    assert [rank["history"] for rank in ranks] == [rank["history"] for rank in untuned]


def test_at_the_end_nothing_is_measured_any_more(jobs: dict[str, list[Rank]]) -> None:
    assert {name for name, ranks in jobs.items() for rank in ranks if not rank.get("is_over", True)} == set()
