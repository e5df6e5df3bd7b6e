"""Defines the clock that code takes as an argument: the system's, and one that tests set.

A clock gives two times that must not be mixed.  `monotonic_ns` measures durations and never goes back; its zero is
arbitrary.  `wall_ns` names an instant for people and other machines; it can jump, so it is never subtracted.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "FakeClock", "SystemClock"]

NS_PER_SECOND = 1_000_000_000


class Clock(Protocol):
    """Tells the time."""

    def monotonic_ns(self) -> int:
        """Return nanoseconds since an arbitrary start, never decreasing."""
        ...

    def wall_ns(self) -> int:
        """Return nanoseconds since the Unix epoch."""
        ...


class SystemClock:
    """The clocks of this machine."""

    __slots__ = ()

    def monotonic_ns(self) -> int:
        """Return CLOCK_MONOTONIC in nanoseconds."""
        return time.monotonic_ns()

    def wall_ns(self) -> int:
        """Return CLOCK_REALTIME in nanoseconds."""
        return time.time_ns()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, monotonic_ns: int = 0, wall_ns: int = 1_700_000_000 * NS_PER_SECOND) -> None:
        self._monotonic_ns = monotonic_ns
        self._wall_ns = wall_ns

    def monotonic_ns(self) -> int:
        """Return the current monotonic time."""
        return self._monotonic_ns

    def wall_ns(self) -> int:
        """Return the current wall time."""
        return self._wall_ns

    def advance(self, duration_ns: int) -> None:
        """Move both clocks forward by `duration_ns` (>= 0)."""
        assert duration_ns >= 0, "a monotonic clock does not go back"
        self._monotonic_ns += duration_ns
        self._wall_ns += duration_ns

    def jump_wall(self, duration_ns: int) -> None:
        """Move only the wall clock, in either direction, as NTP or an operator would."""
        self._wall_ns += duration_ns
