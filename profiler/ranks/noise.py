"""Estimates upper bounds of noise from recent values: distribution-free quantiles that hold for small samples too.

The plain quantile of a small sample promises nothing about the next value: of five values the 95 of 100 quantile is the
second largest, and every third new value is above it.  Of n exchangeable values and one more, the new one is above the
k-th smallest with probability 1 - k / (n + 1) at most (Wilks, Ann. Math. Stat. 12, 1941; conformal prediction rests on
the same count).  So the k-th is taken with k = quantile x (n + 1) rounded up, and the largest of all while n is smaller
than that needs.

Pure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from math import ceil

__all__ = ["Usual", "excesses", "median", "upper"]

UNUSUAL_RATIO = 0.05
"""How far from the median of the last values an unusual value must be, as a ratio of that median."""

UNUSUAL_SPREADS = 3.0
"""And by this many times the median change from one value to the next, which one long interval does not move."""

RECENT = 16
RECENT_MIN = 4


class Usual:
    """Keeps the last RECENT values of a quantity and tells which new value is unusual."""

    def __init__(self, spreads: float = UNUSUAL_SPREADS) -> None:
        self._spreads = spreads
        self._values: deque[int] = deque(maxlen=RECENT)
        self._changes: deque[int] = deque(maxlen=RECENT)

    def add(self, value: int) -> bool:
        """Add the next value and return whether it is unusual; none of the first RECENT_MIN is."""
        is_unusual = False
        if len(self._values) >= RECENT_MIN:
            usual = median(self._values)
            is_unusual = abs(value - usual) > max(UNUSUAL_RATIO * usual, self._spreads * median(self._changes))
        if self._values:
            self._changes.append(abs(value - self._values[-1]))
        self._values.append(value)
        return is_unusual


def upper(values: Collection[int], quantile: float) -> int | None:
    """Return the bound that a new value does not exceed with probability `quantile`, or the largest; None for none."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered), ceil(quantile * (len(ordered) + 1))) - 1]


def excesses(values: Sequence[int]) -> list[int]:
    """Return by how much each of at least two values exceeds the median of the others; n log n, as jobs are large."""
    ordered, half = sorted(values), (len(values) - 1) // 2

    def without(place: int) -> int:
        upper_middle = ordered[half + (place <= half)]
        return upper_middle if len(ordered) % 2 == 0 else (ordered[half - 1 + (place < half)] + upper_middle) // 2

    return [value - without(bisect_left(ordered, value)) for value in values]


def median(values: Collection[int] | Sequence[int]) -> int:
    """Return the median of at least one value; of two in the middle the mean, rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
