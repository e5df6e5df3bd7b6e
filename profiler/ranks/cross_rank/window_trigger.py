"""Decides when the ranks' steps are worth a cross-rank window.

A rank that seems late is one reason.  The other is that somebody seems late and the always-on timers cannot tell who:
the ranks' exposed communication, the time for which they wait for each other, is high and uneven.  Where all ranks meet
many times a step (sharded parameters, tensor parallelism), that is all that shows.

A window that changed nothing makes the next one rarer.

Pure: totals and suspicions in, a decision out.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.clock import NS_PER_SECOND

from ..exchange.totals import LedgerTotals

__all__ = ["WindowTrigger"]

UNEVEN_RATIO = 0.10
UNEVEN_NS = 1_000_000
"""The ranks' exposed communication is uneven if it differs by this share of a step, and by as much time."""

UNEVEN_LOOKS = 3
"""Totals in a row that must be uneven; they are based on windows of different steps."""

LOOK_STEPS = 8
"""Steps between two looks at totals."""

PAUSE_SECONDS = 60.0
PAUSE_SECONDS_MAX = 3600.0
"""The least time between two windows; it doubles for each that changed nothing."""


class WindowTrigger:
    """The suspicion that a window would clear up."""

    def __init__(self) -> None:
        self._before: Sequence[LedgerTotals] = ()
        self._uneven = self._even = 0
        self._is_named = False
        self._next_ns = 0
        self._pause_seconds = PAUSE_SECONDS

    @property
    def is_uneven(self) -> bool:
        """Whether the ranks wait for each other unevenly."""
        return self._uneven >= UNEVEN_LOOKS

    @property
    def is_even(self) -> bool:
        """Whether the ranks wait for each other evenly, as far as their last totals show."""
        return self._even >= UNEVEN_LOOKS

    def named(self) -> None:
        """Record that the detector names a rank anew."""
        self._is_named = True

    def look(self, totals: Sequence[LedgerTotals | None]) -> None:
        """Add the ledgers of all ranks so far."""
        known = [each for each in totals if each is not None]
        if len(known) < len(totals) or len(known) < 2:
            return
        if len(self._before) != len(known):
            self._before = known
            return
        waits, walls = [], []
        for now, before in zip(known, self._before, strict=True):
            if now.steps - before.steps < LOOK_STEPS:
                return
            steps = now.steps - before.steps
            waited_ns = now.ledger.exposed_communication_ns - before.ledger.exposed_communication_ns
            waits.append(waited_ns // steps)
            walls.append((now.ledger.wall_ns - before.ledger.wall_ns) // steps)
        self._before = known
        is_uneven = max(waits) - min(waits) > max(UNEVEN_NS, UNEVEN_RATIO * max(walls))
        self._uneven = self._uneven + 1 if is_uneven else 0
        self._even = 0 if is_uneven else self._even + 1

    def is_due(self, now_ns: int) -> bool:
        """Return whether a window should be ordered."""
        return (self._is_named or self.is_uneven) and now_ns >= self._next_ns

    def put_off(self, now_ns: int) -> None:
        """Record that a window could not be ordered now."""
        self._next_ns = now_ns + round(PAUSE_SECONDS * NS_PER_SECOND)

    def done(self, now_ns: int, *, has_changed: bool) -> None:
        """Record the end of a window, and whether it changed what is known."""
        self._pause_seconds = PAUSE_SECONDS if has_changed else min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        self._next_ns = now_ns + round(self._pause_seconds * NS_PER_SECOND)
        self._is_named, self._uneven, self._even = False, 0, 0
