"""A closed channel keeps its last gather: a thread of gloo may still hold it, and the group waits for that thread.

A waiting rank also notices a farewell in any earlier frame.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, Literal

import pytest
import torch

from pacecar.controller.consensus.channels import LeftError, VoteChannel, VoteSubject
from pacecar.controller.consensus.rank_agreement import RankAgreement
from pacecar.profiler.ranks.exchange.gloo_transport import GlooTransport
from pacecar.profiler.ranks.exchange.subgroups import subgroup_of
from pacecar.profiler.transport.side_group import SideGroup


class Gather:
    """A gather that is complete."""

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class Group:
    """A group whose gathers are complete at once."""

    def __init__(self) -> None:
        self.gathers: list[weakref.ref[Gather]] = []

    def _allgather_base(self, *_: Any) -> Gather:
        gather = Gather()
        self.gathers.append(weakref.ref(gather))
        return gather


def kept(road: Any, *, is_taken: bool) -> list[bool]:
    """Return which of three gathers still exist after the channel was closed."""
    road._group = group = Group()
    for number in range(3):
        road.post([1, 2, 3])
        if number < 2 or is_taken:
            assert road.receive() is not None
    road.close()
    gc.collect()
    return [gather() is not None for gather in group.gathers]


@pytest.mark.slow
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "not taken"])
def test_a_closed_side_road_keeps_what_a_thread_may_still_hold_and_nothing_older(is_taken: bool) -> None:
    assert kept(SideGroup(0, 1), is_taken=is_taken)[-1]
    assert not kept(SideGroup(0, 1), is_taken=is_taken)[0]


@pytest.mark.slow
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "not taken"])
def test_so_does_the_road_on_which_ranks_are_compared(is_taken: bool) -> None:
    assert kept(GlooTransport(0, 1, subgroup_of(0, 1)), is_taken=is_taken)[-1]
    assert not kept(GlooTransport(0, 1, subgroup_of(0, 1)), is_taken=is_taken)[0]


@pytest.mark.slow
def test_so_does_the_road_of_the_votes() -> None:
    road: Any = VoteChannel(0, 1)
    road._group = group = Group()
    for _ in range(20):
        road.post(VoteSubject.VOTE, [1])
    road.close()
    gc.collect()
    kept = [gather() is not None for gather in group.gathers]
    assert kept[-1]
    assert not kept[0]


Answer = Literal["the same", "a farewell", "nothing"]


class Late(Gather):
    """A gather that other ranks never join."""

    def is_completed(self) -> bool:
        return False


class TwoRanks:
    """A group of two whose other rank sends what the test gives it, frame by frame."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)

    def _allgather_base(self, gathered: torch.Tensor, mine: torch.Tensor, *_: Any) -> Gather:
        answer = self.answers.pop(0)
        theirs = mine.clone()
        if answer == "a farewell":
            theirs[0] = VoteSubject.LEAVE
        gathered.copy_(torch.cat([mine, theirs]))
        return Late() if answer == "nothing" else Gather()


def agreement(*answers: Answer) -> Any:
    """Return a rank that has met another one, with a vote channel on which that one answers so."""
    rank: Any = RankAgreement(0, 2, votes=True, collectives=lambda: 7)
    rank._main._group = TwoRanks(*answers)
    return rank


def test_a_rank_that_waits_for_a_frame_notices_a_farewell_in_an_unread_earlier_one() -> None:
    """Otherwise it would wait 10 s for a rank that sends nothing any more, and the job with it."""
    road: Any = VoteChannel(0, 2)
    road._group = TwoRanks("the same", "a farewell", "nothing")
    frames = [road.post(VoteSubject.VOTE, [1]) for _ in range(3)]
    with pytest.raises(LeftError, match="rank 1 takes no further part"):
        road.receive(frames[2], 1.0)
    assert road.receive(frames[0], 1.0)[1][0] == 1
    with pytest.raises(LeftError):
        road.receive(frames[1], 1.0)


@pytest.mark.parametrize("who", ["the other", "this one"])
def test_what_all_sent_before_a_rank_left_is_received_by_all_also_afterwards(who: str) -> None:
    """A learning rate follows from it: one rank alone would use another than the rest."""
    answers: Sequence[Answer] = ("the same", "a farewell", "nothing") if who == "the other" else ("the same", "nothing")
    rank = agreement(*answers)
    heard = rank.start_gather(VoteSubject.NOISE, [3.0, 4.0])
    if who == "the other":
        assert rank.start_gather(VoteSubject.GRADIENTS, [1.0])() is None
    else:
        rank.leave()
    assert rank.has_left
    assert heard() == [[3.0, 4.0], [3.0, 4.0]]
    assert rank.start_gather(VoteSubject.GRADIENTS, [1.0])() is None
