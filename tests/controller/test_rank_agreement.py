"""When the other rank's words are late or never come, the training thread waits briefly, and the ranks stay equal."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from pacecar.controller.consensus.capabilities import KnobOffer, Offer, encode_offer
from pacecar.controller.consensus.channels import VoteSubject
from pacecar.controller.consensus.protocol import PERIOD, ProposalKind, SwitchProposal
from pacecar.controller.consensus.rank_agreement import (
    DONE_SECONDS,
    MISSED_MAX,
    OVERDUE_SECONDS,
    OVERDUE_STEPS,
    SWITCH_SECONDS,
    VOTE_SECONDS,
    RankAgreement,
)

OFFER = Offer((KnobOffer("bucket_bytes", 0, tuple(range(8)), None, ""),))
PROPOSAL = SwitchProposal(1, 1, (3,), ProposalKind.TRIAL)

BUSY_SECONDS = 2.0
"""What a busy machine may add to a wait of milliseconds."""


class Gather:
    """One frame: complete when the test completes it."""

    def __init__(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        self.gathered, self.mine, self.is_there = gathered, mine, False

    def answer(self, theirs: torch.Tensor | None = None) -> None:
        """Let the other rank's frame come: the same words by default."""
        self.gathered.copy_(torch.cat([self.mine, self.mine if theirs is None else theirs]))
        self.is_there = True

    def is_completed(self) -> bool:
        return self.is_there

    def wait(self) -> None:
        pass


class Group:
    """A group of two whose other rank is slow; `is_prompt`: it answers each frame at once."""

    def __init__(self) -> None:
        self.frames: list[Gather] = []
        self.is_prompt = False

    def _allgather_base(self, gathered: torch.Tensor, mine: torch.Tensor) -> Gather:
        self.frames.append(Gather(gathered, mine))
        if self.is_prompt:
            self.frames[-1].answer()
        return self.frames[-1]

    @property
    def subjects(self) -> list[int]:
        return [int(frame.mine[0]) for frame in self.frames]


class Store:
    """A store's compare-and-set."""

    def __init__(self) -> None:
        self.keys: dict[str, bytes] = {}

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self.keys.setdefault(key, desired.encode())


class Side:
    """A side channel that never has anything."""

    is_busy = True

    def receive(self) -> None:
        return None

    def close(self) -> None:
        pass


def started(*, step_ns: int = 0) -> tuple[RankAgreement, Group]:
    """Return rank 1 of two at the boundary at which it launches the first vote, for PROPOSAL."""
    agreement: Any = RankAgreement(1, 2, votes=True, collectives=lambda: 7)
    group = Group()
    agreement._main._group, agreement._main._store, agreement._main._name = group, Store(), "test"
    agreement._side = Side()
    agreement._member.receive_offers([encode_offer(OFFER)] * 2)
    agreement._member.offer(OFFER)
    agreement._has_offered = True
    agreement._member._offer = None
    agreement._member._held = PROPOSAL
    agreement.report_calm(is_calm=False, step_ns=step_ns)
    for step in range(PERIOD - 1):
        agreement.record_step(step, 10, profiled=False)
    return agreement, group


def boundary(agreement: RankAgreement, step: int) -> tuple[SwitchProposal | None, float]:
    """Pass one boundary; return what is to be carried out, and the seconds that it took."""
    begun = time.monotonic()
    agreement.record_step(step, 10, profiled=False)
    proposal = agreement.decide(lambda held: True)
    return proposal, time.monotonic() - begun


def test_a_vote_that_does_not_come_is_waited_for_once_and_for_a_moment() -> None:
    agreement, group = started()
    assert agreement.decide(lambda held: True) is None
    seconds = [boundary(agreement, step)[1] for step in range(PERIOD, 3 * PERIOD)]
    assert seconds[0] >= VOTE_SECONDS[0]
    assert sum(seconds) < VOTE_SECONDS[0] + BUSY_SECONDS
    assert agreement.frozen is None, "it may still come"
    assert group.subjects == [VoteSubject.VOTE], "no frame is sent before it came"


@pytest.mark.slow
def test_long_steps_have_their_votes_waited_for_no_longer_than_the_bound() -> None:
    agreement, _ = started(step_ns=10_000_000_000)
    agreement.decide(lambda held: True)
    _, seconds = boundary(agreement, PERIOD)
    assert VOTE_SECONDS[1] <= seconds < VOTE_SECONDS[1] + BUSY_SECONDS


def test_who_reads_a_vote_late_refuses_its_switch_at_once_and_votes_on() -> None:
    agreement, group = started()
    agreement.decide(lambda held: True)
    boundary(agreement, PERIOD)
    group.frames[0].answer()
    proposal, _ = boundary(agreement, PERIOD + 1)
    assert proposal == PROPOSAL
    assert group.subjects == [VoteSubject.VOTE, VoteSubject.SWITCH]
    assert group.frames[1].mine[2:].tolist() == [0] * 30, "in the place of the frame that says: I am here"
    begun = time.monotonic()
    assert not agreement.gather_for(PROPOSAL)
    assert time.monotonic() - begun < SWITCH_SECONDS[0]
    assert agreement.frozen is None
    boundary(agreement, PERIOD + 2)
    boundary(agreement, PERIOD + 3)
    assert group.subjects[2:] == [VoteSubject.VOTE], "the next one in its time"


def test_a_vote_that_comes_after_the_next_was_due_is_followed_by_one_for_nothing() -> None:
    agreement, group = started()
    agreement.decide(lambda held: True)
    for step in range(PERIOD, 2 * PERIOD):
        boundary(agreement, step)
    member: Any = agreement._member
    member._ranges.clear()
    group.frames[0].answer()
    boundary(agreement, 2 * PERIOD)  # the next one was to be read here, and launched a boundary ago
    assert group.subjects == [VoteSubject.VOTE, VoteSubject.SWITCH, VoteSubject.VOTE]
    assert group.frames[2].mine[2].item() == 0, "for no proposal"
    closed = member._ranges[-1]
    assert (closed.first_step, len(closed.paces)) == (PERIOD + 1, PERIOD), "as of a rank that read it in time"


def test_a_vote_that_never_comes_ends_tuning_after_steps_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    agreement, _ = started()
    agreement.decide(lambda held: True)
    ages = iter([0.0] * 3 + [OVERDUE_SECONDS] * 3)
    monkeypatch.setattr(agreement._main, "age_seconds", lambda frame: next(ages))
    for step in range(OVERDUE_STEPS + 3):
        boundary(agreement, PERIOD + step)
        assert agreement.frozen is None
    boundary(agreement, 99)
    assert f"a vote has not come back from all ranks in {OVERDUE_STEPS} steps" in str(agreement.frozen)


@pytest.mark.slow
def test_a_switch_to_which_the_other_does_not_come_is_left_out_within_the_bound() -> None:
    agreement, group = started()
    group.is_prompt = True
    agreement.decide(lambda held: True)
    proposal, _ = boundary(agreement, PERIOD)
    assert proposal == PROPOSAL
    group.is_prompt = False
    for missed in range(1, MISSED_MAX + 1):
        begun = time.monotonic()
        assert not agreement.gather_for(PROPOSAL)
        assert SWITCH_SECONDS[0] <= time.monotonic() - begun < SWITCH_SECONDS[0] + BUSY_SECONDS
        assert (agreement.frozen is None) == (missed < MISSED_MAX)


@pytest.mark.slow
def test_without_the_others_word_that_they_have_switched_all_undo() -> None:
    agreement, group = started()
    group.is_prompt = True
    assert agreement.gather_for(PROPOSAL)
    group.is_prompt = False
    undone = []
    begun = time.monotonic()
    assert not agreement.settle(PROPOSAL, is_done=True, undo=lambda: undone.append(True) is None)
    assert time.monotonic() - begun < DONE_SECONDS + BUSY_SECONDS
    assert undone == [True]
    assert agreement.has_left
    store: Any = agreement._main._store
    assert list(store.keys.values()) == [b"go", b"no"], "the other rank reads there that it must undo as well"


def test_who_hears_that_all_have_switched_undoes_all_the_same_if_another_did_not_hear_it() -> None:
    agreement, group = started()
    group.is_prompt = True
    assert agreement.gather_for(PROPOSAL)
    store: Any = agreement._main._store
    first = next(iter(store.keys))
    store.keys[first.replace("switch0", "switch1")] = b"no"
    undone = []
    assert not agreement.settle(PROPOSAL, is_done=True, undo=lambda: undone.append(True) is None)
    assert undone == [True]
    assert not agreement.has_left


def test_norms_of_gradients_that_are_late_are_looked_for_again_without_waiting() -> None:
    agreement, group = started()
    hear = agreement.start_gather(VoteSubject.GRADIENTS, [1.0])
    with pytest.raises(TimeoutError):
        hear()
    begun = time.monotonic()
    with pytest.raises(TimeoutError):
        hear()
    assert time.monotonic() - begun < SWITCH_SECONDS[0]
    group.frames[0].answer()
    assert hear() == [[1.0], [1.0]]
    assert agreement.frozen is None


@pytest.mark.slow
@pytest.mark.parametrize("subject", [VoteSubject.NOISE, VoteSubject.MEMORY])
def test_an_answer_that_is_late_for_one_rank_is_used_by_none(subject: VoteSubject) -> None:
    agreement, group = started()
    hear = agreement.start_gather(subject, [1.0])
    group.frames[0].answer()
    store: Any = agreement._main._store
    store.compare_set = lambda key, expected, desired: b"no"  # the other one gave up
    assert hear() is None
    late = agreement.start_gather(subject, [1.0])
    begun = time.monotonic()
    assert late() is None
    assert time.monotonic() - begun < 1.0 + BUSY_SECONDS
    assert agreement.frozen is None
