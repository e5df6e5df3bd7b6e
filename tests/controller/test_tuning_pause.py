"""Stragglers and hangs pause tuning only while they last."""

from __future__ import annotations

import pytest

from pacecar.controller.guards.tuning_pause import KNOB_STEPS_MAX, REASONS_MAX, STRAGGLER_STEPS_MAX, TuningPause
from pacecar.records import HangSuspicion, Straggler
from tests.controller.held import HeldRun


def _straggler(rank: int | None = 3, cause: str = "throttled", *, since: int = 100, ended: bool = False) -> Straggler:
    return Straggler(
        job="job", late_rank=rank, cause=cause, phase="forward", since_step=since, step=since + 20, wall_ns=1,  # type: ignore[arg-type]
        excess_ns=5, evidence="20 of 20 steps", ended=ended,
    )  # fmt: skip


def _hang(*, ended: bool = False) -> HangSuspicion:
    return HangSuspicion(
        job="job", rank=0, step=130, phase="backward", wall_ns=1, silent_ns=2, last_collective=None, collectives=None,
        stack=None, ended=ended,
    )  # fmt: skip


def test_a_straggler_is_a_reason_until_it_ends() -> None:
    holds = TuningPause()
    assert holds.pause_reason(120) is None
    holds.put(_straggler())
    assert holds.pause_reason(121) == "rank 3 is late: throttled, since step 100"
    holds.put(_straggler(ended=True))
    assert holds.pause_reason(122) is None


def test_a_straggler_that_stays_is_the_world() -> None:
    holds = TuningPause()
    holds.put(_straggler())
    assert holds.pause_reason(100 + STRAGGLER_STEPS_MAX) is not None
    holds.put(_straggler(since=100))
    assert holds.pause_reason(101 + STRAGGLER_STEPS_MAX) is None


@pytest.mark.parametrize("cause", ["link", "data_wait"])
def test_a_slow_link_and_late_data_hold_for_a_while_and_are_then_tuned_for(cause: str) -> None:
    holds = TuningPause()
    holds.put(_straggler(None, cause))
    assert holds.pause_reason(121) == f"the job is late: {cause}, since step 100"
    assert holds.pause_reason(100 + KNOB_STEPS_MAX) is not None
    assert holds.pause_reason(101 + KNOB_STEPS_MAX) is None
    assert KNOB_STEPS_MAX < STRAGGLER_STEPS_MAX


def test_a_hang_goes_before_a_straggler_and_ends() -> None:
    holds = TuningPause()
    holds.put(_straggler())
    holds.put(_hang())
    assert holds.pause_reason(131) == "rank 0 may hang in backward of step 130"
    holds.put(_hang(ended=True))
    assert holds.pause_reason(131) is not None
    holds.put(_straggler(ended=True))
    assert holds.pause_reason(131) is None


def test_a_hang_that_ended_before_anybody_asked_is_a_reason_once() -> None:
    holds = TuningPause()
    holds.put(_hang())
    holds.put(_hang(ended=True))
    assert holds.pause_reason(131) == "rank 0 may hang in backward of step 130"
    assert holds.pause_reason(132) is None


def test_the_reasons_are_bounded() -> None:
    holds = TuningPause()
    for rank in range(2 * REASONS_MAX):
        holds.put(_straggler(rank))
    assert len(holds._late) == REASONS_MAX


def test_the_policy_freezes_and_goes_on() -> None:
    holds = TuningPause()
    run = HeldRun(holds)
    run.run(30)
    holds.put(_straggler(since=20))
    run.run(30)
    assert run.said[-1].state == "frozen"
    assert run.said[-1].detail.startswith("rank 3 is late")
    holds.put(_straggler(since=20, ended=True))
    run.run(10)
    assert run.said[-1].state != "frozen"
