"""Turns one rank's trace into the columns of the causal model: its host lane, its work rows and what launched them.

The host lane is one sequence of instants ("points") of the threads that launch work, merged by time: forward and
backward run on two threads and take turns.  Between two points lies an interval with one cause.  A row is work that
runs beside the host: a kernel, a copy, or the work of a host process group (gloo) on its own thread.  On a CPU job the
operators are intervals of the host lane, and the only rows are the process groups'.

    host     |py|launch|py|launch|..sync blocks......|py|launch        points at every |
    stream 7          [kernel ][kernel             ]
    stream 9                   [all-reduce      ]

Pure: a `Trace` in, columns out, times on the common clock.  Left out: what rows wait for (`waits`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...ledger.attribution import Work
from ...trace.columns import NONE, WORKS, HostKind, Trace
from ...trace.kernel_links import LaunchCalls, innermost
from .causes import Cause

__all__ = ["COPY_SLACK_NS", "HostLane", "RankEvents", "WorkRows", "launching_threads", "rank_events"]

Index = NDArray[np.int64]
Bools = NDArray[np.bool_]

_CAUSE_OF_WORK = {
    Work.COMPUTE: Cause.COMPUTE,
    Work.COMMUNICATION: Cause.LINK,
    Work.COPY: Cause.EXPOSED_COPY,
    Work.OTHER: Cause.UNKNOWN,
}
COPY_SLACK_NS = 3_000
"""A device's clock may be off its host's by so much: a call that waited seems to return before its copy has ended."""

_GC_WORDS = ("gc.collect", "garbage", "python gc", "gc:")


@dataclass(frozen=True, slots=True)
class HostLane:
    """p + 1 points and the p intervals between them.

    `name` indexes `Trace.names`: the operator that an interval is inside of, or what is launched at its end; NONE for
    neither.  `thread` is that of the row that makes a point, NONE where none does.
    """

    time_ns: Index
    cause: NDArray[np.uint8]
    name: Index
    thread: Index


@dataclass(frozen=True, slots=True)
class WorkRows:
    """n rows: the device's in the order of the trace, then those of host process groups.

    `stream` numbers queues (device and stream, or a group's thread) from 0.  `launch` is the host point at which the
    row was launched, NONE where the trace does not say; `thread` what launched it.  `operator` indexes
    `Trace.names`: the innermost operator open at the launch.
    """

    start_ns: Index
    end_ns: Index
    cause: NDArray[np.uint8]
    stream: Index
    name: Index
    operator: Index
    launch: Index
    thread: Index


@dataclass(frozen=True, slots=True)
class RankEvents:
    """One rank: its trace (for names and calls), host lane and rows; `is_host_job` where operators are the work."""

    trace: Trace
    host: HostLane
    rows: WorkRows
    call_start_ns: Index
    """When each host row of the trace began, on the common clock; `call_end_ns` when it ended."""
    call_end_ns: Index
    is_host_job: bool


def rank_events(trace: Trace, offset_ns: float = 0.0, drift: float = 0.0, middle_ns: int = 0) -> RankEvents:
    """Return the columns of `trace` on the common clock: t + `offset_ns` + `drift` * (t - `middle_ns`)."""

    def common(times: Index) -> Index:
        if drift == 0.0:
            return times + round(offset_ns)
        moved: Index = times + np.rint(offset_ns + drift * (times - middle_ns)).astype(np.int64)
        return moved

    is_host_job = not trace.has_device
    spans = _host_spans(trace, is_host_job)
    lane, launch, thread = _host_lane(trace, spans, is_host_job)
    rows = _work_rows(trace, launch, thread)
    moved_lane = HostLane(common(lane.time_ns), lane.cause, _launched(lane, rows), lane.thread)
    moved_rows = WorkRows(
        common(rows.start_ns), common(rows.end_ns), rows.cause, rows.stream,
        rows.name, rows.operator, rows.launch, rows.thread,
    )  # fmt: skip
    host = trace.host_rows
    return RankEvents(trace, moved_lane, moved_rows, common(host.start_ns), common(host.end_ns), is_host_job)


def launching_threads(trace: Trace) -> Index:
    """Return the threads of the host lane: those that launch device work, else those that run the loop."""
    host = trace.host_rows
    if trace.has_device:
        threads = np.unique(host.thread[host.kind == HostKind.LAUNCH])
        return threads if len(threads) else np.unique(host.thread[np.isin(host.kind, _LOOP_KINDS)])
    is_mark = _has_prefix(trace, "ProfilerStep#")[host.name]
    loop = np.unique(host.thread[np.isin(host.kind, _LOOP_KINDS) | is_mark])
    is_operator = host.kind == HostKind.OPERATOR
    if not np.isin(host.thread[is_operator], loop).any():
        calls = host.thread[is_operator | (host.kind == HostKind.COLLECTIVE_CALL)]
        return np.unique(calls)
    is_engine = _has_prefix(trace, "autograd::engine::")[host.name]
    return np.union1d(loop, host.thread[is_operator & is_engine])


_LOOP_KINDS = (HostKind.OPTIMIZER, HostKind.LOADER, HostKind.CHECKPOINT)


def _has_prefix(trace: Trace, prefix: str) -> Bools:
    return np.array([name.startswith(prefix) for name in trace.names] or [False], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class _Spans:
    """Host rows by cause, as indices into the host rows; `operator` only on CPU jobs."""

    mine: Bools
    operator: Index
    call: Index
    sync: Index
    launch: Index
    caused: dict[Cause, Index]


def _host_spans(trace: Trace, is_host_job: bool) -> _Spans:
    host = trace.host_rows
    mine = np.isin(host.thread, launching_threads(trace))
    # The loader may run on a thread that launches nothing; what is annotated counts wherever it is.
    is_gc = np.array([any(word in name.lower() for word in _GC_WORDS) for name in trace.names] or [False])
    gc = (host.kind == HostKind.ANNOTATION) & is_gc[host.name]

    def of(kind: HostKind) -> Index:
        return np.flatnonzero(mine & (host.kind == kind))

    return _Spans(
        mine=mine,
        operator=of(HostKind.OPERATOR) if is_host_job else np.empty(0, dtype=np.int64),
        call=of(HostKind.COLLECTIVE_CALL),
        sync=of(HostKind.SYNC),
        launch=of(HostKind.LAUNCH),
        caused={
            Cause.DATA_WAIT: np.flatnonzero(host.kind == HostKind.LOADER),
            Cause.CHECKPOINT: np.flatnonzero(host.kind == HostKind.CHECKPOINT),
            Cause.GC: np.flatnonzero(gc),
            Cause.OPTIMIZER_HOST: of(HostKind.OPTIMIZER),
        },
    )


def _host_lane(trace: Trace, spans: _Spans, is_host_job: bool) -> tuple[HostLane, Index, Index]:
    """Return the lane on the file's clock, and for each device row its launch point and thread."""
    host, device = trace.host_rows, trace.device
    launched = device.launch_ns[device.launch_ns != NONE]
    marks = np.array([t for step in trace.steps for t in (step.start_ns, step.end_ns)], dtype=np.int64)
    caused = np.concatenate([np.empty(0, dtype=np.int64), *spans.caused.values()])
    both = np.concatenate((spans.operator, spans.call if is_host_job else spans.call[:0], spans.sync, caused))
    copies = _blocking_calls(trace, spans)
    parts = [launched, host.start_ns[spans.launch], host.start_ns[both], host.end_ns[both], host.end_ns[copies], marks]
    if is_host_job:  # a gap in which a group's work ended is two: waiting for it, and python
        ends = host.end_ns[host.kind == HostKind.COLLECTIVE_WORK]
        parts.append(ends[~_covered(trace, spans.operator, ends)])
    time = np.unique(np.concatenate(parts))
    if len(time) == 0:
        empty = np.empty(0, dtype=np.int64)
        lane = HostLane(empty, empty.astype(np.uint8), empty, empty)
        return lane, np.full(len(device.start_ns), NONE), np.full(len(device.start_ns), NONE)
    cause = np.full(max(len(time) - 1, 0), Cause.HOST_BOUND, dtype=np.uint8)
    at = time[:-1]
    for of_cause in (Cause.OPTIMIZER_HOST, Cause.CHECKPOINT):
        cause[_covered(trace, spans.caused[of_cause], at)] = of_cause
    name = np.full(len(cause), NONE, dtype=np.int64)
    if is_host_job:
        running = _covered(trace, spans.operator, at) & ~_covered(trace, spans.call, at)
        cause[running] = Cause.COMPUTE
        name[running] = _outermost(trace, spans.operator, at[running])
    for of_cause in (Cause.GC, Cause.DATA_WAIT):
        cause[_covered(trace, spans.caused[of_cause], at)] = of_cause
    cause[_covered(trace, spans.sync, at)] = Cause.BLOCKED
    thread = np.full(len(time), NONE, dtype=np.int64)
    for rows in (spans.launch, spans.call):
        thread[np.searchsorted(time, host.start_ns[rows])] = host.thread[rows]
    launch = np.where(device.launch_ns == NONE, NONE, np.searchsorted(time, device.launch_ns))
    of_row = np.where(launch == NONE, NONE, thread[np.maximum(launch, 0)])
    return HostLane(time, cause, name, thread), launch, of_row


def _blocking_calls(trace: Trace, spans: _Spans) -> Index:
    """Return the launch calls that last until their own copy has ended (pageable memory): the end is a point too."""
    host, device = trace.host_rows, trace.device
    copies = np.flatnonzero((device.work == WORKS.index(Work.COPY)) & (device.launch_ns != NONE))
    if len(copies) == 0 or len(spans.launch) == 0:
        return np.empty(0, dtype=np.int64)
    starts = host.start_ns[spans.launch]
    at = np.minimum(np.searchsorted(starts, device.launch_ns[copies]), len(starts) - 1)
    calls = spans.launch[at]
    is_call = host.start_ns[calls] == device.launch_ns[copies]
    blocking: Index = calls[is_call & (host.end_ns[calls] >= device.end_ns[copies] - COPY_SLACK_NS)]
    return blocking


def _covered(trace: Trace, rows: Index, at: Index) -> Bools:
    """Return for each instant whether any of these host rows is open at it."""
    starts, ends = np.sort(trace.host_rows.start_ns[rows]), np.sort(trace.host_rows.end_ns[rows])
    covered: Bools = np.searchsorted(starts, at, side="right") > np.searchsorted(ends, at, side="right")
    return covered


def _outermost(trace: Trace, rows: Index, at: Index) -> Index:
    """Return the name of the outermost of these host rows at each instant: the first of those that reach over it."""
    host = trace.host_rows
    ends = np.maximum.accumulate(host.end_ns[rows])
    begins = np.ones(len(rows), dtype=np.bool_)
    begins[1:] = host.start_ns[rows][1:] >= ends[:-1]
    tops = rows[begins]
    found: Index = host.name[tops[np.searchsorted(host.start_ns[tops], at, side="right") - 1]].astype(np.int64)
    return found


def _work_rows(trace: Trace, launch: Index, thread: Index) -> WorkRows:
    device, host = trace.device, trace.host_rows
    works = np.array([_CAUSE_OF_WORK[work] for work in WORKS], dtype=np.uint8)
    group = np.flatnonzero(host.kind == HostKind.COLLECTIVE_WORK)
    pairs = np.stack((device.device.astype(np.int64), device.stream), axis=1)
    unknown = device.stream == NONE  # where no stream is known, communication is taken to run beside the rest
    pairs[unknown, 0] = np.where(device.work[unknown] == WORKS.index(Work.COMMUNICATION), -2, -3)
    pairs = np.concatenate((pairs, np.stack((np.full(len(group), -4), host.thread[group].astype(np.int64)), axis=1)))
    _, stream = np.unique(pairs, axis=0, return_inverse=True)
    operators = np.flatnonzero(host.kind == HostKind.OPERATOR)
    calls = LaunchCalls(*(c[operators] for c in (host.thread, host.start_ns, host.end_ns, host.name)))  # type: ignore[arg-type]
    operator = innermost(calls, thread, device.launch_ns)
    nothing = np.full(len(group), NONE, dtype=np.int64)
    return WorkRows(
        start_ns=np.concatenate((device.start_ns, host.start_ns[group])),
        end_ns=np.concatenate((device.end_ns, host.end_ns[group])),
        cause=np.concatenate((works[device.work], np.full(len(group), Cause.LINK, dtype=np.uint8))),
        stream=stream.reshape(-1).astype(np.int64),
        name=np.concatenate((device.name, host.name[group])).astype(np.int64),
        operator=np.concatenate((operator, nothing)),
        launch=np.concatenate((launch, nothing)),
        thread=np.concatenate((thread, nothing)),
    )


def _launched(lane: HostLane, rows: WorkRows) -> Index:
    """Return the lane's names with those of intervals that end in a launch: what the interval prepares."""
    name = lane.name.copy()
    known = np.flatnonzero(rows.launch > 0)
    ending = rows.launch[known] - 1
    free = name[ending] == NONE
    name[ending[free]] = rows.name[known[free]]
    return name
