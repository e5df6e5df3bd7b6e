"""Computes with intervals of time: union, clip, length, subtraction and cover.

Work overlaps, so sums of durations do not describe a step: two kernels on two streams do not take twice the time.
Functions here work on *unions*: sorted, disjoint, half-open intervals of integer nanoseconds, one row [start, end)
each, none of them empty.  Nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["EMPTY", "Intervals", "clip", "covers", "intervals", "length", "subtract", "total", "union"]

Intervals = NDArray[np.int64]
"""Shape (n, 2): start and end of each row in nanoseconds."""

EMPTY: Intervals = np.empty((0, 2), dtype=np.int64)


def intervals(pairs: Iterable[tuple[int, int]]) -> Intervals:
    """Return `pairs` as rows, in order, without empty and backward ones."""
    rows = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    return rows[rows[:, 1] > rows[:, 0]]


def union(rows: Intervals) -> Intervals:
    """Return the instants that any of `rows` covers, as sorted disjoint rows; touching rows become one."""
    if len(rows) == 0:
        return EMPTY
    starts = rows[:, 0]
    if (starts[1:] < starts[:-1]).any():  # most are sorted, and the check is ten times cheaper than sorting
        rows = rows[np.argsort(starts, kind="stable")]
    reach = np.maximum.accumulate(rows[:, 1])
    opens = np.concatenate(([True], rows[1:, 0] > reach[:-1]))
    closes = np.concatenate((opens[1:], [True]))
    merged: Intervals = np.stack((rows[opens, 0], reach[closes]), axis=1)
    return merged


def clip(rows: Intervals, start: int, end: int) -> Intervals:
    """Return the parts of `rows` inside [start, end)."""
    cut = np.clip(rows, start, end)
    whole = cut[:, 1] > cut[:, 0]
    return cut if whole.all() else cut[whole]


def length(merged: Intervals) -> int:
    """Return how many nanoseconds a union covers."""
    return int((merged[:, 1] - merged[:, 0]).sum())


def total(durations: NDArray[np.int64]) -> int:
    """Return the sum of durations; those of a broken trace may exceed 64 bits."""
    if len(durations) and int(durations.max()) > _INT64_MAX // len(durations):
        return sum(durations.tolist())
    return int(durations.sum())


_INT64_MAX = (1 << 63) - 1


def covers(merged: Intervals, instants: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Return for each instant whether the union `merged` covers it."""
    if len(merged) == 0:
        return np.zeros(len(instants), dtype=np.bool_)
    at = np.searchsorted(merged[:, 0], instants, side="right") - 1
    inside: NDArray[np.bool_] = (at >= 0) & (instants < merged[np.maximum(at, 0), 1])
    return inside


def subtract(merged: Intervals, other: Intervals) -> Intervals:
    """Return the instants of the union `merged` that the union `other` does not cover."""
    if len(merged) == 0 or len(other) == 0:
        return merged
    cuts = np.unique(np.concatenate((merged.ravel(), other.ravel())))
    starts = cuts[:-1]
    keep = covers(merged, starts) & ~covers(other, starts)
    return union(np.stack((starts[keep], cuts[1:][keep]), axis=1))
