"""Measures each driver call for one GPU, and decides when the call in flight is overdue.

A fixed deadline for a whole reading mistakes a slow driver for a dead one: at 50 ms a call, eleven calls miss half a
second although each returns.  So the deadline is per call and learned: ten times what this call usually takes on this
GPU, at least CALL_SECONDS_MIN and at most CALL_SECONDS_MAX, and CALL_SECONDS_FIRST for a call that was never
made.  While a call that returned late is among the latest ones, the deadline is at least twice its duration.

So a hang of a driver with its usual speed is found within CALL_SECONDS_MIN and a tick, any other within
CALL_SECONDS_MAX and a tick.

Left out: what to do about a hang (`gpu_state`), and timing separately the driver calls that one method of `Nvml` makes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple, cast

from pacecar.clock import NS_PER_SECOND, Clock

from .driver import Nvml

__all__ = ["CALL_SECONDS_FIRST", "CALL_SECONDS_MAX", "CALL_SECONDS_MIN", "CallTimes", "Overdue", "timed"]

CALL_SECONDS_MIN = 2.0
"""A driver that answers in a millisecond is silent for half a second while the GPU is reset or starts to work."""

CALL_SECONDS_FIRST = 5.0
"""The first calls for a GPU without persistence mode initialize it, which takes seconds."""

CALL_SECONDS_MAX = 30.0
"""A driver reports a GPU as lost after 45 s; one call that took that long must not hide the next hang."""

FACTOR = 10
QUANTILE = 0.9
RECENT = 32
"""Durations kept of each call, enough that one outlier changes nothing."""

LATEST = 16
"""Calls of any kind that count as the latest: those of one and a half readings."""


class Overdue(NamedTuple):
    """The overdue call, and how long it has been in flight."""

    call: str
    age_ns: int


class CallTimes:
    """The calls of one GPU.  One thread makes them; any thread may read `overdue` and the totals."""

    def __init__(self, clock: Clock) -> None:
        self.total_ns = 0
        self._clock = clock
        self._in_flight: tuple[str, int] | None = None
        self._recent: dict[str, deque[int]] = {}
        self._latest: deque[tuple[int, str]] = deque(maxlen=LATEST)

    def make(self, call: str, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401  as the driver
        """Return what `function` returns and record how long it took, also if it raises."""
        begun = self._clock.monotonic_ns()
        self._in_flight = (call, begun)  # one assignment: other threads see all of it or nothing
        try:
            return function(*arguments)
        finally:
            took = self._clock.monotonic_ns() - begun
            self._in_flight = None
            self.total_ns += took
            if (recent := self._recent.get(call)) is None:
                recent = self._recent[call] = deque(maxlen=RECENT)
            recent.append(took)
            self._latest.append((took, call))

    @property
    def slowest(self) -> tuple[str, int]:
        """The slowest of the latest calls and its duration."""
        took, call = max(list(self._latest), default=(0, ""))  # an atomic copy: calls go on meanwhile
        return call, took

    def deadline_ns(self, call: str) -> int:
        """Return how long `call` may take."""
        if call not in self._recent:
            return _seconds(CALL_SECONDS_FIRST)
        recent = list(self._recent[call])
        deadline = max(_seconds(CALL_SECONDS_MIN), 2 * self.slowest[1])
        if FACTOR * max(recent) > deadline:
            deadline = max(deadline, FACTOR * sorted(recent)[min(len(recent) - 1, int(QUANTILE * len(recent)))])
        return min(deadline, _seconds(CALL_SECONDS_MAX))

    def overdue(self, now_ns: int) -> Overdue | None:
        """Return the call in flight if it is overdue.  Deadlines are computed here because few are needed."""
        in_flight = self._in_flight
        if in_flight is None or now_ns - in_flight[1] < _seconds(CALL_SECONDS_MIN):
            return None
        call, begun = in_flight
        is_late = now_ns - begun >= self.deadline_ns(call)
        return Overdue(call, now_ns - begun) if is_late and self._in_flight is in_flight else None


class _Timed:
    """An `Nvml` that makes every call through a CallTimes."""

    def __init__(self, nvml: Nvml, times: CallTimes) -> None:
        self._nvml = nvml
        self._times = times

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method, make = getattr(self._nvml, name), self._times.make

        def call(*arguments: object) -> Any:  # noqa: ANN401
            return make(str(arguments[1]) if name == "number" else name, method, *arguments)

        setattr(self, name, call)  # __getattr__ is not called for this name again
        return call


def timed(nvml: Nvml, times: CallTimes) -> Nvml:
    """Return `nvml` with every call measured under its method's name, or the name of the number that it asks for."""
    return cast(Nvml, _Timed(nvml, times))


def _seconds(seconds: float) -> int:
    return int(seconds * NS_PER_SECOND)
