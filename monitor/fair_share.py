"""Shares a bounded resource among users by max-min fairness (Bertsekas and Gallager, "Data Networks", section 6.5.2).

A quota for each user wastes what is free; without one the first user can take everything.  So a user may take what is
free.  When nothing is free, it is taken from the user who holds most, as long as that user keeps at least as much as
the one who asks.  So no user can push another below an equal share, and two who hold the same do not take from each
other for ever.

Pure.  Left out: which item the holder loses.  The owner of the table chooses the least valuable (departed, silent,
old).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

__all__ = ["round_robin", "yielding_holder", "yielding_item"]

Holder = TypeVar("Holder")
Item = TypeVar("Item")


def yielding_holder(asker: Holder, held: Mapping[Holder, int], amount: int = 1) -> Holder | None:
    """Return who must give up something so that `asker` gets `amount` more of a full table: the largest holder.

    `held` maps holders to what they hold, as a count or in bytes.  None: no other would still hold more than `asker`.
    """
    others = [holder for holder in held if holder != asker]
    most = max(others, key=lambda holder: held[holder], default=None)
    if most is None or held[most] <= held.get(asker, 0) + amount:
        return None
    return most


def round_robin(items: Iterable[tuple[Holder, Item]]) -> list[Item]:
    """Return the first item of each holder, then the second of each, and so on; each keeps the order of its items."""
    before: Counter[Holder] = Counter()
    placed: list[tuple[int, Item]] = []
    for holder, item in items:
        placed.append((before[holder], item))
        before[holder] += 1
    return [item for _, item in sorted(placed, key=lambda one: one[0])]


def yielding_item(asker: Holder, items: Iterable[Item], holder_of: Callable[[Item], Holder]) -> Item:
    """Return which of `items`, all that a full table holds, makes room for a new one of `asker`.

    It is the first of the holder with most.  If nobody holds more than `asker` would, it is the first of `asker`'s own,
    or the first of all if `asker` holds none.
    """
    kept = list(items)
    held = Counter(map(holder_of, kept))
    giver = yielding_holder(asker, held)
    if giver is None and asker in held:
        giver = asker
    return next(item for item in kept if giver in (None, holder_of(item)))
