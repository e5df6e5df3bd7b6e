"""Finds how rows nest on each thread: the parent of each row, and the innermost row open at an instant.

Rows of one thread nest, except that rounded times may let a child end after its parent.  A row is open until its own
end, and a new row is the child of the most recent row still open.  A row without duration
encloses nothing.

Pure: columns in, indices out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE

__all__ = ["Nesting", "values_at"]

Index = NDArray[np.int64]


def values_at(values: NDArray[np.integer], places: Index) -> Index:
    """Return the values at `places`, NONE where the place is NONE."""
    found = np.full(len(places), NONE, dtype=np.int64)
    known = places != NONE
    found[known] = values[places[known]]
    return found


class Nesting:
    """The rows of several threads as trees; rows in the order of start, `parent` the index of each row's, or NONE."""

    def __init__(self, start_ns: Index, end_ns: Index, thread: NDArray[np.int32]) -> None:
        self._start, self._end = start_ns, end_ns
        self._of_thread: dict[int, Index] = {}
        self.parent: Index = np.full(len(start_ns), NONE, dtype=np.int64)
        for one in np.unique(thread).tolist():
            rows = np.flatnonzero(thread == one)
            rows = rows[np.lexsort((-end_ns[rows], start_ns[rows]))]
            self._of_thread[one] = rows
            self.parent[rows] = _parents(rows, start_ns[rows], end_ns[rows])

    def innermost(self, thread: NDArray[np.int32], instant_ns: Index) -> Index:
        """For each instant, return the most recent row open on that thread, NONE for none.

        A row is open in [start, end).
        """
        found = np.full(len(instant_ns), NONE, dtype=np.int64)
        for one in np.unique(thread).tolist():
            rows = self._of_thread.get(one)
            if rows is None:
                continue
            asked = np.flatnonzero(thread == one)
            last = np.searchsorted(self._start[rows], instant_ns[asked], side="right") - 1
            at = np.where(last >= 0, rows[np.maximum(last, 0)], NONE)
            found[asked] = self._climb(at, instant_ns[asked])
        return found

    def nearest(self, rows: Index, wanted: NDArray[np.bool_]) -> Index:
        """For each of `rows`, return itself or the nearest row around it for which `wanted` holds, NONE for none."""
        at = rows.copy()
        going = np.flatnonzero(at != NONE)
        while len(going := going[~wanted[at[going]]]):
            at[going] = self.parent[at[going]]
            going = going[at[going] != NONE]
        return at

    def outermost(self, rows: Index, wanted: NDArray[np.bool_]) -> Index:
        """For each of `rows`, return itself or the outermost row around it for which `wanted` holds, NONE for none."""
        best = self.nearest(rows, wanted)
        while True:
            above = self.nearest(values_at(self.parent, best), wanted)
            higher = above != NONE
            if not higher.any():
                return best
            best[higher] = above[higher]

    def _climb(self, at: Index, instant_ns: Index) -> Index:
        going = np.flatnonzero(at != NONE)
        while len(going := going[self._end[at[going]] <= instant_ns[going]]):
            at[going] = self.parent[at[going]]
            going = going[at[going] != NONE]
        return at


def _parents(rows: Index, start_ns: Index, end_ns: Index) -> Sequence[int] | Index:
    """Return the parent of each of a thread's rows, sorted by start, the longest first among equal starts."""
    parents = np.full(len(rows), NONE, dtype=np.int64)
    numbers, starts, ends = rows.tolist(), start_ns.tolist(), end_ns.tolist()
    stack: list[int] = []
    for at, start in enumerate(starts):
        while stack and ends[stack[-1]] <= start:
            stack.pop()
        if stack:
            parents[at] = numbers[stack[-1]]
        if ends[at] > start:
            stack.append(at)
    return parents
