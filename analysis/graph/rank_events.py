"""Turns one rank's trace into columns for the causal model: its host lane, its work rows and their launches.

The host lane merges the training threads by time (forward and backward run on two threads and take turns) into one
sequence of instants, called points.  The interval between two points has one cause.  A row is work beside the host: a
kernel, a copy, or the work of a host process group (gloo) on its own thread.  On a CPU job operators are intervals of
the host lane, and only the process groups have rows.

    host     |py|launch|py|launch|..sync blocks......|py|launch        points at every |
    stream 7          [kernel ][kernel             ]
    stream 9                   [all-reduce      ]

Pure: a `Trace` in, columns out, times on the common clock.  Left out: what rows wait for (`waits`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work

from ..trace.columns import NONE, WORKS, HostKind, Trace
from ..trace.host_activity import HostActivity, host_activity
from ..trace.kernel_links import LaunchCalls, innermost
from .causes import CauseCode

__all__ = ["COPY_SLACK_NS", "HostLane", "RankEvents", "WorkRows", "rank_events"]

Index = NDArray[np.int64]
Bools = NDArray[np.bool_]

_CAUSE_OF_WORK = {
    Work.COMPUTE: CauseCode.COMPUTE,
    Work.COMMUNICATION: CauseCode.LINK,
    Work.COPY: CauseCode.EXPOSED_COPY,
    Work.OTHER: CauseCode.UNKNOWN,
}
COPY_SLACK_NS = 3_000
"""A device's clock may differ from its host's by this much, so a call that waited seems to return before its copy
ends."""


@dataclass(frozen=True, slots=True)
class HostLane:
    """p + 1 points and the p intervals between them.

    `name` indexes `Trace.names`: the operator around an interval, or what is launched at its end; NONE for neither.
    `thread` is the thread of the row at a point, NONE for none.
    """

    time_ns: Index
    cause: NDArray[np.uint8]
    name: Index
    thread: Index


@dataclass(frozen=True, slots=True)
class WorkRows:
    """n rows: the device's in the order of the trace, then those of host process groups.

    `stream` numbers queues (device and stream, or a group's thread) from 0.  `launch` is the host point at which the
    row was launched, NONE if unknown; `thread` is the launching thread.  `operator` indexes
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
    """One rank's trace, its host lane and its work rows; on a host job (`is_host_job`) operators are the work."""

    trace: Trace
    activity: HostActivity
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
    activity = host_activity(trace)
    lane, launch, thread = _host_lane(trace, activity, is_host_job)
    rows = _work_rows(trace, launch, thread)
    moved_lane = HostLane(common(lane.time_ns), lane.cause, _names_with_launches(lane, rows), lane.thread)
    moved_rows = replace(rows, start_ns=common(rows.start_ns), end_ns=common(rows.end_ns))
    host = trace.host_rows
    return RankEvents(trace, activity, moved_lane, moved_rows, common(host.start_ns), common(host.end_ns), is_host_job)


def _host_lane(trace: Trace, activity: HostActivity, is_host_job: bool) -> tuple[HostLane, Index, Index]:
    """Return the lane on the file's clock, and for each device row its launch point and thread."""
    host, device = trace.host_rows, trace.device
    trains = np.isin(host.thread, activity.threads)
    sync, launches = (np.flatnonzero(trains & (host.kind == kind)) for kind in (HostKind.SYNC, HostKind.LAUNCH))
    operators, calls = activity.operators, activity.collective_calls
    causes = (activity.data_wait, activity.checkpoint, activity.garbage_collection, activity.optimizer)
    both = np.concatenate((*((operators, calls) if is_host_job else ()), sync, *causes))
    copies = _blocking_calls(trace, launches)
    launched = device.launch_ns[device.launch_ns != NONE]
    marks = np.array([t for step in trace.steps for t in (step.start_ns, step.end_ns)], dtype=np.int64)
    parts = [launched, host.start_ns[launches], host.start_ns[both], host.end_ns[both], host.end_ns[copies], marks]
    if is_host_job:  # the end of a group's work splits a gap in two: waiting for it, and python
        ends = host.end_ns[host.kind == HostKind.COLLECTIVE_WORK]
        parts.append(ends[~_covered(trace, operators, ends)])
    time = np.unique(np.concatenate(parts))
    if len(time) == 0:
        empty = np.empty(0, dtype=np.int64)
        lane = HostLane(empty, empty.astype(np.uint8), empty, empty)
        return lane, np.full(len(device.start_ns), NONE), np.full(len(device.start_ns), NONE)
    cause = np.full(max(len(time) - 1, 0), CauseCode.HOST_BOUND, dtype=np.uint8)
    name = np.full(len(cause), NONE, dtype=np.int64)
    at = time[:-1]
    # Later causes override earlier ones, in the order of `host_activity`.
    cause[_covered(trace, activity.optimizer, at)] = CauseCode.OPTIMIZER_HOST
    cause[_covered(trace, activity.garbage_collection, at)] = CauseCode.GC
    cause[_covered(trace, activity.checkpoint, at)] = CauseCode.CHECKPOINT
    if is_host_job:
        running = _covered(trace, operators, at) & ~_covered(trace, calls, at)
        cause[running] = CauseCode.COMPUTE
        name[running] = _outermost(trace, operators, at[running])
    cause[_covered(trace, activity.data_wait, at)] = CauseCode.DATA_WAIT
    cause[_covered(trace, sync, at)] = CauseCode.BLOCKED
    thread = np.full(len(time), NONE, dtype=np.int64)
    for rows in (launches, calls):
        thread[np.searchsorted(time, host.start_ns[rows])] = host.thread[rows]
    launch = np.where(device.launch_ns == NONE, NONE, np.searchsorted(time, device.launch_ns))
    of_row = np.where(launch == NONE, NONE, thread[np.maximum(launch, 0)])
    return HostLane(time, cause, name, thread), launch, of_row


def _blocking_calls(trace: Trace, launches: Index) -> Index:
    """Return the launch calls that block until their copy ends (pageable memory), so that their end is a point too."""
    host, device = trace.host_rows, trace.device
    copies = np.flatnonzero((device.work == WORKS.index(Work.COPY)) & (device.launch_ns != NONE))
    if len(copies) == 0 or len(launches) == 0:
        return np.empty(0, dtype=np.int64)
    starts = host.start_ns[launches]
    at = np.minimum(np.searchsorted(starts, device.launch_ns[copies]), len(starts) - 1)
    calls = launches[at]
    is_call = host.start_ns[calls] == device.launch_ns[copies]
    blocking: Index = calls[is_call & (host.end_ns[calls] >= device.end_ns[copies] - COPY_SLACK_NS)]
    return blocking


def _covered(trace: Trace, rows: Index, at: Index) -> Bools:
    """For each instant, return whether any of these host rows is open."""
    starts, ends = np.sort(trace.host_rows.start_ns[rows]), np.sort(trace.host_rows.end_ns[rows])
    covered: Bools = np.searchsorted(starts, at, side="right") > np.searchsorted(ends, at, side="right")
    return covered


def _outermost(trace: Trace, rows: Index, at: Index) -> Index:
    """Return the name of the outermost of these host rows at each instant."""
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
    unknown = device.stream == NONE  # without a known stream, communication is assumed to run beside the rest
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
        cause=np.concatenate((works[device.work], np.full(len(group), CauseCode.LINK, dtype=np.uint8))),
        stream=stream.reshape(-1).astype(np.int64),
        name=np.concatenate((device.name, host.name[group])).astype(np.int64),
        operator=np.concatenate((operator, nothing)),
        launch=np.concatenate((launch, nothing)),
        thread=np.concatenate((thread, nothing)),
    )


def _names_with_launches(lane: HostLane, rows: WorkRows) -> Index:
    """Return the lane's names, where an interval that ends in a launch is named after the launched row."""
    name = lane.name.copy()
    known = np.flatnonzero(rows.launch > 0)
    ending = rows.launch[known] - 1
    free = name[ending] == NONE
    name[ending[free]] = rows.name[known[free]]
    return name
