"""Lightning's own Trainer on two ranks: knobs turn while it trains, and it trains to the same numbers."""

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
    "resumed untuned": {"tune": None, "save_at": 20},
    "manual": {"module": "Manual"},
    "two optimizers": {"module": "Twice"},
}


@pytest.fixture(scope="module", params=LIBRARIES)
def jobs(run_job: Callable[..., Any], request: pytest.FixtureRequest) -> Jobs:
    return train_all(run_job, "lightning", request.param, PLAIN, OTHER)


def test_without_the_caller_s_word_the_buckets_are_tuned_and_the_micro_batch_stays(jobs: Jobs) -> None:
    ranks = jobs["other no word"]
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert "micro_batch=True" in ranks[0]["refused"]["micro_batch"]
    assert set(ranks[0]["micro_batches"]) == {4}
    assert_alike(ranks, jobs["untuned whole updates"])


def test_a_resumed_run_ends_where_the_untuned_resumed_one_does(jobs: Jobs) -> None:
    for rank, plain in zip(jobs["other resumed"], jobs["other resumed untuned"], strict=True):
        assert rank["checkpoint_ns"] > 0
        assert rank["resumed"]["weights"] == pytest.approx(plain["resumed"]["weights"], rel=1e-3, abs=1e-5)
        assert rank["resumed"]["steps"] == 60 - 20
        assert rank["resumed"]["switches"], "it turned after it was resumed, too"


def test_manual_optimization_is_measured_and_has_its_buckets_tuned(jobs: Jobs) -> None:
    ranks = jobs["other manual"]
    assert ranks[0]["steps"] == 60
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert [line for line in ranks[0]["lines"] if "the micro-batch is not tuned: the LightningModule" in line]
    assert ranks[0]["models_agree"]


def test_two_optimizers_are_measured_and_not_tuned_and_one_line_says_so(jobs: Jobs) -> None:
    one, other = jobs["other two optimizers"]
    assert one["steps"] >= 30
    assert one["switches"] == []
    assert len([line for line in one["lines"] if "measured, not tuned: 2 optimizers" in line]) == 1
    assert not [line for line in other["lines"] if "measured, not tuned" in line], "one rank says it"


class TestLightning(TrainedByCallback):
    library, untuned, job = "lightning", "whole updates", "`Trainer`, `DDPStrategy`"
