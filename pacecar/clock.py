"""Defines the clock that code takes as an argument, and the system's.

A clock gives two times that must not be mixed.  `monotonic_ns` measures durations and never goes back; its zero is
arbitrary.  `wall_ns` names an instant for people and other machines; it can jump, so it is never subtracted.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "SystemClock"]

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
