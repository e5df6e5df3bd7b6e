"""Finds the collective that a kernel belongs to, from its launch and its "External id".

"External id" names the operator that was open when the kernel was launched.  But old kinetos wrote the kernel's own
correlation there, which matches some operator by chance.  So it is used only in a file where the two differ.  Otherwise
the launch decides: the innermost `nccl:...` annotation open on the launching thread at that instant is the collective.

    host    |-- c10d::allreduce_ ------------|
              |-- record_param_comms -------|
                |-- nccl:all_reduce ------|
                     |cudaLaunchKernel|            correlation 7
    device                               |-- ncclKernel_... ----|   correlation 7

Pure: arrays in, indices out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .columns import NONE

__all__ = ["LaunchCalls", "are_external_ids_sound", "first_at", "innermost"]

NESTED_MAX = 8
"""How many rows back an open one is searched for; annotations of collectives rarely nest."""

Index = NDArray[np.int64]


@dataclass(slots=True)
class LaunchCalls:
    """Host rows of one kind that describe collectives; the caller defines `value`."""

    thread: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    value: list[int] = field(default_factory=list)

    def add(self, thread: int, start: int, end: int, value: int) -> None:
        """Add one row."""
        self.thread.append(thread)
        self.start.append(start)
        self.end.append(end)
        self.value.append(value)


def are_external_ids_sound(external: Index, correlation: Index) -> bool:
    """Return whether the external ids of these device rows are those of operators, not the rows' own correlations."""
    both = (external != NONE) & (correlation != NONE)
    return bool(np.any(both & (external != correlation)))


def first_at(keys: Index, wanted: Index) -> Index:
    """For each of `wanted`, return its first index in `keys`, NONE if it is NONE or missing."""
    if len(keys) == 0 or len(wanted) == 0:
        return np.full(len(wanted), NONE, dtype=np.int64)
    present, where = np.unique(keys, return_index=True)
    at = np.minimum(np.searchsorted(present, wanted), len(present) - 1)
    found: Index = np.where((present[at] == wanted) & (wanted != NONE), where[at], NONE)
    return found


def innermost(calls: LaunchCalls, thread: Index, instant: Index) -> Index:
    """Return the value of the most recent call open at `instant` on `thread`, NONE for none."""
    result = np.full(len(instant), NONE, dtype=np.int64)
    of_calls, start, end, value = (
        np.array(column, dtype=np.int64) for column in (calls.thread, calls.start, calls.end, calls.value)
    )
    for one in np.unique(thread):
        rows = np.flatnonzero(of_calls == one)
        rows = rows[np.argsort(start[rows], kind="stable")]
        asked = np.flatnonzero((thread == one) & (instant != NONE))
        if len(rows) == 0 or len(asked) == 0:
            continue
        at = np.searchsorted(start[rows], instant[asked], side="right") - 1
        for _ in range(NESTED_MAX):
            row = rows[np.maximum(at, 0)]
            is_open = (at >= 0) & (end[row] >= instant[asked]) & (result[asked] == NONE)
            result[asked[is_open]] = value[row[is_open]]
            at = at - 1
    return result
