"""Uneven inputs, and a process group destroyed under the tuner: it leaves and says why, and the job does not notice.

Real ranks; the same jobs without pacecar are what is compared with, to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.kit.ranks import LATENESS_WORDS

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Rank = dict[str, Any]

JOBS: dict[str, dict[str, Any]] = {
    "join": {"what": "join", "even": 0},
    "join later": {"what": "join", "even": 20},
    "closed": {"what": "anew", "keeps": False},
    "kept": {"what": "anew", "keeps": True},
}


@pytest.fixture(scope="module")
def jobs(run_ranks: Callable[..., list[list[Rank]]]) -> dict[tuple[str, str | None], list[Rank]]:
    """All jobs, each alone and tuned, in the same two processes."""
    keys = [(name, tune) for name in JOBS for tune in (None, "exact")] + [("kept", "off"), ("kept", "advise")]
    heard = run_ranks("job_step_boundaries.py", 2, [JOBS[name] | {"tune": tune} for name, tune in keys])
    return dict(zip(keys, heard, strict=True))


@pytest.mark.parametrize("name", JOBS)
def test_the_losses_are_those_of_the_job_alone_to_the_last_bit(jobs: Any, name: str) -> None:
    tuned, alone = jobs[name, "exact"], jobs[name, None]
    assert [rank["losses"] for rank in tuned] == [rank["losses"] for rank in alone]


@pytest.mark.parametrize("tune", ["off", "advise", "exact"])
def test_a_group_destroyed_and_made_anew_costs_the_crew_and_the_tuner_and_not_the_job(jobs: Any, tune: str) -> None:
    for number, (rank, alone) in enumerate(zip(jobs["kept", tune], jobs["kept", None], strict=True)):
        assert rank["losses"] == alone["losses"]
        assert (rank["hook_steps"], rank["hook_failures"]) == (30 + (10 + 3 * number) + 30, 0)
        assert rank["close_seconds"] < 20.0
        said = [line for line in rank["said"] if not any(words in line for words in LATENESS_WORDS)]
        assert len(rank["traced"]) <= 1, "the tuner's, once"
        assert len(said) == len(set(said)) <= 4, said


@pytest.mark.parametrize("name", ["join", "join later"])
def test_under_join_every_rank_leaves_and_says_why(jobs: Any, name: str) -> None:
    even = JOBS[name]["even"]
    assert [len(rank["losses"]) for rank in jobs[name, "exact"]] == [even + 12, even + 27]
    for rank in jobs[name, "exact"]:
        assert rank["states"] == ["frozen"]
        assert "uneven inputs (Join)" in rank["frozen"][0]
        assert rank["close_seconds"] < 20.0, "who waits for the others waits for 30 s"


def test_a_group_made_anew_is_met_by_a_tuner_made_anew(jobs: Any) -> None:
    for rank in jobs["closed", "exact"]:
        assert rank["frozen"][1] is None
        assert rank["spaces"][0] == rank["spaces"][1] > 0, "the new ranks exchanged their offers"


def test_a_tuner_whose_group_was_destroyed_leaves_and_does_not_vote_in_the_next_one(jobs: Any) -> None:
    for rank in jobs["kept", "exact"]:
        assert "process group was destroyed" in rank["frozen"][0]
        assert "close that one first" in rank["inert"][1]
