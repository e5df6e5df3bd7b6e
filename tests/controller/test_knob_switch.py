"""A switch follows from what all ranks agreed on, whatever this rank can or cannot see of itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pacecar.clock import SystemClock
from pacecar.controller.consensus.agreement import LocalAgreement
from pacecar.controller.consensus.capabilities import KnobOffer, Offer
from pacecar.controller.consensus.knob_switch import KnobSwitcher
from pacecar.controller.consensus.protocol import ProposalKind, SwitchProposal
from pacecar.controller.knobs.actuator import Actuator, ActuatorError


class Knob(Actuator):
    """Remembers every value that was applied."""

    knob = "bucket_bytes"

    def __init__(self) -> None:
        self.applied = [4]
        self.is_blind = self.is_stuck = False

    def value(self) -> int:
        if self.is_blind:
            raise RuntimeError("planted")
        return self.applied[-1]

    def domain(self) -> tuple[int, ...]:
        return (2, 4, 8)

    def refusal(self) -> str | None:
        return None

    def apply(self, value: int) -> None:
        self.applied.append(value)
        if self.is_stuck:
            self.is_stuck = False
            raise ActuatorError("planted")


class OneOfMany(LocalAgreement):
    """Another rank fails where `others_fail`."""

    others_fail = False

    def settle(self, proposal: SwitchProposal, *, is_done: bool, undo: Callable[[], bool]) -> bool:
        return super().settle(proposal, is_done=is_done and not self.others_fail, undo=undo)


@pytest.fixture
def knob() -> Knob:
    return Knob()


@pytest.fixture
def board(knob: Knob) -> KnobSwitcher:
    agreement = OneOfMany()
    agreement.offer(Offer((KnobOffer("bucket_bytes", 4, (2, 4, 8), None, ""),)))
    board = KnobSwitcher({"bucket_bytes": knob}, agreement, SystemClock())
    assert board.carry_out(SwitchProposal(1, 1, (4,), ProposalKind.REHEARSAL)).is_done
    return board


def test_a_rank_that_cannot_see_its_values_builds_anew_whenever_the_others_do(board: KnobSwitcher, knob: Knob) -> None:
    board._agreement.others_fail = True  # type: ignore[attr-defined]
    knob.is_blind = True
    assert not board.carry_out(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL)).is_done
    assert knob.applied == [4, 4, 8, 4], "to the new value and back, as on the other ranks"


def test_a_failed_switch_goes_back_to_what_was_agreed_on(board: KnobSwitcher, knob: Knob) -> None:
    knob.is_stuck = True
    assert not board.carry_out(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL)).is_done
    assert knob.applied[-1] == 4
    assert board.agreed() == (4,)
    assert board.barred == {"bucket_bytes"}


def test_a_value_that_was_changed_from_outside_is_not_voted_away(board: KnobSwitcher, knob: Knob) -> None:
    assert board.can_apply(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL))
    knob.applied.append(2)
    assert not board.can_apply(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL))
    assert board.agreed() == (4,)
    board.adopt_current()
    assert board.can_apply(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL))


def test_a_switch_that_is_done_is_what_the_next_one_begins_from(board: KnobSwitcher) -> None:
    assert board.carry_out(SwitchProposal(2, 1, (8,), ProposalKind.TRIAL)).turned == {"bucket_bytes": (4, 8)}
    assert board.carry_out(SwitchProposal(3, 1, (8,), ProposalKind.KEEP)).turned == {}
    assert board.carry_out(SwitchProposal(4, 2, (2,), ProposalKind.TRIAL)).turned == {"bucket_bytes": (8, 2)}
