"""A loop under Accelerate on two ranks: knobs turn while it trains, and it trains to the same numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import compatibility
from trained import Jobs, Trained, assert_alike, train_all
from world import LIBRARIES

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

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
def jobs(run_job: Callable[..., Any], request: pytest.FixtureRequest) -> Jobs:
    return train_all(run_job, "accelerate", request.param, PLAIN, OTHER, "mistakes")


def test_a_loop_that_keeps_its_own_backward_has_its_buckets_tuned(jobs: Jobs) -> None:
    ranks = jobs["other plain loop"]
    assert "bucket_bytes" in compatibility.turned(ranks[0]["switches"])
    assert "train_batch" in ranks[0]["refused"]["micro_batch"]
    assert_alike(ranks, jobs["untuned whole updates"])


def test_a_saved_and_loaded_state_changes_nothing(jobs: Jobs) -> None:
    assert_alike(jobs["other resumed"], jobs["untuned whole updates"])


def test_what_was_typed_wrongly_is_an_error_that_names_it(jobs: Jobs) -> None:
    said = jobs["mistakes"][0]
    assert said["no accelerator"].startswith("TypeError: attach(accelerator=...): an Accelerator is needed, not Linear")
    assert "accelerator.prepare(model)" in said["not prepared"]
    assert said["no such option"].startswith("TypeError: attach() has no option 'bucket_size'")
    assert said["no such mode"].startswith("ConfigError")


class TestAccelerate(Trained):
    library, untuned, job = "accelerate", "whole updates", "loop with `train_batch`, DDP"
