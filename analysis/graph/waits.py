"""Finds what one rank waited for, besides stream order and launches: rows for rows, and its host for rows.

    a row                      see `device_waits`
    a synchronization          the tail of the stream launched on last, of all streams for a device synchronization
    a copy that blocks         its own end (pageable memory)
    host process groups        on a CPU job, the long gap between operators in which the group's work ended

Inferences that the recorded times contradict are dropped: a false edge silently costs percents of a step.

Pure: columns in, pairs of indices out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, HostKind
from .causes import CauseCode
from .device_waits import EVENT_LAG_NS_MAX, SLACK_NS, UNEXPLAINED_NS, device_waits
from .rank_events import COPY_SLACK_NS, RankEvents, WorkRows

__all__ = ["Waits", "find_waits"]

Index = NDArray[np.int64]

GLOO_WAKE_NS = 200_000
"""A process group's thread may close its row this long after it woke the waiting thread."""

GAP_NS_MIN = 20_000
"""The least gap between operators in which a thread waited for a process group; python alone takes less."""

_DEVICE_SYNCS = ("DeviceSynchronize", "CtxSynchronize")


@dataclass(frozen=True, slots=True)
class Waits:
    """Pairs: `row[i]` waits for the end of `awaited[i]`; the host passes `point[j]` after that of `awaited_of[j]`."""

    row: Index
    awaited: Index
    point: Index
    awaited_of: Index


def find_waits(events: RankEvents) -> tuple[RankEvents, Waits]:
    """Return the waits of one rank, and its events; on a CPU job these gain the launches of process groups' rows."""
    if events.is_host_job:
        return _of_host_job(events)
    rows, awaited = device_waits(events)
    points, ends = _of_syncs(events)
    return events, Waits(rows, awaited, points, ends)


def _of_syncs(events: RankEvents) -> tuple[Index, Index]:
    """Return the host's waits for the device: synchronizations and copies that block."""
    trace, rows, lane = events.trace, events.rows, events.host
    host = trace.host_rows
    starts, ends = events.call_start_ns, events.call_end_ns
    pairs: list[tuple[int, int]] = []
    copies = np.flatnonzero((rows.cause == CauseCode.EXPOSED_COPY) & (rows.launch != NONE))
    calls = np.flatnonzero(np.isin(host.kind, (HostKind.LAUNCH,)))
    if len(copies) and len(calls):
        at = np.minimum(np.searchsorted(starts[calls], lane.time_ns[rows.launch[copies]]), len(calls) - 1)
        blocks = (starts[calls[at]] == lane.time_ns[rows.launch[copies]]) & (
            ends[calls[at]] >= rows.end_ns[copies] - COPY_SLACK_NS
        )
        points = np.searchsorted(lane.time_ns, ends[calls[at[blocks]]])
        pairs += list(zip(points.tolist(), copies[blocks].tolist(), strict=True))
    is_query = np.array(["Query" in name for name in trace.names] or [False])
    is_all = np.array([any(word in name for word in _DEVICE_SYNCS) for name in trace.names] or [False])
    mine = np.isin(host.thread, events.activity.threads)
    syncs = np.flatnonzero((host.kind == HostKind.SYNC) & mine & ~is_query[host.name])
    order = np.flatnonzero((rows.launch != NONE) & (rows.cause != CauseCode.LINK))
    order = order[np.argsort(rows.launch[order], kind="stable")]
    launches = lane.time_ns[rows.launch[order]]
    by_end = np.argsort(rows.end_ns, kind="stable")
    by_end_ns = rows.end_ns[by_end]
    tails = _last_of_streams(rows, order, launches, starts[syncs]) if len(syncs) else {}
    for place, sync in enumerate(syncs.tolist()):
        point = int(np.searchsorted(lane.time_ns, ends[sync]))
        if point >= len(lane.time_ns):
            continue
        if is_all[host.name[sync]]:
            awaited = [int(tail[place]) for tail in tails.values()]
        else:
            last = int(np.searchsorted(launches, starts[sync])) - 1
            awaited = [int(order[last])] if last >= 0 else []
        awaited = [row for row in awaited if row != NONE and rows.end_ns[row] <= ends[sync] + SLACK_NS]
        blocked = ends[sync] - starts[sync] > UNEXPLAINED_NS
        if blocked and not any(ends[sync] - rows.end_ns[row] < EVENT_LAG_NS_MAX for row in awaited):
            # It waited for more than was launched: its stream itself waits for an event.
            last = int(np.searchsorted(by_end_ns, ends[sync] + SLACK_NS, side="right")) - 1
            if last >= 0 and ends[sync] - by_end_ns[last] < EVENT_LAG_NS_MAX:
                awaited.append(int(by_end[last]))
        pairs += [(point, row) for row in awaited]
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    found = np.unique(np.array(pairs, dtype=np.int64), axis=0)
    return found[:, 0], found[:, 1]


def _last_of_streams(rows: WorkRows, order: Index, launches: Index, at: Index) -> dict[int, Index]:
    """For each stream, return the last row launched before each instant; NONE for none."""
    found = {}
    for stream in np.unique(rows.stream[order]).tolist():
        mine = rows.stream[order] == stream
        last = np.searchsorted(launches[mine], at) - 1
        found[stream] = np.where(last >= 0, order[mine][np.maximum(last, 0)], NONE)
    return found


def _of_host_job(events: RankEvents) -> tuple[RankEvents, Waits]:
    """Return the events of a CPU job with the launches of its groups' rows, and where the host waited."""
    rows, lane = events.rows, events.host
    launch, thread = _calls_of_groups(events)
    rows = replace(rows, launch=launch, thread=thread)
    events = replace(events, rows=rows)
    nothing = np.empty(0, dtype=np.int64)
    if len(rows.end_ns) == 0 or len(lane.cause) == 0:
        return events, Waits(nothing, nothing, nothing, nothing)
    begin, end = lane.time_ns[:-1], lane.time_ns[1:]
    gaps = np.flatnonzero((lane.cause != CauseCode.COMPUTE) & (end - begin >= GAP_NS_MIN))
    if len(gaps) == 0:
        return events, Waits(nothing, nothing, nothing, nothing)
    # Rows' ends are points where they lie in a gap, so the gap before such a point ends exactly there.
    at = np.searchsorted(begin[gaps], rows.end_ns, side="left") - 1
    known = (at >= 0) & (rows.end_ns <= end[gaps[np.maximum(at, 0)]] + GLOO_WAKE_NS)
    awaited = np.flatnonzero(known)
    gap = gaps[at[known]]
    # If several ended in one gap, the last ended it.
    order = np.lexsort((rows.end_ns[awaited], gap))
    last = np.append(gap[order][1:] != gap[order][:-1], True) if len(order) else np.empty(0, dtype=np.bool_)
    return events, Waits(nothing, nothing, gap[order][last] + 1, awaited[order][last])


def _calls_of_groups(events: RankEvents) -> tuple[Index, Index]:
    """Return the host point at which each row of a process group was started, by order or else by time."""
    trace, rows, lane = events.trace, events.rows, events.host
    host = trace.host_rows
    inner = np.array([name == "record_param_comms" or "wait_tensor" in name for name in trace.names] or [False])
    calls = events.activity.collective_calls
    calls = calls[~inner[host.name[calls]]]
    starts = events.call_start_ns[calls]
    launch = np.full(len(rows.start_ns), NONE, dtype=np.int64)
    thread = np.full(len(rows.start_ns), NONE, dtype=np.int64)
    if len(calls) == 0:
        return launch, thread
    order = np.argsort(rows.start_ns, kind="stable")
    at = np.arange(len(order))
    if len(calls) != len(order) or (starts > rows.start_ns[order]).any():
        at = np.searchsorted(starts, rows.start_ns[order], side="right") - 1
    known = at >= 0
    launch[order[known]] = np.searchsorted(lane.time_ns, starts[at[known]])
    thread[order[known]] = host.thread[calls[at[known]]]
    return launch, thread
