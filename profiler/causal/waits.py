"""Finds what each row and each host point of one rank had to wait for, beside stream order and its launch.

CUDA's event waits are hardly ever in a trace, so they are inferred from the calls that make them, and an inference that
the recorded times contradict anywhere is dropped: a false edge costs percents of a step silently.

    a collective's kernel      the tail of the stream on which its thread launched last
    other kernels              a call to wait for an event before a launch awaits the latest collective that none has
                               awaited yet; at a site (the same launch in every step) where that one ended too late in
                               any step, the one before it
    a synchronization          the tail of the stream launched on last, of all streams for a device synchronization
    a copy that blocks         its own end (pageable memory)
    host process groups        on a CPU job, the long gap between operators in which the group's work ended

Pure: columns in, pairs of indices out.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, HostKind
from .causes import Cause
from .rank_events import HostLane, RankEvents, WorkRows, launching_threads

__all__ = ["SLACK_NS", "Waits", "find_waits"]

Index = NDArray[np.int64]

SLACK_NS = 2_000
"""By how much a row may begin before what it awaits has ended: time stamps, and gaps of -0.9 us seen on a B200."""

EVENT_LAG_NS_MAX = 50_000
"""A start that nothing else explains awaits a collective that ended no longer before it."""

UNEXPLAINED_NS = 20_000
"""A row that begins so much after its launch and its stream's tail was waiting for something else."""

GLOO_WAKE_NS = 200_000
"""A process group's thread may close its row so much after it woke the thread that waits for it."""

GAP_NS_MIN = 20_000
"""A gap between operators in which a thread waited for a process group lasts so long; python alone takes less."""

PENDING_MAX = 64
"""Collectives that may be under way unawaited; DDP has as many as buckets."""

_WAIT_CALLS = ("StreamWaitEvent",)
_DEVICE_SYNCS = ("DeviceSynchronize", "CtxSynchronize")


@dataclass(frozen=True, slots=True)
class Waits:
    """Pairs: `row[i]` waits for the end of `awaited[i]`; the host passes `point[j]` after that of `awaited_of[j]`."""

    row: Index
    awaited: Index
    point: Index
    awaited_of: Index


def find_waits(events: RankEvents) -> tuple[RankEvents, Waits]:
    """Return the waits of one rank; on a CPU job also the events with launches of the process groups' rows."""
    if events.is_host_job:
        return _of_host_job(events)
    rows, awaited = _of_rows(events)
    points, ends = _of_syncs(events)
    return events, Waits(rows, awaited, points, ends)


def _of_rows(events: RankEvents) -> tuple[Index, Index]:
    rows = events.rows
    pairs: list[tuple[int, int]] = []
    launched = np.flatnonzero(rows.launch != NONE)
    launched = launched[np.argsort(rows.launch[launched], kind="stable")]
    is_link = rows.cause == Cause.LINK
    calls = _wait_calls(events, launched)
    if calls is not None:
        pairs += _by_calls(rows, launched, calls)
    pairs += _links_by_order(rows, launched)
    unlaunched = np.flatnonzero((rows.launch == NONE) & (rows.stream >= 0))
    if len(unlaunched):
        pairs += _by_time(rows, unlaunched[_is_late(rows, unlaunched, None)], None)
    if calls is None and is_link.any():
        others = launched[~is_link[launched]]
        late = others[_is_late(rows, others, events.host)]
        pairs += _by_time(rows, late, np.flatnonzero(is_link))
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    found = np.unique(np.array(pairs, dtype=np.int64), axis=0)
    sound = rows.end_ns[found[:, 1]] <= rows.start_ns[found[:, 0]] + SLACK_NS
    return found[sound, 0], found[sound, 1]


def _wait_calls(events: RankEvents, launched: Index) -> Index | None:
    """Return how many calls to wait for an event precede each launch on its thread; None where the trace has none."""
    trace, rows = events.trace, events.rows
    host = trace.host_rows
    is_wait = np.array([any(word in name for word in _WAIT_CALLS) for name in trace.names] or [False])
    mine = np.flatnonzero(is_wait[host.name] & (host.kind == HostKind.RUNTIME))
    if len(mine) == 0:
        return None
    times, threads = events.call_start_ns[mine], host.thread[mine]
    at = events.host.time_ns[rows.launch[launched]]
    counts = np.zeros(len(launched), dtype=np.int64)
    for thread in np.unique(threads).tolist():
        here = np.flatnonzero(rows.thread[launched] == thread)
        before = np.searchsorted(times[threads == thread], at[here])
        counts[here] = np.diff(before, prepend=0)
    return counts


def _by_calls(rows: WorkRows, launched: Index, calls: Index) -> list[tuple[int, int]]:
    """Return the pairs by the calls before each launch; see the module's docstring for the rule of sites."""
    is_link = rows.cause == Cause.LINK
    noted = [(int(row), int(count)) for row, count in zip(launched, calls, strict=True) if count or is_link[row]]
    sites = _sites(rows, np.array([row for row, _ in noted], dtype=np.int64))
    deepest: dict[tuple[int, int], int] = defaultdict(int)
    pairs: list[tuple[int, int]] = []
    start, end = rows.start_ns.tolist(), rows.end_ns.tolist()
    for _ in range(2):  # the first pass learns how deep each site reaches, the second uses it everywhere
        pending: list[int] = []
        pairs = []
        for (row, count), site in zip(noted, sites, strict=True):
            if is_link[row]:
                pending.append(row)
                del pending[:-PENDING_MAX]
                continue
            for nth in range(min(count, len(pending))):
                depth = min(deepest[site, nth], len(pending) - 1)
                while depth < len(pending) and end[pending[-1 - depth]] > start[row] + SLACK_NS:
                    depth += 1
                if depth >= len(pending):
                    break
                deepest[site, nth] = max(deepest[site, nth], depth)
                pairs.append((row, pending.pop(-1 - depth)))
    return pairs


def _sites(rows: WorkRows, noted: Index) -> list[int]:
    """Return a number for each of these rows that is the same for the same kernel under the same operator."""
    if len(noted) == 0:
        return []
    pairs = np.stack((rows.name[noted], rows.operator[noted]), axis=1)
    _, number = np.unique(pairs, axis=0, return_inverse=True)
    found: list[int] = number.reshape(-1).tolist()
    return found


def _links_by_order(rows: WorkRows, launched: Index) -> list[tuple[int, int]]:
    """Return for each collective the last row that its thread launched before on another stream."""
    pairs: list[tuple[int, int]] = []
    is_link = rows.cause[launched] == Cause.LINK
    threads = rows.thread[launched]
    for thread in np.unique(threads).tolist():
        mine = threads == thread
        order = launched[mine]
        link = is_link[mine]
        last = np.where(link, -1, np.arange(len(order)))
        last = np.maximum.accumulate(last) if len(last) else last
        found = link & (last >= 0)
        pairs += list(zip(order[found].tolist(), order[last[found]].tolist(), strict=True))
    return pairs


def _is_late(rows: WorkRows, some: Index, host: HostLane | None) -> NDArray[np.bool_]:
    """Return for each of these rows whether its stream's tail and its launch leave its start unexplained."""
    ready = _tails(rows)[some]
    if host is not None:
        ready = np.maximum(ready, host.time_ns[rows.launch[some]])
    late: NDArray[np.bool_] = rows.start_ns[some] - ready > UNEXPLAINED_NS
    return late


def _tails(rows: WorkRows) -> Index:
    """Return for each row when the row before it on its stream ended; the least integer for the first."""
    order = np.lexsort((rows.start_ns, rows.stream))
    tails = np.full(len(order), np.iinfo(np.int64).min // 4)
    same = rows.stream[order][1:] == rows.stream[order][:-1]
    tails[order[1:][same]] = rows.end_ns[order[:-1][same]]
    return tails


def _by_time(rows: WorkRows, late: Index, among: Index | None) -> list[tuple[int, int]]:
    """Return for each of these rows what ended last before it, of all rows or of those `among`."""
    others = np.arange(len(rows.end_ns)) if among is None else among
    others = others[np.argsort(rows.end_ns[others], kind="stable")]
    at = np.searchsorted(rows.end_ns[others], rows.start_ns[late] + (SLACK_NS if among is not None else 0), "right") - 1
    known = at >= 0
    awaited = others[np.maximum(at, 0)]
    if among is not None:
        known &= rows.start_ns[late] - rows.end_ns[awaited] <= EVENT_LAG_NS_MAX
    known &= (awaited != late) & (rows.stream[awaited] != rows.stream[late])
    return list(zip(late[known].tolist(), awaited[known].tolist(), strict=True))


def _of_syncs(events: RankEvents) -> tuple[Index, Index]:
    """Return the host's waits for the device: synchronizations and copies that block."""
    trace, rows, lane = events.trace, events.rows, events.host
    host = trace.host_rows
    starts, ends = events.call_start_ns, events.call_end_ns
    pairs: list[tuple[int, int]] = []
    copies = np.flatnonzero((rows.cause == Cause.EXPOSED_COPY) & (rows.launch != NONE))
    calls = np.flatnonzero(np.isin(host.kind, (HostKind.LAUNCH,)))
    if len(copies) and len(calls):
        at = np.minimum(np.searchsorted(starts[calls], lane.time_ns[rows.launch[copies]]), len(calls) - 1)
        blocks = (starts[calls[at]] == lane.time_ns[rows.launch[copies]]) & (ends[calls[at]] >= rows.end_ns[copies])
        points = np.searchsorted(lane.time_ns, ends[calls[at[blocks]]])
        pairs += list(zip(points.tolist(), copies[blocks].tolist(), strict=True))
    is_query = np.array(["Query" in name for name in trace.names] or [False])
    is_all = np.array([any(word in name for word in _DEVICE_SYNCS) for name in trace.names] or [False])
    mine = np.isin(host.thread, launching_threads(trace))
    syncs = np.flatnonzero((host.kind == HostKind.SYNC) & mine & ~is_query[host.name])
    order = np.flatnonzero((rows.launch != NONE) & (rows.cause != Cause.LINK))
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
            # It waited for more than was launched: a stream that itself waits for an event.
            last = int(np.searchsorted(by_end_ns, ends[sync] + SLACK_NS, side="right")) - 1
            if last >= 0 and ends[sync] - by_end_ns[last] < EVENT_LAG_NS_MAX:
                awaited.append(int(by_end[last]))
        pairs += [(point, row) for row in awaited]
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    found = np.unique(np.array(pairs, dtype=np.int64), axis=0)
    return found[:, 0], found[:, 1]


def _last_of_streams(rows: WorkRows, order: Index, launches: Index, at: Index) -> dict[int, Index]:
    """Return for each stream the last row on it that was launched before each instant; NONE for none."""
    found = {}
    for stream in np.unique(rows.stream[order]).tolist():
        mine = rows.stream[order] == stream
        last = np.searchsorted(launches[mine], at) - 1
        found[stream] = np.where(last >= 0, order[mine][np.maximum(last, 0)], NONE)
    return found


def _of_host_job(events: RankEvents) -> tuple[RankEvents, Waits]:
    """Return the events of a CPU job with the calls that started its groups' rows, and where the host waited."""
    rows, lane = events.rows, events.host
    launch, thread = _calls_of_groups(events)
    rows = WorkRows(
        rows.start_ns, rows.end_ns, rows.cause, rows.stream, rows.name, rows.operator, launch, thread
    )  # fmt: skip
    events = replace(events, rows=rows)
    nothing = np.empty(0, dtype=np.int64)
    if len(rows.end_ns) == 0 or len(lane.cause) == 0:
        return events, Waits(nothing, nothing, nothing, nothing)
    begin, end = lane.time_ns[:-1], lane.time_ns[1:]
    gaps = np.flatnonzero((lane.cause != Cause.COMPUTE) & (end - begin >= GAP_NS_MIN))
    if len(gaps) == 0:
        return events, Waits(nothing, nothing, nothing, nothing)
    # Rows' ends are points where they lie in a gap, so the gap before such a point ends exactly there.
    at = np.searchsorted(begin[gaps], rows.end_ns, side="left") - 1
    known = (at >= 0) & (rows.end_ns <= end[gaps[np.maximum(at, 0)]] + GLOO_WAKE_NS)
    awaited = np.flatnonzero(known)
    gap = gaps[at[known]]
    # Of several that ended in one gap the last is what it ended with.
    order = np.lexsort((rows.end_ns[awaited], gap))
    last = np.append(gap[order][1:] != gap[order][:-1], True) if len(order) else np.empty(0, dtype=np.bool_)
    return events, Waits(nothing, nothing, gap[order][last] + 1, awaited[order][last])


def _calls_of_groups(events: RankEvents) -> tuple[Index, Index]:
    """Return the host point at which each row of a process group was started, by order or else by time."""
    trace, rows, lane = events.trace, events.rows, events.host
    host = trace.host_rows
    inner = np.array([name == "record_param_comms" or "wait_tensor" in name for name in trace.names] or [False])
    mine = np.isin(host.thread, launching_threads(trace)) & (host.kind == HostKind.COLLECTIVE_CALL)
    calls = np.flatnonzero(mine & ~inner[host.name])
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
