"""Writes what happened on a rank as the `Trace` that pacecar's reader gives of torch's file.

True times become those of the host's clock; rows of the device have an error of their own, and the device's clock is
a little off its host's, as CUPTI's is.  What began before the profiler did is not there.  Which rows a call leaves is
as torch.profiler leaves them:

    c10d::allreduce_         |--------------------------------------|
    record_param_comms         |---------------------------------|
    cudaEventRecord, cudaStreamWaitEvent  || ||
    nccl:all_reduce                             |----------------|
    the same two, NCCL's own                      || ||       || ||
    cudaLaunchKernelExC                                 |----|
    cudaEventRecord                                               ||
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import (
    NONE,
    WORKS,
    DeviceRows,
    HostKind,
    HostRows,
    StepMark,
    SyncRows,
    Trace,
)

from .clocks import HostClock
from .collectives import call_annotations, collectives_of
from .damage import device_rows_only
from .durations import durations, generator
from .engine import RankTimes
from .instructions import AUTOGRAD, Code, Program
from .job import Job
from .programs import STEP_ROW
from .waits import CALL_NS, calls_of, sync_rows

__all__ = ["BASE_NS", "CORRELATIONS", "build_trace", "host_name"]

BASE_NS = 1_790_000_000_000_000_000
"""`baseTimeNanoseconds` of every trace."""

CORRELATIONS = 8
"""Numbers set aside for the calls of one instruction: its launch has the first, its records and waits the next."""

DEVICE_CLOCK_NS = 300
"""Standard deviation by which a device's rows are off their host's clock."""

_STAMP = 50
_NODE = "autograd::engine::evaluate_function: "
"""The row that autograd's engine puts around a backward operator begins so."""

Times = NDArray[np.int64]


def host_name(number: int) -> str:
    return f"node{number:03d}"


class _Anchors(NamedTuple):
    """When the parts of each recorded instruction began and ended, in the host's clock."""

    row: Times
    call: Times
    called: Times
    end: Times
    inside: Times
    after: Times


class _Table:
    """Collects rows of the host, many at a time."""

    def __init__(self) -> None:
        self._parts: dict[str, list[NDArray[np.int64]]] = {name: [] for name in HostRows.__dataclass_fields__}
        self.names: dict[str, int] = {}

    def name(self, text: str) -> int:
        return self.names.setdefault(text, len(self.names))

    def add(
        self,
        start: Times,
        end: Times,
        kind: Times | HostKind,
        name: Times | int,
        thread: Times,
        correlation: Times | int = NONE,
        collective: Times | int = NONE,
    ) -> None:
        given = (start, end, kind, name, thread, correlation, collective)
        for part, values in zip(self._parts.values(), given, strict=True):
            part.append(np.broadcast_to(np.asarray(values, dtype=np.int64), start.shape))

    def rows(self) -> HostRows:
        columns = {name: np.concatenate(parts) for name, parts in self._parts.items()}
        order = np.argsort(columns["start_ns"], kind="stable")
        dtypes = {"kind": np.uint8, "name": np.int32, "thread": np.int32, "collective": np.int32}
        return HostRows(**{name: column[order].astype(dtypes.get(name, np.int64)) for name, column in columns.items()})


def build_trace(job: Job, program: Program, times: RankTimes, rank: int, clock: HostClock) -> Trace:
    """Return the trace of `rank`."""
    n, layout = len(program), job.layout
    first = job.steps_before * n
    anchors = _anchors(job, program, times, rank, clock)
    place = np.arange(first, job.all_steps * n)
    collectives, of_work = collectives_of(job, program, rank)
    table = _Table()
    _add_operators(table, program, anchors, job)
    _add_exchanges(table, program, anchors, job, rank, place * CORRELATIONS, of_work[place])
    _add_calls(table, program, anchors, job, place * CORRELATIONS)
    _add_spans(table, program, anchors, job)
    begins = int(clock.show(times.host_start[first : first + 1])[0])
    device, grids = _device_rows(job, program, times, rank, clock, table, of_work, begins)
    host = table.rows()
    names = tuple(table.names)
    marks = np.flatnonzero(np.array([name.startswith(STEP_ROW) for name in names])[host.name])
    both = np.concatenate((device.start_ns, host.start_ns)), np.concatenate((device.end_ns, host.end_ns))
    trace = Trace(
        file=f"rank{rank}.json",
        rank=rank,
        world_size=layout.ranks,
        backend="gloo" if job.is_cpu else "nccl",
        host=host_name(layout.host(rank)) if job.has_host_names else None,
        gpus=() if job.is_cpu else ("NVIDIA H100 80GB HBM3",) * min(layout.ranks_per_host, layout.ranks),
        names=names,
        threads=tuple((str(1000 + rank), str(1000 + rank + 7 * number)) for number in range(3 if job.is_cpu else 2)),
        collectives=collectives,
        grids=grids,
        device=device,
        host_rows=host,
        syncs=_syncs(job, program, place, anchors, rank) if job.has_sync_rows else SyncRows.empty(),
        steps=tuple(
            StepMark(int(names[host.name[row]].removeprefix(STEP_ROW)), int(host.start_ns[row]), int(host.end_ns[row]))
            for row in marks.tolist()
        ),
        start_ns=int(both[0].min()),
        end_ns=int(both[1].max()),
        wall_offset_ns=BASE_NS,
        events=len(both[0]),
    )
    return trace if job.has_host_rows else device_rows_only(trace)


def _anchors(job: Job, program: Program, times: RankTimes, rank: int, clock: HostClock) -> _Anchors:
    steps = range(job.steps_before, job.all_steps)
    parts = np.concatenate([durations(job, program, rank, step).host for step in steps], axis=1)
    first = job.steps_before * len(program)
    row = times.host_start[first:] + parts[0]
    end = times.host_end[first:]
    call = row + parts[1]
    waits = np.tile((program.code == Code.SYNC) | program.column("is_blocking").astype(np.bool_), job.steps)
    called = np.where(waits, np.maximum(call + parts[2], end - parts[3]), call + parts[2])
    return _Anchors(clock.show(row), clock.show(call), clock.show(called), clock.show(end), parts[1], parts[3])


def _tiled(values: list[int] | NDArray[np.int64] | NDArray[np.bool_], job: Job) -> Times:
    return np.tile(np.asarray(values, dtype=np.int64), job.steps)


def _add_operators(table: _Table, program: Program, at: _Anchors, job: Job) -> None:
    """Add the rows of operators, data loading and checkpoints; one that took no time was not there."""
    ones = program.instructions
    has_row = [bool(one.row) and one.code in (Code.LAUNCH, Code.HOST) for one in ones]
    which = _tiled(np.array(has_row), job).astype(np.bool_) & (at.end > at.row)
    name = _tiled([table.name(one.row) if has else NONE for one, has in zip(ones, has_row, strict=True)], job)
    kind, thread = (_tiled(program.column(column), job) for column in ("kind", "thread"))
    row, end, kind, thread = at.row[which], at.end[which], kind[which], thread[which]
    nodes = (thread == AUTOGRAD) & (kind == HostKind.OPERATOR)
    outer = [table.name(_NODE + one.row) if has else NONE for one, has in zip(ones, has_row, strict=True)]
    table.add(row[nodes], end[nodes], HostKind.OPERATOR, _tiled(outer, job)[which][nodes], thread[nodes])
    margin = np.where(nodes, (end - row) // 50, 0)
    table.add(row + margin, end - margin, kind, name[which], thread)


def _add_exchanges(
    table: _Table, program: Program, at: _Anchors, job: Job, rank: int, correlation: Times, collective: Times
) -> None:
    """Add the rows that the call of a collective, a send or a receive leaves, but its launch."""
    is_exchange = (program.code >= Code.COLLECTIVE) & (program.code <= Code.BATCH)
    which = _tiled(is_exchange, job).astype(np.bool_)
    if not which.any():
        return
    ones = [one for one, is_one in zip(program.instructions, is_exchange.tolist(), strict=True) if is_one]
    row, called, end, inside, after = (part[which] for part in (at.row, at.called, at.end, at.inside, at.after))
    thread = _tiled(program.column("thread"), job)[which]
    call = HostKind.COLLECTIVE_CALL
    said = _tiled([bool(one.role) for one in ones], job).astype(np.bool_)  # the batch itself has no such rows
    rows = _tiled([table.name(one.row) if one.role else NONE for one in ones], job)
    table.add(row[said], end[said], call, rows[said], thread[said])
    if job.is_cpu:
        return
    described, start = table.name("record_param_comms"), row + inside * 3 // 10
    said_of = collective[which][said]
    table.add(start[said], (end - after // 5)[said], call, described, thread[said], collective=said_of)
    calls = [calls_of(one, has_nccl_events=job.has_nccl_events) for one in ones]
    for number, call_ in sorted({call.number: call for its in calls for call in its}.items()):
        has = _tiled([call_ in its for its in calls], job).astype(np.bool_)
        start = call_.start_ns(row, inside, called, after)[has]
        name = table.name(call_.name)
        table.add(start, start + CALL_NS, HostKind.RUNTIME, name, thread[has], (correlation[which] + number)[has])
    words = _tiled([table.name(word) if word else NONE for word in call_annotations(job, program, rank)], job)
    has = words != NONE
    start, end = (row + inside * 6 // 10)[has], (called + after * 6 // 10)[has]
    table.add(start, end, HostKind.ANNOTATION, words[has], thread[has])


def _add_calls(table: _Table, program: Program, at: _Anchors, job: Job, correlation: Times) -> None:
    """Add the rows of launches, of waits for events and of synchronizations."""
    if job.is_cpu:
        return
    kinds = {Code.WAIT: HostKind.RUNTIME, Code.RECORD: HostKind.RUNTIME, Code.SYNC: HostKind.SYNC}
    ones = program.instructions
    which = _tiled([bool(one.call) for one in ones], job).astype(np.bool_)
    name = _tiled([table.name(one.call) if one.call else NONE for one in ones], job)
    kind = _tiled([kinds.get(one.code, HostKind.LAUNCH) for one in ones], job)
    thread = _tiled(program.column("thread"), job)
    columns = (at.call, at.called, kind, name, thread, correlation)
    table.add(*(column[which] for column in columns))


def _add_spans(table: _Table, program: Program, at: _Anchors, job: Job) -> None:
    """Add the rows that are open across instructions: steps, optimizer, annotations."""
    open_: list[int] = []
    n = len(program)
    for place, one in enumerate(program.instructions):
        if one.code == Code.OPEN:
            open_.append(place)
        elif one.code == Code.CLOSE:
            begun = program.instructions[opened := open_.pop()]
            places = np.arange(job.steps) * n
            numbers = range(job.steps_before, job.all_steps)
            is_step = begun.row == STEP_ROW
            name = np.array([table.name(f"{STEP_ROW}{k}" if is_step else begun.row) for k in numbers])
            thread = np.full(job.steps, begun.thread)
            table.add(at.row[places + opened], at.end[places + place], begun.kind, name, thread)


def _syncs(job: Job, program: Program, place: Times, at: _Anchors, rank: int) -> SyncRows:
    starts = {0: at.call}
    for one in program.instructions:
        if Code.COLLECTIVE <= one.code <= Code.BATCH:
            for call in calls_of(one, has_nccl_events=job.has_nccl_events):
                if call.number not in starts:
                    starts[call.number] = call.start_ns(at.row, at.inside, at.called, at.after)
    device = rank % job.layout.ranks_per_host
    return sync_rows(program, place, CORRELATIONS, starts, at.called, device, nccl=job.has_nccl_events)


def _device_rows(
    job: Job,
    program: Program,
    times: RankTimes,
    rank: int,
    clock: HostClock,
    table: _Table,
    collective: Times,
    begins: int,
) -> tuple[DeviceRows, tuple[tuple[int, ...], ...]]:
    """Return the work on the device that began after the profiler did.  On a CPU job it is rows of the host."""
    n, first = len(program), job.steps_before * len(program)
    drawn = generator(job, _STAMP, rank)
    off = round(drawn.normal(0, DEVICE_CLOCK_NS)) if not job.is_cpu and job.noise.stamp_ns else 0
    error = np.rint(drawn.normal(0, job.noise.stamp_ns, (2, job.all_steps * n))).astype(np.int64)
    ran = np.flatnonzero(times.device_start >= 0)
    start = clock.show(times.device_start[ran]) + error[0, ran] + off
    end = np.maximum(clock.show(times.device_end[ran]) + error[1, ran] + off, start)
    order = np.argsort(start, kind="stable")
    order = order[start[order] >= begins]
    ran, start, end = ran[order], start[order], end[order]
    ones, at = program.instructions, ran % n
    if job.is_cpu:
        kind, names = HostKind.COLLECTIVE_WORK, call_annotations(job, program, rank)
        exchanges = np.cumsum(program.is_launch) - 1
        words = np.array([table.name(name) for name in names], dtype=np.int64)
        table.add(start, end, kind, words[exchanges[at]], 1 + program.column("stream")[at], collective=collective[ran])
        ran = ran[:0]
        start, end, at = start[:0], end[:0], at[:0]
    grids: dict[tuple[int, ...], int] = {}
    grid = np.array([NONE if one.grid is None else grids.setdefault(one.grid, len(grids)) for one in ones])
    name = np.array([table.name(one.kernel) if one.kernel and not job.is_cpu else NONE for one in ones])
    launched = ran >= first
    launch_ns = np.full(len(ran), NONE, dtype=np.int64)
    launch_ns[launched] = _anchors(job, program, times, rank, clock).call[ran[launched] - first]
    device = 0 if job.is_cpu else rank % job.layout.ranks_per_host
    return DeviceRows(
        start_ns=start,
        end_ns=end,
        work=np.array([WORKS.index(one.work) for one in ones], dtype=np.uint8)[at],
        name=name[at].astype(np.int32),
        device=np.full(len(ran), device, dtype=np.int32),
        stream=program.column("stream")[at],
        correlation=ran * CORRELATIONS,
        launch_ns=launch_ns,
        collective=collective[ran].astype(np.int32),
        grid=grid[at].astype(np.int32),
    ), tuple(grids)
