"""Shares a bounded resource among users by max-min fairness (Bertsekas and Gallager, "Data Networks", section 6.5.2).

A quota for each user wastes what is free; without one the first user can take everything.  So a user may use what is
free.  When nothing is free, he takes from the user who holds most, as long as that user then still holds no less than
he does.  So nobody can keep another below an equal share, however much he holds, and two who hold the same do not take
from each other for ever.

Pure.  Left out: which item of the holder goes.  The owner of the table chooses the least valuable (departed, silent,
old).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

__all__ = ["round_robin", "yielding_holder"]

Holder = TypeVar("Holder")
Item = TypeVar("Item")


def yielding_holder(asker: Holder, held: Mapping[Holder, int], amount: int = 1) -> Holder | None:
    """Return who must give so that `asker` gets `amount` more of a full table: the one who holds most.

    `held` is holder -> what he holds, as a count or in bytes.  None: nobody holds more than `asker` would then.
    """
    others = [holder for holder in held if holder != asker]
    most = max(others, key=lambda holder: held[holder], default=None)
    if most is None or held[most] <= held.get(asker, 0) + amount:
        return None
    return most


def round_robin(items: Iterable[tuple[Holder, Item]]) -> list[Item]:
    """Return the first item of each holder, then the second of each, and so on; those of one in their order."""
    before: Counter[Holder] = Counter()
    placed: list[tuple[int, Item]] = []
    for holder, item in items:
        placed.append((before[holder], item))
        before[holder] += 1
    return [item for _, item in sorted(placed, key=lambda one: one[0])]
