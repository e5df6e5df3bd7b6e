"""Counts durations in buckets: a few with fixed bounds, and many narrow ones that take room only when used.

A gauge shows only the last step before a scrape, and a mean hides the slow one in a hundred.  Percentiles over ranks
and nodes need counts in buckets that are the same everywhere.  Fixed bounds are either few, and a median is off by
half, or cost a series each.  So there are both: a few fixed ones for any Prometheus, and those of a *native histogram*,
each 4.4 % wide, which is one series however many there are.

    native bucket i    2^((i-1)/16) < seconds <= 2^(i/16)      (schema 4; zero has a bucket of its own)

Pure.  Left out: merging, which queries do; and a lower resolution when there are many buckets, because all durations
that a record may contain fill at most a thousand.

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
"""Upper bounds of the fixed buckets, one series each: from a step of a small model to a large one with its
checkpoint."""

SCHEMA = 4
"""16 buckets per power of two: a percentile is off by at most 2.2 %, less than most knobs gain."""

_PER_OCTAVE = 1 << SCHEMA
_FRACTIONS = tuple(2.0 ** (step / _PER_OCTAVE - 1) for step in range(_PER_OCTAVE))
"""Upper bounds of the native buckets between a half and one, the half itself with them."""


class Histogram(msgspec.Struct, frozen=True, gc=False):
    """A histogram of durations at one moment.

    `below[i]` counts durations up to `BOUNDS_NS[i]`; `native` has (index, count) of the native buckets that are not
    empty, by rising index; `zeroes` counts durations of 0, which are in no native bucket.
    """

    count: int
    sum_ns: int
    min_ns: int
    max_ns: int
    below: tuple[int, ...]
    native: tuple[tuple[int, int], ...]
    zeroes: int


class HistogramSample(msgspec.Struct, frozen=True, gc=False):
    """One histogram: like `Sample`, with a histogram as its value."""

    metric: str
    labels: tuple[str, ...]
    value: Histogram


Served = Sample | HistogramSample
"""What a scrape returns."""


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
        """Count a duration of zero or more."""
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
        """Return the histogram so far, None if it is empty; the same object until more is counted."""
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
