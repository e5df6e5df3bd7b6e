"""A clock that tests set."""

from __future__ import annotations

from pacecar.clock import NS_PER_SECOND


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
