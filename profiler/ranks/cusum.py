"""Tests with a CUSUM whether a rank is late or was late by chance, and estimates upper bounds of noise.

One late range is not evidence: garbage collection and other programs make any rank late now and then.  `Cusum` is
Page's cumulative sum of log likelihood ratios (Biometrika 41, 1954).  A range in which the rank was late adds
log(EXCEEDS_LATE / EXCEEDS_QUIET); any other subtracts log((1 - EXCEEDS_QUIET) / (1 - EXCEEDS_LATE)).  The sum does not
fall below zero, so a long quiet time cannot hide a change.  Three late ranges in a row suffice to name a rank, and
three quiet ones to clear it.

Lorden (Ann. Math. Stat. 42, 1971) bounds false alarms: while quiet ranges exceed the bound independently at a rate of
at most EXCEEDS_QUIET, the mean number of ranges until a false alarm is at least exp(THRESHOLD), here 700000 ranges for
each rank and cause.  So among four ranks with five causes in 2000 steps (500 ranges), at most 1.4 of 100 runs name a
rank wrongly.  Ranges that depend on each other (another program took the processor, a link was slow for a moment) get
less `weight`, so they must last for seconds.  Simulated with heavy tails, bursts and pauses, 0 of 300 runs of 500 steps
named any rank (tests/profiler/ranks/simulation.py), which bounds the rate at 1 of 100 with 95 % confidence.

`upper` is a distribution-free quantile that holds for small samples too.  The plain quantile does not: for five values
the 95 % quantile is the second largest, and one new value in three is above it.  Of n exchangeable values and one more,
the new one is above the k-th smallest with probability at most 1 - k / (n + 1) (Wilks, Ann. Math. Stat. 12, 1941; also
the basis of conformal prediction).  So k is quantile x (n + 1) rounded up, or n where that is larger.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from math import ceil, log
from typing import Literal

__all__ = ["THRESHOLD", "Cusum", "Usual", "excesses", "median", "upper"]

EXCEEDS_QUIET = 0.01
"""Rate at which a rank that is not late exceeds its bound.  The bound is designed for it, and tests measure it."""

EXCEEDS_LATE = 0.9
"""Rate at which a late rank exceeds its bound."""

_FOR = log(EXCEEDS_LATE / EXCEEDS_QUIET)
_AGAINST = log((1 - EXCEEDS_QUIET) / (1 - EXCEEDS_LATE))

THRESHOLD = 3 * _FOR - 1e-9
"""13.5: the sum of three late ranges in a row."""

_AGAINST_NAMED = THRESHOLD / 3
"""A quiet range subtracts this once the rank is named: three in a row clear it, and a late one undoes one of them."""


UNUSUAL_RATIO = 0.05
"""How far from the median of the last values an unusual value must be, as a ratio of that median."""

UNUSUAL_SPREADS = 3.0
"""It must also differ by this many times the median change between values, which one long interval does not move."""

RECENT = 16

RECENT_MIN = 4


class Cusum:
    """The cumulative sum for one rank and one cause."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._is_raised = False

    @property
    def is_clear(self) -> bool:
        """Whether there is no evidence against the rank."""
        return self._sum <= 0.0 and not self._is_raised

    def add(self, is_late: bool, *, weight: float = 1.0) -> Literal["raised", "lowered"] | None:
        """Add one range; return whether it raised or lowered the alarm.  `weight` (0..1) is that of a late range."""
        against = _AGAINST_NAMED if self._is_raised else _AGAINST
        self._sum = min(THRESHOLD, max(0.0, self._sum + (_FOR * weight if is_late else -against)))
        if not self._is_raised and self._sum >= THRESHOLD:
            self._is_raised = True
            return "raised"
        if self._is_raised and self._sum <= 1e-6:
            self._is_raised, self._sum = False, 0.0
            return "lowered"
        return None


class Usual:
    """Keeps the last RECENT values of a quantity and tells which new value is unusual."""

    def __init__(self, spreads: float = UNUSUAL_SPREADS) -> None:
        self._spreads = spreads
        self._values: deque[int] = deque(maxlen=RECENT)
        self._changes: deque[int] = deque(maxlen=RECENT)

    def add(self, value: int) -> bool:
        """Add the next value and return whether it is unusual; the first RECENT_MIN are not."""
        is_unusual = False
        if len(self._values) >= RECENT_MIN:
            usual = median(self._values)
            is_unusual = abs(value - usual) > max(UNUSUAL_RATIO * usual, self._spreads * median(self._changes))
        if self._values:
            self._changes.append(abs(value - self._values[-1]))
        self._values.append(value)
        return is_unusual


def upper(values: Collection[int], quantile: float) -> int | None:
    """Return the bound that a new value does not exceed with probability `quantile`, or the largest; None if empty."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered), ceil(quantile * (len(ordered) + 1))) - 1]


def excesses(values: Sequence[int]) -> list[int]:
    """Return how much each of at least two values exceeds the median of the others, in O(n log n)."""
    ordered, half = sorted(values), (len(values) - 1) // 2

    def without(place: int) -> int:
        upper_middle = ordered[half + (place <= half)]
        return upper_middle if len(ordered) % 2 == 0 else (ordered[half - 1 + (place < half)] + upper_middle) // 2

    return [value - without(bisect_left(ordered, value)) for value in values]


def median(values: Collection[int] | Sequence[int]) -> int:
    """Return the median of at least one value; the mean of two in the middle is rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
