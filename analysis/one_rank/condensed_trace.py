"""Condenses a rank's trace to what the causal model needs: some rows between two meetings instead of thousands.

All ranks of a running job record the same steps when one of them seems late (`profiler/ranks/cross_rank_window`), and a
whole trace is too much to send.  Between two points at which a stream or the host waits, what counts is how long each
kind of work took, not in which order.  So rows of compute there become one row for each kernel name.  The result is a
`Trace` of the same form, so the ranks are compared by the same code as whole traces.

    device   the first row after a wait as it is; then the rows until the stream last ran dry, back to back; then the
             rest, which began when its launch came.  Only the launches of these rows are kept
    host     (a CPU job) operators between two calls, waits, marks or annotations, back to back

Collectives, copies, waits, annotated rows and step marks are kept.  Python's time between launches, or between
operators, is what is left between kept rows, so its sums do not change.

Pure: a trace in, a trace out.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work

from ..trace.columns import NONE, WORKS, DeviceRows, HostKind, HostRows, Trace
from ..trace.host_activity import GC_WORDS, host_activity
from ..trace.kernel_links import LaunchCalls, innermost
from ..trace.steps import STEP_PREFIX

__all__ = ["OPERATOR_MARK", "condensed"]

Index = NDArray[np.int64]
Bools = NDArray[np.bool_]

OPERATOR_MARK = " in "

LATE_NS = 20_000
"""A row this long after its launch and the row before it waited for another stream, as in `device_waits`."""

DRY_NS = 4_000
"""A gap from which on a stream had nothing to do; between queued kernels it is one or two microseconds."""

STALL_NS = 200_000
"""Rows before and after a gap of this length are never merged."""

CALL_WORDS = ("StreamWaitEvent", "EventRecord")
"""Runtime calls from which the model infers what waits for what."""

KEPT_KINDS = (
    HostKind.LOADER, HostKind.OPTIMIZER, HostKind.CHECKPOINT, HostKind.SYNC, HostKind.COLLECTIVE_CALL,
    HostKind.COLLECTIVE_WORK,
)  # fmt: skip


def condensed(trace: Trace) -> Trace:
    """Return `trace` with merged rows of compute.

    The name of device work gets its operator's behind OPERATOR_MARK, because peers compare both.
    """
    if not trace.has_device:
        rows = _sorted(_host_rows(trace, np.empty(0, dtype=np.int64)), _operators(trace))
        return _with_used_names(replace(trace, host_rows=rows, is_condensed=True, details=None))
    names, number = _with_operators(trace)
    device = _on_device(trace, number)
    rows = _host_rows(trace, np.unique(device.launch_ns[device.launch_ns != NONE]))
    return _with_used_names(replace(trace, names=names, device=device, host_rows=rows, is_condensed=True, details=None))


def _with_operators(trace: Trace) -> tuple[tuple[str, ...], Index]:
    """Return the names of the trace and of work under operators, and the name of each device row."""
    rows, host = trace.device, trace.host_rows
    launches = np.flatnonzero(host.kind == HostKind.LAUNCH)
    at = np.searchsorted(host.start_ns[launches], rows.launch_ns)
    at = np.minimum(at, max(len(launches) - 1, 0))
    thread = np.full(len(rows.start_ns), NONE, dtype=np.int64)
    if len(launches):
        known = host.start_ns[launches][at] == rows.launch_ns
        thread[known] = host.thread[launches][at][known]
    chosen = np.flatnonzero(host.kind == HostKind.OPERATOR)
    operators = LaunchCalls(*(c[chosen] for c in (host.thread, host.start_ns, host.end_ns, host.name)))  # type: ignore[arg-type]
    operator = innermost(operators, thread, rows.launch_ns)
    operator = np.where(rows.work == WORKS.index(Work.COMMUNICATION), NONE, operator)
    pairs, number = np.unique(np.stack((rows.name.astype(np.int64), operator), axis=1), axis=0, return_inverse=True)
    extra = [
        trace.names[name] if within == NONE else f"{trace.names[name]}{OPERATOR_MARK}{trace.names[within]}"
        for name, within in pairs.tolist()
    ]
    return (*trace.names, *extra), len(trace.names) + number.reshape(-1).astype(np.int64)


# --- device ---------------------------------------------------------------------------------------


def _on_device(trace: Trace, names: Index) -> DeviceRows:
    rows, host = trace.device, trace.host_rows
    is_compute = (rows.work == WORKS.index(Work.COMPUTE)) & (rows.launch_ns != NONE)
    order = np.lexsort((rows.end_ns, rows.start_ns, rows.stream, rows.device))
    start, end, launch = rows.start_ns[order], rows.end_ns[order], rows.launch_ns[order]
    is_call = _named(trace, CALL_WORDS)[host.name] & (host.kind == HostKind.RUNTIME)
    marks = np.isin(host.kind, (HostKind.SYNC, HostKind.LOADER, HostKind.CHECKPOINT)) | is_call | _is_gc(trace)
    cuts = np.concatenate(
        (
            host.start_ns[marks],
            host.end_ns[marks],
            rows.launch_ns[rows.work != WORKS.index(Work.COMPUTE)],
            np.array([step.start_ns for step in trace.steps], dtype=np.int64),
        )
    )
    epoch = np.searchsorted(np.sort(cuts), launch, side="right")
    merges = is_compute[order]
    begins = np.ones(len(order), dtype=np.bool_)
    if len(order) > 1:
        same = (rows.device[order][1:] == rows.device[order][:-1]) & (rows.stream[order][1:] == rows.stream[order][:-1])
        same &= merges[1:] & merges[:-1] & (epoch[1:] == epoch[:-1])
        same &= start[1:] - np.maximum(end[:-1], launch[1:]) < LATE_NS
        same &= start[1:] - end[:-1] < STALL_NS
        begins[1:] = ~same
    heads = np.flatnonzero(begins)
    lasts = np.append(heads[1:], len(order))
    parts = _Parts()
    number = names[order]
    for head, last in zip(heads.tolist(), lasts.tolist(), strict=True):
        parts.as_it_is(order[head])
        if last - head > 1:
            dry = np.flatnonzero(start[head + 1 : last] - end[head : last - 1] > DRY_NS)
            at = head + 1 + int(dry[-1]) if len(dry) else head + 1
            if at > head + 1:
                parts.merged(order[head], number[head + 1 : at], start[head + 1 : at], end[head + 1 : at],
                             launch[head + 1 : at], at_end=True)  # fmt: skip
            parts.merged(order[head], number[at:last], start[at:last], end[at:last], launch[at:last], at_end=False)
    return parts.rows(replace(rows, name=names.astype(np.int32)))


class _Parts:
    """Collects rows of the condensed device columns."""

    def __init__(self) -> None:
        self._of: list[int] = []
        self._start: list[int] = []
        self._end: list[int] = []
        self._launch: list[int] = []
        self._name: list[int] = []

    def as_it_is(self, row: int) -> None:
        self._add(int(row), NONE, 0, 0, 0)

    def merged(self, like: int, number: Index, start: Index, end: Index, launch: Index, *, at_end: bool) -> None:
        """Add a row for each name of these rows; they end, or begin, when the rows did."""
        kinds, which = np.unique(number, return_inverse=True)
        durations = np.bincount(which, end - start).astype(np.int64)
        total, span = int(durations.sum()), int(end[-1] - start[0])
        rest = 0 if at_end else max(span - total, 0)
        begin = max(int(start[0]), int(end[-1]) - total) if at_end else int(start[0])
        launched = int(launch[launch <= begin].max(initial=int(launch[0])))
        gap = rest // max(len(kinds) - 1, 1) if len(kinds) > 1 else 0
        for place, (kind, duration) in enumerate(zip(kinds.tolist(), durations.tolist(), strict=True)):
            finish = begin + duration
            if place == len(kinds) - 1:
                finish = int(end[-1])
            self._add(int(like), kind, begin, max(finish, begin), launched)
            begin = finish + gap

    def _add(self, like: int, name: int, start: int, end: int, launch: int) -> None:
        for column, value in zip(
            (self._of, self._name, self._start, self._end, self._launch), (like, name, start, end, launch), strict=True
        ):
            column.append(value)

    def rows(self, rows: DeviceRows) -> DeviceRows:
        of, name, start, end, launch = (
            np.array(column, dtype=np.int64) for column in (self._of, self._name, self._start, self._end, self._launch)
        )
        is_merged = name != NONE
        found = {each: getattr(rows, each)[of] for each in DeviceRows.__dataclass_fields__}
        found["start_ns"] = np.where(is_merged, start, found["start_ns"])
        found["end_ns"] = np.where(is_merged, end, found["end_ns"])
        found["launch_ns"] = np.where(is_merged, launch, found["launch_ns"])
        found["name"] = np.where(is_merged, name, found["name"]).astype(np.int32)
        found["grid"] = np.full(len(of), NONE, dtype=np.int32)
        found["correlation"] = np.full(len(of), NONE, dtype=np.int64)
        order = np.argsort(found["start_ns"], kind="stable")
        return DeviceRows(**{each: column[order] for each, column in found.items()})


# --- host -----------------------------------------------------------------------------------------


def _named(trace: Trace, words: tuple[str, ...]) -> Bools:
    return np.array([any(word in name for word in words) for name in trace.names] or [False], dtype=np.bool_)


def _is_gc(trace: Trace) -> Bools:
    host = trace.host_rows
    is_gc = np.array([any(word in name.lower() for word in GC_WORDS) for name in trace.names] or [False])
    found: Bools = (host.kind == HostKind.ANNOTATION) & is_gc[host.name]
    return found


def _host_rows(trace: Trace, launches: Index) -> HostRows:
    """Return the rows of the host that are kept as they are."""
    host = trace.host_rows
    keep = np.isin(host.kind, KEPT_KINDS) | _is_gc(trace)
    keep |= (host.kind == HostKind.RUNTIME) & _named(trace, CALL_WORDS)[host.name]
    keep |= (host.kind == HostKind.LAUNCH) & np.isin(host.start_ns, launches)
    keep |= _named(trace, (STEP_PREFIX,))[host.name]
    rows = {each: getattr(host, each)[keep] for each in HostRows.__dataclass_fields__}
    rows["correlation"] = np.full(int(keep.sum()), NONE, dtype=np.int64)
    return HostRows(**rows)


def _operators(trace: Trace) -> HostRows:
    """Return the operators of a CPU job, merged between two instants that matter to the model."""
    host, activity = trace.host_rows, host_activity(trace)
    operators, calls = activity.operators, activity.collective_calls
    causes = np.concatenate(
        (activity.data_wait, activity.checkpoint, activity.garbage_collection, activity.optimizer, calls)
    )
    begin, end = _outermost(host.start_ns[operators], host.end_ns[operators])
    top = operators[begin]
    ends = host.end_ns[host.kind == HostKind.COLLECTIVE_WORK]
    before = np.searchsorted(np.sort(end), ends, side="right") - 1
    marks = [time for step in trace.steps for time in (step.start_ns, step.end_ns)]
    cuts = np.unique(
        np.concatenate(
            (
                host.start_ns[causes], host.end_ns[causes], ends, np.sort(end)[before[before >= 0]],
                np.array(marks, dtype=np.int64),
            )
        )
    )  # fmt: skip
    points = np.unique(np.concatenate((host.start_ns[top], end, cuts)))
    if len(points) < 2:
        return _nothing(host)
    at, until = points[:-1], points[1:]
    place = np.searchsorted(host.start_ns[top], at, side="right") - 1
    runs = (place >= 0) & (at < end[np.maximum(place, 0)])
    starts, stops = np.sort(host.start_ns[calls]), np.sort(host.end_ns[calls])
    runs &= np.searchsorted(starts, at, side="right") <= np.searchsorted(stops, at, side="right")
    stretch = np.searchsorted(cuts, at, side="right")
    number = np.where(runs, host.name[top[np.maximum(place, 0)]], NONE)
    thread = host.thread[top[np.maximum(place, 0)]].astype(np.int64)
    found: list[tuple[int, int, int, int]] = []
    heads = np.flatnonzero(np.append(True, stretch[1:] != stretch[:-1]))
    for head, last in zip(heads.tolist(), [*heads[1:].tolist(), len(at)], strict=True):
        found += _stretch(at[head:last], until[head:last], number[head:last], thread[head:last])
    if not found:
        return _nothing(host)
    columns = np.array(found, dtype=np.int64).T
    return HostRows(
        columns[0], columns[1], np.full(len(found), HostKind.OPERATOR, dtype=np.uint8), columns[2].astype(np.int32),
        columns[3].astype(np.int32), np.full(len(found), NONE), np.full(len(found), NONE, dtype=np.int32),
    )  # fmt: skip


def _outermost(start: Index, end: Index) -> tuple[Index, Index]:
    """Return which rows (sorted by start) are not inside another, and their ends, at most the next one's start."""
    if len(start) == 0:
        return np.empty(0, dtype=np.int64), end
    most = np.maximum.accumulate(end)
    top = np.flatnonzero(np.append(True, start[1:] >= most[:-1]))
    return top, most[np.append(top[1:], len(start)) - 1]


def _stretch(at: Index, until: Index, number: Index, thread: Index) -> list[tuple[int, int, int, int]]:
    """Return one row for each operator of a stretch of the host; idle time at its ends stays there as far as it can."""
    runs = number != NONE
    if not runs.any():
        return []
    kinds, which = np.unique(number[runs], return_inverse=True)
    durations = np.bincount(which, (until - at)[runs]).astype(np.int64)
    total, on = int(durations.sum()), int(thread[runs][0])
    begin = int(at[0]) if runs[0] else int(until[-1]) - total if runs[-1] else int(at[runs][0])
    lead: list[tuple[int, int, int, int]] = []
    if runs[0] and runs[-1] and not runs.all():  # it begins and ends within operators
        lead = [(int(at[0]), int(until[0]), int(number[0]), on)]
        durations[np.flatnonzero(kinds == number[0])[0]] -= int(until[0] - at[0])
        begin = int(until[-1]) - int(durations.sum())
    rows = lead
    for kind, duration in zip(kinds.tolist(), durations.tolist(), strict=True):
        if duration > 0:
            rows.append((begin, begin + duration, kind, on))
            begin += duration
    return rows


def _nothing(host: HostRows) -> HostRows:
    return HostRows(**{each: getattr(host, each)[:0] for each in HostRows.__dataclass_fields__})


def _sorted(*parts: HostRows) -> HostRows:
    columns = {each: np.concatenate([getattr(p, each) for p in parts]) for each in HostRows.__dataclass_fields__}
    order = np.lexsort((-columns["end_ns"], columns["start_ns"]))
    return HostRows(**{each: column[order] for each, column in columns.items()})


def _with_used_names(trace: Trace) -> Trace:
    """Return the trace with only the names and grids that its rows use."""
    used, number = np.unique(np.concatenate((trace.device.name, trace.host_rows.name)), return_inverse=True)
    devices = len(trace.device.name)
    places = number.astype(np.int32)
    return replace(
        trace,
        names=tuple(trace.names[each] for each in used.tolist()),
        grids=(),
        device=replace(trace.device, name=places[:devices]),
        host_rows=replace(trace.host_rows, name=places[devices:]),
    )
