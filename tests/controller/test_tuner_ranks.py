"""In real jobs of two and three ranks knobs turn at the same step on all or on none, and training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

Rank = dict[str, Any]

JOBS: dict[str, dict[str, Any]] = {
    "turns": {"steps": 120, "holes": True},
    "side breaks": {"steps": 60, "break_side": 30},
    "policy fails": {"steps": 120, "policy_fails": 2},
    "side breaks in a trial": {"steps": 60, "break_side": 30, "trial": True},
    "policy fails in a trial": {"steps": 120, "policy_fails": 2, "trial": True},
    "one rank fails": {"steps": 56, "bad": 65536},
    "rehearsal fails": {"steps": 60, "bad_calls": [1, 3]},  # the undos in between work
    "advise": {"steps": 40, "mode": "advise"},
    "absent": {"steps": 8, "absent": 1, "meet_seconds": 0.5},
    "off": {"steps": 8, "mode": "off"},
}


@pytest.fixture(scope="module")
def two_ranks(run_ranks: Callable[..., list[list[Rank]]]) -> dict[str, list[Rank]]:
    """All jobs, one after the other in the same two processes: a tuner that froze leaves the next job's alone."""
    return dict(zip(JOBS, run_ranks("job_tuner.py", 2, list(JOBS.values())), strict=True))


def switched(rank: Rank) -> list[Any]:
    return [switch[:3] for switch in rank["switches"]]


def test_the_ranks_models_stay_equal_to_the_last_bit(two_ranks: dict[str, list[Rank]]) -> None:
    assert [name for name, ranks in two_ranks.items() if ranks[0]["weights"] != ranks[1]["weights"]] == []


def check_turns(ranks: list[Rank]) -> None:
    assert len(ranks[0]["switches"]) >= 5
    assert all(switched(rank) == switched(ranks[0]) for rank in ranks)
    assert [epoch for _, epoch, _ in switched(ranks[0])] == list(range(1, len(ranks[0]["switches"]) + 1))
    assert all(step % 2 == 0 for step, _, _ in switched(ranks[0])), "every second or fourth"
    assert all(rank["frozen"] is None for rank in ranks)
    # What rank 0's policy saw is what was in force: each observation has the values of the last switch before it.
    for step, values, pace_ns in ranks[0]["observed"]:
        before = [knobs for at, _, knobs in switched(ranks[0]) if at < step]
        assert values == (before[-1] if before else {"bucket_bytes": 25 * 2**20, "micro_batch": 4})
        assert pace_ns > 0
    assert not {step for step, _, _ in ranks[0]["observed"]} & {50, 100}, "steps that were not measured are missing"
    assert ranks[0]["finished"] == 1
    assert all(rank["close_ms"] < 20_000 for rank in ranks), "nothing was left out to wait for: that takes a minute"


def test_both_knobs_turn_again_and_again_at_the_same_step_on_two_ranks(two_ranks: dict[str, list[Rank]]) -> None:
    check_turns(two_ranks["turns"])


@pytest.mark.full
def test_both_knobs_turn_again_and_again_at_the_same_step_on_three_ranks(run_ranks: Any) -> None:
    ranks = run_ranks("job_tuner.py", 3, [{"steps": 100, "holes": True}])[0]
    check_turns(ranks)
    assert len({rank["weights"] for rank in ranks}) == 1


def test_a_side_group_that_breaks_on_one_rank_freezes_all_and_training_goes_on(
    two_ranks: dict[str, list[Rank]],
) -> None:
    ranks = two_ranks["side breaks"]
    assert switched(ranks[0]) == switched(ranks[1])
    assert all(step <= 36 for step, _, _ in switched(ranks[0]))
    assert [rank["state"] for rank in ranks] == ["frozen", "frozen"]
    assert any("side group failed" in detail for rank in ranks for _, detail in rank["status"])


def test_a_policy_that_raises_freezes_the_tuner_on_all_ranks(two_ranks: dict[str, list[Rank]]) -> None:
    ranks = two_ranks["policy fails"]
    assert [rank["frozen"] for rank in ranks] == ["RuntimeError: the policy broke", "another rank froze"]
    assert len(switched(ranks[0])) == 1
    assert switched(ranks[0]) == switched(ranks[1])


@pytest.mark.parametrize("job", ["side breaks in a trial", "policy fails in a trial"])
def test_a_freeze_during_a_trial_takes_all_ranks_back_to_the_proven_values_at_the_same_step(
    two_ranks: dict[str, list[Rank]], job: str
) -> None:
    ranks = two_ranks[job]
    assert switched(ranks[0]) == switched(ranks[1])
    assert len(switched(ranks[0])) >= 2, "a trial was in force before the freeze"
    assert [rank["state"] for rank in ranks] == ["frozen", "frozen"]
    assert switched(ranks[0])[-1][2] == {"bucket_bytes": 25 * 2**20, "micro_batch": 4}


def test_a_value_that_one_rank_cannot_take_is_taken_back_on_all(two_ranks: dict[str, list[Rank]]) -> None:
    ranks = two_ranks["one rank fails"]
    assert switched(ranks[0]) == switched(ranks[1])
    assert all(knobs["bucket_bytes"] == 32768 for _, _, knobs in switched(ranks[0]))
    assert [rank["frozen"] for rank in ranks] == [None, None]


def test_a_knob_that_fails_its_rehearsal_on_one_rank_is_left_out_and_the_other_is_tuned(
    two_ranks: dict[str, list[Rank]],
) -> None:
    ranks = two_ranks["rehearsal fails"]
    assert [knob for knob, _, _ in ranks[0]["spaces"]] == ["micro_batch"]
    assert len(switched(ranks[0])) >= 1
    assert switched(ranks[0]) == switched(ranks[1])
    assert all(knobs["bucket_bytes"] == 25 * 2**20 for _, _, knobs in switched(ranks[0]))


def test_advise_sees_every_rank_s_pace_and_turns_nothing(two_ranks: dict[str, list[Rank]]) -> None:
    ranks = two_ranks["advise"]
    assert switched(ranks[0]) == switched(ranks[1]) == []
    assert len(ranks[0]["observed"]) >= 16
    assert ranks[0]["state"] == "advising"


def test_attaching_on_some_ranks_only_refuses_instead_of_hanging(two_ranks: dict[str, list[Rank]]) -> None:
    ranks = two_ranks["absent"]
    assert ranks[0]["status"] == [["off", "not tuning: ranks [1] did not attach within 0.5 s"]]


def test_off_does_nothing_at_all(two_ranks: dict[str, list[Rank]]) -> None:
    ranks = two_ranks["off"]
    assert [rank["status"] for rank in ranks] == [[], []]
