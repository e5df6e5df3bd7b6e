"""Tells which ranks have made a call out of turn, and which have kept the order of their calls (`call_order`).

A rank may depart from its order with good reason: it is the first to evaluate, or to save, and another one is to blame
that does not.  So it counts only within a step, between a forward in training and the end of the step.  What that does
not rule out is a call within a step that is due for the first time, and that only the other rank leaves out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from pacecar.records.hangs import Departure, RankAccount

from .group_members import CollectiveGroup

__all__ = ["Turns", "find_turns"]


class Turns(msgspec.Struct, frozen=True):
    """Ranks that have `kept` their order, how often, and the departures of others.  All else is in doubt."""

    kept: Mapping[int, int]
    departures: Mapping[int, Departure]

    def out_of_turn(self, ranks: Collection[int], group: CollectiveGroup, number: int) -> frozenset[int]:
        """Return those of `ranks` that made this call out of turn, if all others of them have kept their order."""
        out = {rank for rank in ranks if self._is_at(rank, group, number)}
        return frozenset(out if all(rank in self.kept for rank in ranks if rank not in out) else ())

    def _is_at(self, rank: int, group: CollectiveGroup, number: int) -> bool:
        found = self.departures.get(rank)
        return found is not None and found.number == number and found.group == group.name


def find_turns(accounts: Iterable[RankAccount]) -> Turns:
    """Return the turns of the ranks whose calls have an order."""
    kept, departures = {}, {}
    for account in accounts:
        if account.order is not None and account.order.departure is None:
            kept[account.rank] = account.order.repeats
        elif account.order is not None and account.order.departure is not None and account.is_in_step:
            departures[account.rank] = account.order.departure
    return Turns(kept, departures)
