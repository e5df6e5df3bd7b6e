"""Computes the rate of a counter: the difference of two readings over the time between them.

Two readings close together (a tick right after a glance) would show rounding, and when the driver updates its counter.
So a rate spans at least SPAN_NS, from the reading before the last if necessary.

A counter that fell was reset if the next reading is below the last value too; then counting starts again from the first
of the two.  Otherwise one reading was wrong.  Until that is known there is no rate.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND

__all__ = ["Rates"]

SPAN_NS = 50_000_000
"""Half the shortest interval between glances."""


class _Point(NamedTuple):
    at_ns: int
    value: int


class Rates:
    """The rates of the counters of one source, by key; `keep` drops those that are gone."""

    def __init__(self) -> None:
        self._points: dict[tuple[str, ...], tuple[_Point | None, _Point]] = {}
        self._fallen: dict[tuple[str, ...], _Point] = {}
        """Readings below the last value, which the next one confirms or not."""

    def per_second(self, key: tuple[str, ...], count: int, now_ns: int) -> float | None:
        """Return the counts a second since the previous reading; None at the first and after a reset."""
        now = _Point(now_ns, count)
        earlier, last = self._points.get(key, (None, None))
        fallen = self._fallen.pop(key, None)
        if last is None:
            self._points[key] = (None, now)
            return None
        if count < last.value:
            if fallen is None or count < fallen.value:
                self._fallen[key] = now
                return None
            earlier, last = self._points[key] = (None, fallen)
        since = last if now_ns - last.at_ns >= SPAN_NS else earlier
        if since is last:
            self._points[key] = (last, now)
        if since is None or now_ns <= since.at_ns:
            return None
        return (count - since.value) * NS_PER_SECOND / (now_ns - since.at_ns)

    def keep(self, names: Collection[str]) -> None:
        """Drop all counters except those whose key starts with one of `names`."""
        for key in [key for key in self._points if key[0] not in names]:
            del self._points[key]
            self._fallen.pop(key, None)
