"""Counts durations in buckets: a few of fixed bounds, and many narrow ones of which only those that are met take room.

A gauge of the last value shows the one step that ended before a scrape, and a mean hides the slow one in a hundred.
Percentiles of several ranks and nodes can only be taken of counts in buckets that are the same everywhere.  Bounds
that are fixed in advance are either few, and a median is off by half, or a series each.  So there are both: the few for
a Prometheus that knows no others, and those of a *native histogram*, each 4.4 % wide, which is one series whatever is
in it.

    native bucket i    2^((i-1)/16) < seconds <= 2^(i/16)      (schema 4; zero has a bucket of its own)

Pure.  Left out: merging, which the query does; a lower resolution when there are many buckets, because all durations
that a record may hold fill at most a thousand.

Source: prometheus.io/docs/specs/native_histograms, "Schema".
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample

__all__ = ["BOUNDS_NS", "SCHEMA", "DurationHistogram", "Histogram", "HistogramSample", "Served"]

BOUNDS_NS = tuple(
    round(seconds * NS_PER_SECOND)
    for seconds in (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0)
)
"""Upper bounds of the fixed buckets, in nanoseconds: from the step of a small model to a long one with its checkpoint.
Each is a series."""

SCHEMA = 4
"""16 buckets from one power of two to the next: a percentile is off by 2.2 % at most, less than a knob mostly wins."""

_PER_OCTAVE = 1 << SCHEMA
_FRACTIONS = tuple(2.0 ** (step / _PER_OCTAVE - 1) for step in range(_PER_OCTAVE))
"""Upper bounds of the native buckets between a half and one, the half itself with them."""


class Histogram(msgspec.Struct, frozen=True, gc=False):
    """Durations that were counted, as they were at one moment.

    `below[i]` is how many were at most `BOUNDS_NS[i]`; `native` are pairs (index, count) of the native buckets that are
    not empty, by rising index; `zeroes` those of no duration at all, which are in no native bucket.
    """

    count: int
    sum_ns: int
    min_ns: int
    max_ns: int
    below: tuple[int, ...]
    native: tuple[tuple[int, int], ...]
    zeroes: int


class HistogramSample(msgspec.Struct, frozen=True, gc=False):
    """One histogram: as `Sample`, with a histogram for a value."""

    metric: str
    labels: tuple[str, ...]
    value: Histogram


Served = Sample | HistogramSample
"""What a scrape gets."""


class DurationHistogram:
    """Counts durations.  One thread at a time."""

    def __init__(self) -> None:
        self._sum_ns = 0
        self._counts = [0] * (len(BOUNDS_NS) + 1)
        self._native: Counter[int] = Counter()
        self._zeroes = 0
        self._min_ns = self._max_ns = 0
        self._view: Histogram | None = None

    def observe(self, duration_ns: int) -> None:
        """Count one duration of zero or more."""
        self._min_ns = min(self._min_ns, duration_ns) if self._native or self._zeroes else duration_ns
        self._max_ns = max(self._max_ns, duration_ns)
        self._view = None
        self._sum_ns += duration_ns
        self._counts[bisect_left(BOUNDS_NS, duration_ns)] += 1
        if duration_ns == 0:
            self._zeroes += 1
        else:
            self._native[native_index(duration_ns / NS_PER_SECOND)] += 1

    def view(self) -> Histogram | None:
        """Return what was counted, None where nothing was; the same object until more is counted."""
        if self._view is None and (self._native or self._zeroes):
            below = []
            total = 0
            for count in self._counts:
                total += count
                below.append(total)
            native = tuple(sorted(self._native.items()))
            self._view = Histogram(
                count=total, sum_ns=self._sum_ns, min_ns=self._min_ns, max_ns=self._max_ns, below=tuple(below[:-1]),
                native=native, zeroes=self._zeroes,
            )  # fmt: skip
        return self._view


def native_index(seconds: float) -> int:
    """Return the native bucket of a positive number of seconds."""
    fraction, exponent = math.frexp(seconds)
    return bisect_left(_FRACTIONS, fraction) + (exponent - 1) * _PER_OCTAVE
