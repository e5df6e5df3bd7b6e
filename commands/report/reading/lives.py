"""Tells which hellos of several ranks belong to one start of the job.  Pure.

Counting them is not enough: a rank may have died before it attached, or not have been in a job that was smaller for a
while, and all that it recorded later would be taken for an earlier start.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.ledger.attempts import CLOCK_JUMP_NS
from pacecar.records import JobHello

__all__ = ["lives_of"]

NEAR_NS = 60_000_000_000
"""Ranks of one start attach so shortly after each other, as they have just met."""

Hellos = Sequence[JobHello | None]
"""Those of one rank in order; None: one that cannot be read."""


def lives_of(ranks: Sequence[Hellos]) -> list[list[int]]:
    """Return the life that each hello of each rank begins; lives are in the order in which they began.

    If all ranks have as many, and none tells otherwise, they are counted.  Otherwise one launch and attempt is one
    life; of several with both alike (a job that changed its size) a hello belongs to the nearest in time.
    """
    most = max(ranks, key=len)
    if _may_be_counted(ranks):
        return [list(range(len(most)))] * len(ranks)
    order = [[hello] for hello in most]
    found: list[list[list[JobHello | None]]] = []
    for own in ranks:
        at, mine = -1, []
        for number, hello in enumerate(own):
            alike = [place for place in range(at + 1, len(order)) if _is_one(order[place][0], hello)]
            if alike:
                at = min(alike, key=lambda place: _apart_ns(order[place][0], hello))
            else:
                at = _place_of(hello, order, at + 1, own[number + 1 :])
                order.insert(at, [hello])
            mine.append(order[at])
        found.append(mine)
    lives = {id(life): number for number, life in enumerate(order)}
    return [[lives[id(life)] for life in mine] for mine in found]


def _may_be_counted(ranks: Sequence[Hellos]) -> bool:
    """Return whether the n-th hellos of all ranks are of one life, so far as they tell.

    Ranks that could not agree on a launch differ in it, but are there together.
    """
    first = ranks[0]
    if any(len(own) != len(first) for own in ranks):
        return False
    return all(
        _is_one(one, other)
        or (_apart_ns(one, other) <= CLOCK_JUMP_NS and not any(_is_one(each, other) for each in first))
        for own in ranks
        for one, other in zip(first, own, strict=True)
    )


def _place_of(hello: JobHello | None, order: Sequence[Hellos], first: int, later: Hellos) -> int:
    """Return where among the lives `order` from `first` on a new one began, before those that `later` hellos are of."""
    end = next((at for at in range(first, len(order)) if any(_is_one(order[at][0], one) for one in later)), len(order))
    if hello is None:
        return first
    began_ns = hello.started_wall_ns
    places = (at for at in range(first, end) if (one := order[at][0]) is not None and one.started_wall_ns > began_ns)
    return next(places, end)


def _is_one(one: JobHello | None, other: JobHello | None) -> bool:
    """Return whether both may be of one life; each torchrun agent counts restarts from its own start."""
    if one is None or other is None:
        return True
    return one.launch == other.launch and (one.attempt == other.attempt or _apart_ns(one, other) <= NEAR_NS)


def _apart_ns(one: JobHello | None, other: JobHello | None) -> int:
    return 0 if one is None or other is None else abs(one.started_wall_ns - other.started_wall_ns)
