"""A real DDP job whose rank 1 needs twice the time for a sample: its samples move, and the losses stay the same."""

from __future__ import annotations

from statistics import fmean, median
from typing import Any

import pytest

from tests.kit.cpu_quota import can_limit

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

TURN_STEPS = 40
"""As in job_work_share.py."""

TOLERANCE = 1e-5
"""Of a loss of about 0.5: the gradients' order of summation differs."""


@pytest.mark.alone
def test_samples_move_from_a_slow_rank_with_equal_losses_and_much_of_the_slowdown_won_back(run_ranks: Any) -> None:
    job = {"seconds": 0.002, "steps": 400}
    jobs = [{**job, "tune": "exact"}, {**job, "tune": "off"}, {**job, "tune": "off", "slow": None, "steps": 100}]
    tuned, plain, fast = run_ranks("job_work_share.py", 2, jobs)
    assert tuned[0]["value"] == tuned[1]["value"] >= 1, tuned[0]["detail"]
    assert tuned[1]["sizes"][-1] < 16 < tuned[0]["sizes"][-1]
    assert tuned[0]["samples"] == plain[0]["samples"]
    assert [rank["sizes_after"] for rank in tuned] == [rank["sizes_after"] for rank in plain], "equal once it is closed"
    assert tuned[0]["agree"]
    assert tuned[0]["losses"] == pytest.approx(plain[0]["losses"], abs=TOLERANCE)
    assert any("since step" in reason and "rank 1 does" in reason for reason in tuned[0]["reasons"])
    slow, now, none = plain[0]["pace"], tuned[0]["pace"], fast[0]["pace"]
    print(f"{slow * 1e3:.1f} -> {now * 1e3:.1f} ms, {none * 1e3:.1f} without the slow rank")  # noqa: T201  with -s
    assert slow - now >= 0.4 * (slow - none)


@pytest.mark.alone
@pytest.mark.parametrize("slowed", ["by sleep", "by a control group"])
def test_in_turns_at_least_60_percent_of_the_slowdown_is_won_back(run_ranks: Any, slowed: str) -> None:
    if slowed == "by a control group" and not can_limit():
        pytest.skip("this needs root and control groups of version 1")
    quota = None if slowed == "by sleep" else 0.5
    job = {"seconds": 0.001, "batch": 32, "tail": 0, "quota": quota}
    fast = {**job, "tune": "off", "slow": None, "quota": None if quota is None else 1.0, "steps": 60}
    jobs = [fast, {**job, "tune": "exact", "by_hand": True, "steps": 15 * TURN_STEPS}, fast]
    before, (turns, _), after = run_ranks("job_work_share.py", 2, jobs)
    least = fmean([before[0]["pace"], after[0]["pace"]])
    pairs = [*zip(turns["paces"]["even"], turns["paces"]["unequal"], strict=False)]
    back = sorted((even - unequal) / (even - least) for even, unequal in pairs)
    even, unequal = (median(paces) * 1e3 for paces in zip(*pairs, strict=True))
    print(f"{slowed}: {even:.1f} -> {unequal:.1f} ms, {least * 1e3:.1f} without the slow rank;")  # noqa: T201
    print(f"{median(back):.0%} won back ({back[0]:.0%} to {back[-1]:.0%}, {len(back)} pairs)")  # noqa: T201
    assert len(back) >= 4
    assert median(back) >= 0.6


def test_shares_are_equal_again_once_tuning_froze_and_nobody_watches_the_loop(run_ranks: Any) -> None:
    job = {"seconds": 0.0005, "steps": 5 * TURN_STEPS, "tail": 0, "by_hand": True, "freeze": 10}
    tuned, plain = run_ranks(
        "job_work_share.py", 2, [{**job, "tune": "exact"}, {**job, "tune": "off", "by_hand": False}]
    )
    for rank in tuned:
        assert sum(size != 16 for size in rank["sizes"]) >= job["freeze"], (rank["detail"], rank["reasons"])
        assert set(rank["sizes"][-TURN_STEPS // 2 :]) == {16}
    assert tuned[0]["agree"]
    assert tuned[0]["losses"] == pytest.approx(plain[0]["losses"], abs=TOLERANCE)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"random": True}, "DistributedSampler"),
        ({"plain": True}, "pacer.backward"),
        ({"count": True}, "counted terms"),
    ],
)
def test_what_cannot_be_shared_exactly_is_refused_and_changes_nothing(
    run_ranks: Any, options: dict[str, Any], reason: str
) -> None:
    job = {"seconds": 0.0001, "steps": 40, **options}
    tuned, plain = run_ranks("job_work_share.py", 2, [{**job, "tune": "exact"}, {**job, "tune": "off"}])
    assert reason in tuned[0]["refused"]["work_share"]
    assert set(tuned[0]["sizes"]) == {16}
    if not options.get("random"):
        assert tuned[0]["losses"] == plain[0]["losses"]
