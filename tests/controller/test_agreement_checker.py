"""Every order of events within bounds: ranks stay equal and never hang; deliberately broken rules are detected."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pacecar.controller.consensus.protocol import (
    CALM_NS,
    LEISURE_PERIOD,
    LONG_STEP_NS,
    PERIOD,
    ProtocolMember,
    SwitchProposal,
)
from pacecar.controller.consensus.rank_agreement import RankAgreement

sys.path.insert(0, str(Path(__file__).parent))  # the tests are no package
from checker import Bounds, ViolationError, check

from tests.kit.selection import decisive

pytestmark = pytest.mark.slow

PERIODS_MAX = 4
"""From a wish to its switch when a gather is seen at the second look at the latest."""


@pytest.mark.slow
def test_two_ranks_with_one_fault_anywhere_never_part() -> None:
    census = check(Bounds(faults=1, wishes=1, boundaries=4 * PERIOD, delay=1))
    assert census.states > 5_000
    assert census.switches > 10
    assert census.failures > 5
    assert census.retired > 100


@pytest.mark.slow
@pytest.mark.parametrize("kind", decisive(["close", "skip", "late", "off"], "close", "late"))
def test_one_of_two_ranks_may_close_leave_out_a_boundary_wait_no_longer_or_not_measure_at_any_moment(kind: str) -> None:
    census = check(Bounds(faults=1, wishes=1, boundaries=4 * PERIOD, delay=1, kinds=(kind,)))
    assert census.switches > 0
    assert (census.left > 0) == (kind == "close"), "every rank takes no further part, and the training goes on"
    assert (census.left_out > 0) == (kind in ("close", "skip", "late")), (
        "a switch that was voted for is left out by all"
    )


@pytest.mark.slow
@pytest.mark.parametrize("faults", [1, pytest.param(2, marks=pytest.mark.full)])
def test_ranks_that_read_votes_late_never_part_and_go_on_tuning(faults: int) -> None:
    census = check(Bounds(faults=faults, wishes=1, boundaries=4 * PERIOD, delay=1, lag=2, kinds=("late",)))
    assert census.switches > 0
    assert census.left_out > 0
    assert census.left == 0


@pytest.mark.slow
def test_ranks_that_close_each_at_any_moment_go_back_together_or_not_at_all() -> None:
    census = check(Bounds(faults=2, wishes=1, boundaries=3 * PERIOD, delay=1, kinds=("finish",)))
    assert census.taken_back > 0
    assert census.left > census.taken_back, "mostly they close at different moments"


@pytest.mark.full
def test_one_or_two_of_three_ranks_may_close_at_any_moment() -> None:
    census = check(Bounds(ranks=3, faults=2, wishes=1, boundaries=3 * PERIOD, delay=1, kinds=("close",)))
    assert census.states > 10_000
    assert census.switches > 0
    assert census.left > 0
    assert census.left_out > 0


@pytest.mark.full
@pytest.mark.parametrize("step_ns", [0, LONG_STEP_NS])
def test_one_of_three_ranks_may_do_so(step_ns: int) -> None:
    kinds = ("close", "skip", "late", "off")
    census = check(Bounds(ranks=3, faults=1, wishes=1, boundaries=3 * PERIOD, delay=1, kinds=kinds, step_ns=step_ns))
    assert census.switches > 0
    assert census.left > 0


@pytest.mark.full
def test_three_ranks_never_part_when_one_freezes_or_fails() -> None:
    census = check(
        Bounds(ranks=3, faults=1, wishes=1, boundaries=3 * PERIOD, delay=1, kinds=("side", "refuse", "fail"))
    )
    assert census.states > 5_000
    assert census.failures > 0


def test_a_wish_is_applied_or_replaced_within_four_periods_whenever_the_gathers_are_seen() -> None:
    census = check(Bounds(wishes=1, boundaries=6 * PERIOD, delay=1, times_wishes=True))
    assert census.switches > 10
    assert 0 < census.longest_wish <= PERIODS_MAX * PERIOD


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_ns", "periods"),
    [
        (LONG_STEP_NS, 3),
        *(pytest.param(ns, n, marks=pytest.mark.full) for ns, n in ((CALM_NS, 3), (LONG_STEP_NS, 4), (CALM_NS, 4))),
    ],
)
def test_ranks_that_meet_at_every_second_step_never_part(step_ns: int, periods: int) -> None:
    census = check(Bounds(faults=1, wishes=1, boundaries=periods * PERIOD, delay=1, step_ns=step_ns))
    assert census.switches > 10
    assert census.failures > 5
    assert census.retired > 100


def test_at_every_second_step_a_wish_is_applied_or_replaced_within_four_periods_of_two() -> None:
    census = check(Bounds(wishes=1, boundaries=5 * PERIOD, delay=1, times_wishes=True, step_ns=LONG_STEP_NS))
    assert census.switches > 10
    assert 0 < census.longest_wish <= PERIODS_MAX * LEISURE_PERIOD


@pytest.mark.soak
@pytest.mark.parametrize(
    "bounds",
    [
        Bounds(faults=1, wishes=2, boundaries=5 * PERIOD),
        Bounds(faults=2, wishes=1, boundaries=4 * PERIOD, delay=1),
        Bounds(faults=1, wishes=1, withdrawals=1, lag=3, boundaries=4 * PERIOD),
        Bounds(ranks=3, faults=1, wishes=1, boundaries=4 * PERIOD, delay=1),
        Bounds(faults=2, wishes=2, boundaries=4 * PERIOD, delay=1, kinds=("close", "skip", "late", "freeze", "fail")),
        Bounds(faults=1, wishes=2, boundaries=5 * PERIOD, delay=1, step_ns=LONG_STEP_NS),
        Bounds(ranks=3, faults=1, wishes=1, boundaries=3 * PERIOD, delay=1, step_ns=LONG_STEP_NS),
        Bounds(ranks=3, faults=2, wishes=2, boundaries=4 * PERIOD, delay=1, kinds=("close",)),
        Bounds(ranks=3, faults=3, wishes=1, boundaries=3 * PERIOD, delay=1, kinds=("finish",)),
        Bounds(faults=2, wishes=2, boundaries=4 * PERIOD, delay=1, lag=3, kinds=("finish", "skip")),
    ],
    ids=[
        "two wishes",
        "two faults",
        "ranks that lag by three steps",
        "three ranks",
        "two of what one rank alone does",
        "two wishes of ranks at leisure",
        "three ranks at leisure",
        "one and two of three ranks close",
        "all of three ranks close",
        "ranks that lag close, or leave out a boundary",
    ],
)
def test_wider_bounds(bounds: Bounds) -> None:
    print(bounds, check(bounds))  # noqa: T201  the figures


# --- broken rules -------------------------------------------------------------------------------------------


class VotesWithoutADigest(ProtocolMember):
    """Votes that it holds something, not what."""

    def ballot(self, *, can_apply: bool = True, place: int = 0) -> Any:
        digest, _, *rest = super().ballot(can_apply=can_apply, place=place)
        return (min(digest, 1), -min(digest, 1), *rest)


class LeavesWithoutAWord(ProtocolMember):
    """Stops voting when it freezes."""

    def freeze(self, reason: str) -> None:
        super().freeze(reason)
        self.has_retired = True


class VotesThoughFrozen(ProtocolMember):
    """Votes for what it holds after it froze, as if alive."""

    def ballot(self, *, can_apply: bool = True, place: int = 0) -> Any:
        frozen, self.frozen = self.frozen, None
        try:
            return super().ballot(can_apply=can_apply, place=place)
        finally:
            self.frozen = frozen


class AppliesWhatItVotedFor(ProtocolMember):
    """Ignores what the others voted."""

    def tally(self, lowest: Sequence[int]) -> SwitchProposal | None:
        voted = self._voted
        super().tally(lowest)
        return voted


class DoesNotCount(ProtocolMember):
    """Does not count the switches, unlike the others."""

    def applied(self, proposal: SwitchProposal) -> None:
        super().applied(proposal)
        if self.rank == 0:
            self.epoch -= 1


def keeps_what_it_has(
    agreement: RankAgreement, proposal: SwitchProposal, *, is_done: bool, undo: Callable[[], bool]
) -> bool:
    """Ignore that another rank failed."""
    (agreement._member.applied if is_done else agreement._member.failed)(proposal)
    return is_done


class SwitchesAfterTheVote(RankAgreement):
    """Takes the vote for the switch: assumes that every voter will be there."""

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        return not self.has_left


class KeepsItsOwnVerdict(RankAgreement):
    """Relies on what it saw itself, although others may have given up."""

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        main: Any = self._main
        verdict, main.verdict = main.verdict, lambda frame, *, is_complete: is_complete
        try:
            return super().gather_for(proposal, closes=closes)
        finally:
            main.verdict = verdict


class SwitchesThoughLate(RankAgreement):
    """Carries out what a vote decided although it reads the vote later than the others."""

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        return self._is_late or super().gather_for(proposal, closes=closes)


class ClosesAnywhere(RankAgreement):
    """Treats any two closes as closes after the same step."""

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        counted, self._collectives = self._collectives, int
        boundary, self._boundary = self._boundary, 0
        try:
            return super().gather_for(proposal, closes=closes)
        finally:
            self._collectives, self._boundary = counted, boundary


class CountsNoCollectives(RankAgreement):
    """Treats the n-th boundary of two ranks as the same place in the training."""

    def gather_for(self, proposal: SwitchProposal, *, closes: bool = False) -> bool:
        counted, self._collectives = self._collectives, int
        try:
            return super().gather_for(proposal, closes=closes)
        finally:
            self._collectives = counted

    def _launch(self, can_apply: Any) -> None:
        counted, self._collectives = self._collectives, int
        try:
            super()._launch(can_apply)
        finally:
            self._collectives = counted


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "bounds", "found"),
    [
        ({"agreement": SwitchesAfterTheVote}, Bounds(wishes=1, faults=1, kinds=("close",)), "all ranks wait"),
        pytest.param(
            {"agreement": KeepsItsOwnVerdict},
            Bounds(wishes=1, faults=1, kinds=("late",)),
            "in step|all ranks wait",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"agreement": KeepsItsOwnVerdict},
            Bounds(wishes=1, faults=2, delay=1, kinds=("finish",)),
            "all ranks wait",
            marks=pytest.mark.full,
        ),
        ({"agreement": SwitchesThoughLate}, Bounds(wishes=1, faults=1, delay=1, kinds=("late",)), "all ranks wait"),
        pytest.param(
            {"agreement": ClosesAnywhere},
            Bounds(wishes=1, faults=2, delay=1, lag=3, kinds=("finish",)),
            "in step",
            marks=pytest.mark.full,
        ),
        pytest.param(
            {"agreement": CountsNoCollectives},
            Bounds(wishes=1, faults=1, lag=3, delay=1, kinds=("skip",)),
            "in step",
            marks=pytest.mark.full,
        ),
        ({"member": VotesWithoutADigest}, Bounds(withdrawals=0), "says"),
        ({"member": AppliesWhatItVotedFor}, Bounds(wishes=1), "says"),
        ({"member": LeavesWithoutAWord}, Bounds(wishes=0, faults=1, kinds=("freeze",)), "all ranks wait"),
        pytest.param(
            {"member": VotesThoughFrozen},
            Bounds(wishes=1, faults=1, kinds=("freeze",)),
            "was frozen when it voted",
            marks=pytest.mark.full,
        ),
        ({"member": DoesNotCount}, Bounds(wishes=1), "has \\(epoch, value\\)"),
        ({"settle": keeps_what_it_has}, Bounds(wishes=1, faults=1, kinds=("fail",)), "has \\(epoch, value\\)"),
    ],
    ids=lambda value: next(iter(value.values())).__name__ if isinstance(value, dict) else None,
)
def test_a_broken_rule_is_found_out(rule: dict[str, Any], bounds: Bounds, found: str) -> None:
    with pytest.raises(ViolationError, match=found):
        check(bounds, **rule)


def test_a_violation_tells_the_order_of_events() -> None:
    with pytest.raises(ViolationError) as told:
        check(Bounds(wishes=0, faults=1, kinds=("freeze",)), member=LeavesWithoutAWord)
    assert "freeze" in str(told.value)
    assert str(told.value).count("\n") > 5
