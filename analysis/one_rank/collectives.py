"""Sums up the collectives of one trace by kind: count, duration, exposed time and bandwidth.

A hundred small all-reduces and one large all-gather are different problems, which a single sum would hide.  So
collectives of one kind (same operation, size, type and group) are one line.

Bandwidth has two meanings.  *Algorithm* bandwidth is size over time; it falls with the number of ranks although the
links are equally busy.  *Bus* bandwidth is that times a factor for the operation, and compares with the speed of the
links.  Factors and sizes are those of nccl-tests (PERFORMANCE.md): the size of an all-gather is its output on each
rank, that of a reduce-scatter its input.  A kernel's time includes waiting for the last rank, so one trace gives a
lower bound; `rank_comparison` removes the waiting.

Left out: which rank caused the waiting.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor
from pacecar.ledger.classification import collective_operation
from pacecar.ledger.intervals import Intervals, length, total, union

from ..document.report import CollectiveTotal
from ..trace.columns import NONE, CollectiveColumns, Trace

__all__ = ["UNNAMED", "collective_totals", "coverage"]

UNNAMED = "unknown"
"""The operation of communication whose row does not name it."""


def coverage(merged: Intervals, instants: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each instant, return how many nanoseconds before it the union `merged` covers."""
    if len(merged) == 0:
        return np.zeros(len(instants), dtype=np.int64)
    before = np.concatenate(([0], np.cumsum(merged[:, 1] - merged[:, 0])))
    at = np.searchsorted(merged[:, 0], instants, side="right")
    last = np.maximum(at - 1, 0)
    beyond = np.maximum(merged[last, 1] - instants, 0)  # the rest of the interval around the instant
    return np.where(at > 0, before[at] - beyond, 0)


def collective_totals(
    trace: Trace,
    spans: Intervals,
    names: NDArray[np.int32],
    collectives: NDArray[np.int32],
    hidden_by: Intervals,
) -> list[CollectiveTotal]:
    """Return a line for each kind of collective among the communication rows `spans`, the longest first.

    `names` and `collectives` are the rows' columns of the trace, `hidden_by` the union of compute.
    """
    if len(spans) == 0:
        return []
    # The trace keeps equal collectives once; those of one kind still differ in their sequence number.
    kinds: dict[tuple[str, int | None, str | None, str | None, int | None], int] = {}
    pairs, inverse = np.unique(
        np.where(collectives == NONE, -1 - names.astype(np.int64), collectives), return_inverse=True
    )
    kind_of = [kinds.setdefault(_kind(trace, pair), len(kinds)) for pair in pairs.tolist()]
    kind = np.array(kind_of, dtype=np.int64)[inverse]
    order = np.argsort(kind, kind="stable")
    bounds = np.searchsorted(kind[order], np.arange(len(kinds) + 1))
    totals = [
        _total(key, spans[order[low:high]], hidden_by)
        for key, low, high in zip(kinds, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    return sorted(totals, key=lambda line: (-line.duration_ns, line.operation, line.bytes or 0))


def _kind(trace: Trace, pair: int) -> tuple[str, int | None, str | None, str | None, int | None]:
    if pair >= 0:
        it: CollectiveColumns = trace.collectives[pair]
        size = it.group_size if it.group_size is not None else (len(it.ranks) if it.ranks is not None else None)
        return it.operation, it.bytes, it.dtype, it.group, size
    return collective_operation(trace.names[-1 - pair]) or UNNAMED, None, None, None, None


def _total(
    key: tuple[str, int | None, str | None, str | None, int | None], spans: Intervals, hidden_by: Intervals
) -> CollectiveTotal:
    operation, size, dtype, group, group_size = key
    durations = spans[:, 1] - spans[:, 0]
    merged = union(spans)
    hidden = int((coverage(hidden_by, merged[:, 1]) - coverage(hidden_by, merged[:, 0])).sum())
    median = int(np.median(durations))
    algorithm = size * 1e9 / median if size is not None and median > 0 else None
    factor = bus_bandwidth_factor(operation, group_size)
    return CollectiveTotal(
        operation=operation,
        bytes=size,
        dtype=dtype,
        group=group,
        group_size=group_size,
        count=len(spans),
        duration_ns=total(durations),
        median_ns=median,
        min_ns=int(durations.min()),
        max_ns=int(durations.max()),
        exposed_ns=length(merged) - hidden,
        algorithm_bandwidth=algorithm,
        bus_bandwidth=None if algorithm is None or factor is None else algorithm * factor,
    )
