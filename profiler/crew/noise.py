"""How much is usual?  Bounds from what was seen lately, that hold for few values as well as for many.

The usual quantile of a sample promises nothing about the next value when the sample is small: of five values the 95 of
100 quantile is the second largest, and every third new value is above it.  Of n exchangeable values and one more, the
new one is above the k-th smallest with probability 1 - k / (n + 1) at most (Wilks, Ann. Math. Stat. 12, 1941; conformal
prediction rests on the same count).  So the k-th is taken with k = quantile x (n + 1) rounded up, and the largest of
all while n is smaller than that needs.

Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

__all__ = ["median", "upper"]


def upper(values: Collection[int], quantile: float) -> int | None:
    """Return what a new value stays under with probability `quantile`, or the largest; None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered), ceil(quantile * (len(ordered) + 1))) - 1]


def median(values: Collection[int] | Sequence[int]) -> int:
    """Return the median of at least one value; of two in the middle the mean, rounded down."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) // 2
