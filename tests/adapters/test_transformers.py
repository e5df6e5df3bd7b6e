"""transformers' own Trainer on two ranks: knobs turn while it trains, and it trains to the same numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility
from trained import Jobs, TrainedByCallback, assert_alike, train_all
from world import LIBRARIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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
def jobs(run_job: Callable[..., Any], request: pytest.FixtureRequest) -> Jobs:
    plain = {name: job for name, job in PLAIN.items() if request.param == "real" or name not in REAL_ONLY}
    return train_all(run_job, "transformers", request.param, plain, OTHER)


def test_steps_are_optimizer_updates_with_their_samples_and_the_save_is_a_checkpoint(jobs: Jobs) -> None:
    answer = jobs["tuned language model"][0]
    assert answer["steps"] == 60
    assert answer["samples"] == [16]
    assert answer["checkpoint_ns"] == 0
    assert jobs["other resumed"][0]["checkpoint_ns"] > 0


def test_a_resumed_run_ends_where_the_one_that_was_not_interrupted_does(jobs: Jobs) -> None:
    """Resumed after 28 updates of 60: the knobs are learnt again, and the remaining samples are the same."""
    for rank, plain in zip(jobs["other resumed"], jobs["untuned language model"], strict=True):
        assert rank["resumed"]["weights"] == pytest.approx(plain["weights"], rel=1e-3, abs=1e-5)
        assert rank["resumed"]["steps"] == 60 - 28
        assert len(rank["resumed"]["switches"]) >= 2


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("own step", "the micro-batch is not tuned: OwnStep has a training_step of its own"),
        ("own loss", "the micro-batch is not tuned: OwnLoss has a compute_loss of its own"),
    ],
)
def test_a_subclass_is_measured_and_has_its_buckets_tuned_and_one_line_says_why_not_its_micro_batch(
    jobs: Jobs, name: str, says: str
) -> None:
    ranks = jobs[f"other {name}"]
    assert ranks[0]["steps"] == 60
    assert compatibility.turned(ranks[0]["switches"])[0] == "bucket_bytes"
    assert set(ranks[0]["micro_batches"]) == {4}
    assert [line for line in ranks[0]["lines"] if says in line]
    assert not [line for line in ranks[1]["lines"] if says in line], "one rank says it"
    assert_alike(ranks, jobs["untuned language model"])


def test_who_says_that_his_own_loss_is_a_mean_has_the_micro_batch_tuned(jobs: Jobs) -> None:
    ranks = jobs["other vouched for"]
    assert "micro_batch" in compatibility.turned(ranks[0]["switches"])
    assert_alike(ranks, jobs["untuned language model"])


@pytest.mark.parametrize("name", ["ignorant", "contrast"])
def test_a_loss_that_does_not_add_up_is_found_out_before_anything_is_turned(jobs: Jobs, name: str) -> None:
    """One that ignores num_items_in_batch although it accepts it; one that compares samples."""
    refused = jobs[f"other {name}"][0]["refused"]
    assert "depends on how a batch is cut" in refused["micro_batch"]
    assert set(jobs[f"other {name}"][0]["micro_batches"]) == {4}


def test_micro_batch_false_is_respected(jobs: Jobs) -> None:
    assert jobs["other ruled out"][0]["refused"]["micro_batch"] == "micro_batch=False"
    assert set(jobs["other ruled out"][0]["micro_batches"]) == {4}


class TestTransformers(TrainedByCallback):
    library, untuned, job = "transformers", "language model", "`Trainer`, DDP"
