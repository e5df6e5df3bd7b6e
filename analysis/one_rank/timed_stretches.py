"""Adds to a recorded trace what only the timers of the running job know: passes of the model, and garbage collections.

A trace does not show why Python ran nothing for a while.  A collection becomes an annotated row.  On a CPU job the host
is the device: the running job calls forward and backward `compute` as a whole, so Python between the operators of a
pass becomes a row of an operator.  What may be a wait for a process group stays: up to the end of the group's last work
in such a gap (`graph.waits`).

Pure: a trace and stretches in, a trace out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pacecar.ledger.intervals import Intervals, intervals, subtract, union

from ..graph.waits import GLOO_WAKE_NS
from ..trace.columns import NONE, HostKind, HostRows, Trace
from ..trace.host_activity import host_activity
from ..trace.steps import STEP_PREFIX

__all__ = ["COLLECTION", "with_collections", "with_passes"]

COLLECTION = "Python gc"
"""The name of a collection's row, one of `host_activity.GC_WORDS`."""


def with_collections(trace: Trace, stretches: Sequence[tuple[int, int]]) -> Trace:
    """Return `trace` with a row for each garbage collection; times are those of the trace."""
    return _with_rows(trace, intervals(stretches), HostKind.ANNOTATION, COLLECTION)


def with_passes(trace: Trace, name: str, stretches: Sequence[tuple[int, int]]) -> Trace:
    """Return the `trace` of a CPU job in which Python between operators of these passes is an operator `name`."""
    host, activity = trace.host_rows, host_activity(trace)
    busy = np.concatenate((
        activity.operators, activity.collective_calls, activity.data_wait, activity.checkpoint,
        activity.garbage_collection, activity.optimizer,
    ))  # fmt: skip
    gaps = subtract(union(intervals(stretches)), union(np.stack((host.start_ns[busy], host.end_ns[busy]), axis=1)))
    ends = np.sort(host.end_ns[host.kind == HostKind.COLLECTIVE_WORK])
    if len(ends) and len(gaps):
        last = np.searchsorted(ends, gaps[:, 1] + GLOO_WAKE_NS, side="right") - 1
        waited = np.where(last >= 0, ends[np.maximum(last, 0)] + 1, 0)
        gaps = np.stack((np.maximum(gaps[:, 0], waited), gaps[:, 1]), axis=1)
    return _with_rows(trace, gaps[gaps[:, 1] > gaps[:, 0]], HostKind.OPERATOR, name)


def _with_rows(trace: Trace, rows: Intervals, kind: HostKind, name: str) -> Trace:
    """Return the trace with these rows on the thread that marks the steps."""
    host = trace.host_rows
    marks = np.flatnonzero(np.array([text.startswith(STEP_PREFIX) for text in trace.names] or [False])[host.name])
    if not len(rows) or not len(marks):
        return trace
    thread = host.thread[marks[0]]
    new = {"start_ns": rows[:, 0], "end_ns": rows[:, 1], "kind": kind, "name": len(trace.names), "thread": thread}
    columns = {}
    for each in HostRows.__dataclass_fields__:
        column = getattr(host, each)
        columns[each] = np.concatenate((column, np.broadcast_to(new.get(each, NONE), len(rows)).astype(column.dtype)))
    order = np.lexsort((-columns["end_ns"], columns["start_ns"]))
    found = HostRows(**{each: column[order] for each, column in columns.items()})
    return replace(trace, names=(*trace.names, name), host_rows=found)
