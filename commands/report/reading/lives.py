"""Tells which hellos of several ranks belong to one start of the job.  Pure.

Counting them is not enough: a rank may have died before it attached, or not have been in a job that was smaller for a
while, and all that it recorded later would be taken for an earlier start.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.records import JobHello

__all__ = ["lives_of"]

Hellos = Sequence[JobHello | None]
"""Those of one rank in order; None: one that cannot be read."""


def lives_of(ranks: Sequence[Hellos]) -> list[list[int]]:
    """Return the life that each hello of each rank begins.

    If all ranks have as many, they are counted.  Otherwise one launch and attempt is one life; of several with both
    alike (a job that changed its size) a hello belongs to the nearest in time.
    """
    most = max(ranks, key=len)
    if all(len(own) == len(most) for own in ranks):
        return [list(range(len(most)))] * len(ranks)
    order = [[hello] for hello in most]
    found: list[list[list[JobHello | None]]] = []
    for own in ranks:
        at, mine = -1, []
        for hello in own:
            alike = [place for place in range(at + 1, len(order)) if _is_one(order[place][0], hello)]
            if alike:
                at = min(alike, key=lambda place: _apart_ns(order[place][0], hello))
            else:
                at += 1
                order.insert(at, [hello])
            mine.append(order[at])
        found.append(mine)
    lives = {id(life): number for number, life in enumerate(order)}
    return [[lives[id(life)] for life in mine] for mine in found]


def _is_one(one: JobHello | None, other: JobHello | None) -> bool:
    if one is None or other is None:
        return True
    return (one.launch, one.attempt) == (other.launch, other.attempt)


def _apart_ns(one: JobHello | None, other: JobHello | None) -> int:
    return 0 if one is None or other is None else abs(one.started_wall_ns - other.started_wall_ns)
