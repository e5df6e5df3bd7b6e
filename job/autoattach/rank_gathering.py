"""Agrees among ranks, without waiting, on the step at which all attach a tuner: a counter in the job's store.

Attaching a tuner is a collective: ranks meet and make a group.  A rank that does not come (its python has no pacecar,
it trains something else) would delay the others as long as they are willing to wait.  A script that asked for nothing
must not wait.  So each rank adds itself to a counter in the job's store, and when rank 0 sees that all are there it
names a step a few steps ahead.  Ranks under DDP are never a whole step apart, so each reads that number before it gets
there.

A store may outlive its ranks; hence `life` in the keys (see `profiler.transport.rendezvous`).
"""

from __future__ import annotations

from typing import Any

from pacecar.profiler.transport.rendezvous import life

__all__ = ["LEAD_STEPS", "STEPS_MAX", "RankGathering"]

LEAD_STEPS = 4
"""Steps between rank 0's naming of a step and that step; two would do."""

STEPS_MAX = 100
"""A rank that has not come after this many steps of the others will not come."""

NEVER = "never"


class RankGathering:
    """One rank's part.  `claim` must be equal on all ranks; ranks with another claim count under another key."""

    def __init__(self, store: Any, rank: int, world_size: int, claim: str) -> None:  # noqa: ANN401  dist.Store
        prefix = f"pacecar/run/{life(world_size)}/{claim}"
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._here, self._at = f"{prefix}/here", f"{prefix}/at"
        self._step = 0
        self._named: str | None = None

    def step(self) -> bool | None:
        """Count a step of this rank; return True in the one at which all attach, False if they never will."""
        self._step += 1
        if self._step == 1:
            self._store.add(self._here, 1)
        if self._named is None:
            self._named = self._ask()
        if self._named is None:
            # The others wait longer than rank 0, which decides.
            return False if self._step > STEPS_MAX + 2 * LEAD_STEPS else None
        if self._named == NEVER or int(self._named) < self._step:
            return False
        return True if int(self._named) == self._step else None

    def _ask(self) -> str | None:
        if self._rank != 0:
            return self._store.get(self._at).decode() if self._store.check([self._at]) else None
        is_complete = self._store.add(self._here, 0) >= self._world_size
        if not is_complete and self._step < STEPS_MAX:
            return None
        named = str(self._step + LEAD_STEPS) if is_complete else NEVER
        self._store.set(self._at, named)
        return named
