"""One rank closes, raises, leaves out a step, never attaches or stops measuring: the others train on, as if alone.

Real ranks; the same jobs without pacecar are what is compared with, to the last bit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import Ended, finish, start_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

JOB = Path(__file__).with_name("job_uneven.py")

Rank = dict[str, Any]

BASE = {"steps": 60, "tune": "exact", "restless": True, "who": [1], "when": 20, "what": "none"}

JOBS: dict[str, dict[str, Any]] = {
    "closes before the first vote": {"what": "close", "when": 1, "steps": 30},
    "closes when a vote is out": {"what": "close", "when": "voted"},
    "closes in a trial": {"what": "close", "when": "trial"},
    "closes after a switch": {"what": "close", "when": "switched", "who": [0]},
    "closes at rest": {"what": "close", "when": 30, "restless": False, "steps": 50},
    "ends its block by an exception": {"what": "block", "when": "voted"},
    "raises before forward": {"what": "raise", "when": "voted"},
    "leaves out a step": {"what": "skip", "when": 21},
    "leaves out the next one": {"what": "skip", "when": 22},
    "stops measuring": {"what": "off", "when": "trial"},
    "closes in a loop of plain all-reduces": {"what": "close", "when": 20, "kind": "plain", "steps": 40},
    "closes in a loop with all-reduces of its own": {"what": "close", "when": "voted", "kind": "metrics"},
    "never attaches": {"what": "absent", "when": 0, "steps": 30},
}
"""The last leaves the ranks with different numbers of attachments."""

CALM = r"LOG pacecar\S* (INFO|WARNING) "


def launched(jobs: Sequence[dict[str, Any]], ranks: int, **environ: str) -> list[Ended]:
    """Return how the ranks of one process group ended, which ran `jobs` one after the other."""
    settings = {"PACECAR_HOOK_OVERHEAD_BUDGET": "0.2", **environ}
    return finish(start_ranks([JOB, json.dumps(list(jobs))], ranks, environ=settings), 240)


def heard(ended: Sequence[Ended]) -> list[list[Rank]]:
    """Return for each job what each rank said; fails where one did not exit 0, or said more than calm lines."""
    for rank in ended:
        assert rank.code == 0, rank.err[-3000:]
        assert "Traceback" not in rank.err.replace(PLANTED, ""), rank.err[-3000:]
    answers = [json.loads(rank.out.strip().splitlines()[-1]) for rank in ended]
    return [list(ranks) for ranks in zip(*answers, strict=True)]


PLANTED = "Traceback (most recent call last):\n"


@pytest.fixture(scope="module")
def jobs() -> dict[str, tuple[list[Rank], list[Rank]]]:
    """Each job tuned and alone, in the same two processes."""
    options = [{**BASE, **JOBS[name], "tune": tune} for tune in (None, "exact") for name in JOBS]
    answers = heard(launched(options, 2))
    return dict(zip(JOBS, zip(answers[len(JOBS) :], answers[: len(JOBS)], strict=True), strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_the_job_trains_on_to_the_same_losses(jobs: Any, name: str) -> None:
    tuned, alone = jobs[name]
    assert [rank["losses"] for rank in tuned] == [rank["losses"] for rank in alone]
    assert [rank["weights"] for rank in tuned] == [rank["weights"] for rank in alone]


@pytest.mark.parametrize(
    "name", [name for name in JOBS if JOBS[name]["what"] in ("close", "block") and JOBS[name].get("kind") != "plain"]
)
def test_who_is_left_says_once_why_it_tunes_no_more_and_all_keep_the_same_layout(jobs: Any, name: str) -> None:
    tuned, _ = jobs[name]
    who = {**BASE, **JOBS[name]}["who"][0]
    left = tuned[1 - who]
    assert tuned[who]["did_at"] is not None, "the moment has come"
    assert tuned[0]["layout"] == tuned[1]["layout"]
    assert f"rank {who} takes no further part" in left["frozen"]
    assert left["slowest"] < 20.0
