"""A closed road keeps its last gather: a thread of gloo may still hold it, and the group waits for that thread."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

from pacecar.controller.channels import MainRoad, SideRoad, Subject
from pacecar.profiler.crew.road import GlooRoad
from pacecar.profiler.crew.words import MESSAGE_WORDS


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


def kept(road: Any, words: list[int], *, is_taken: bool) -> list[bool]:
    """Return which of three gathers are still there after the road was closed."""
    road._group = group = Group()
    for number in range(3):
        road.post(words)
        if number < 2 or is_taken:
            assert road.take() is not None
    road.close()
    gc.collect()
    return [gather() is not None for gather in group.gathers]


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "not taken"])
def test_a_closed_side_road_keeps_what_a_thread_may_still_hold_and_nothing_older(is_taken: bool) -> None:
    assert kept(SideRoad(1), [1, 2, 3], is_taken=is_taken)[-1]
    assert not kept(SideRoad(1), [1, 2, 3], is_taken=is_taken)[0]


@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "not taken"])
def test_so_does_the_road_on_which_ranks_are_compared(is_taken: bool) -> None:
    assert kept(GlooRoad(0, 1), [0] * MESSAGE_WORDS, is_taken=is_taken)[-1]
    assert not kept(GlooRoad(0, 1), [0] * MESSAGE_WORDS, is_taken=is_taken)[0]


def test_so_does_the_road_of_the_votes() -> None:
    road: Any = MainRoad(0, 1)
    road._group = group = Group()
    for _ in range(20):
        road.post(Subject.VOTE, [1])
    road.close()
    gc.collect()
    kept = [gather() is not None for gather in group.gathers]
    assert kept[-1]
    assert not kept[0]
