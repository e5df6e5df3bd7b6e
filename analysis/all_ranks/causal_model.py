"""Builds the causal model of a job from its traces and answers from it: path, replay error, verdict, what-if.

`JobInput` has traces, clocks, and the rows of each collective.  The window is the steps that all traces mark, or
everything if they mark none; then a "step" is what all ranks repeat, or ends with a collective of the largest group, so
that there are samples to test.

Pure: columns in, a `JobModel` out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..align.clock_fit import RankClockCorrection
from ..graph.critical_path import CriticalPath, critical_path
from ..graph.job_graph import JobGraph, Joins, join_ranks, join_steps
from ..graph.launchless_waits import repeated_program
from ..graph.rank_events import RankEvents, rank_events
from ..graph.rank_graph import RankGraph, condense
from ..graph.replay import ReplayError, elastic, fixed_lag_error
from ..graph.waits import find_waits
from ..shelf import Shelf
from ..trace.columns import NONE, DeviceRows, HostKind, HostRows, Trace
from ..verdict.findings import JobVerdict
from ..verdict.links import untold_joins
from ..verdict.peers import Atoms, atoms_of
from ..verdict.roles import roles_of
from ..verdict.verdict import judge

__all__ = ["JobInput", "JobModel", "build_model"]

Index = NDArray[np.int64]

UNITS_MAX = 32
"""The most parts of a run without step marks, for tests over steps."""


@dataclass(frozen=True, slots=True)
class JobInput:
    """Traces with their clocks, and collectives: `joins.row` counts a trace's device rows, then its host rows."""

    traces: Sequence[Trace]
    clocks: Sequence[RankClockCorrection]
    joins: Joins
    hosts: Sequence[Sequence[int]] = ()
    """The places on each host, if the traces name their hosts."""
    shelf: Shelf = field(default_factory=Shelf)


@dataclass(frozen=True)
class JobModel:
    """The model of a job, and what follows from it.  Ranks are places in the list of traces.

    `steps` are the numbers of the steps in the window, empty where no steps are marked; `bounds` the host points at
    which they begin, and last where the last ends, for each rank.  `graph` is the run as it was, `played` what
    scenarios are played in (`replay.elastic`).
    """

    graph: JobGraph
    played: JobGraph
    joins: Joins
    kept_joins: Index
    steps: list[int]
    bounds: list[Index]
    units: int
    atoms: Sequence[Atoms]
    roles: list[list[int]]
    path: CriticalPath
    error: ReplayError
    judgement: JobVerdict
    join_step: Index
    """The step of each collective, or the unit where no steps are marked; NONE before the first."""
    untold_joins: NDArray[np.bool_]
    """Which collectives no other group shows how fast they can be."""

    @property
    def is_elastic(self) -> bool:
        """Whether scenarios take delays that nothing explains for waits (`replay.elastic`)."""
        return self.played is not self.graph

    @property
    def wall_ns(self) -> int:
        """How long the job took, over the window."""
        return self.path.wall_ns


def build_model(job: JobInput) -> JobModel | None:
    """Return the model; None if the traces contain nothing to model."""
    steps, spans = _common_steps(job.traces)
    ends = [None] * len(job.traces) if spans is None else [int(times[-1]) for times in spans]
    events = job.shelf.keep(
        rank_events(_cut(trace, end).trace, clock.offset_ns, clock.drift, clock.middle_ns)
        for trace, end, clock in zip(job.traces, ends, job.clocks, strict=True)
    )
    joins, kept = _kept(job.joins, job.traces, ends)
    firsts = [first for each in events if (first := _first(each)) is not None]
    if not firsts:
        return None
    starts = [
        np.empty(0, dtype=np.int64) if spans is None else clock.common(spans[place])
        for place, clock in enumerate(job.clocks)
    ]
    base = min(firsts) if spans is None else min(int(times[0]) for times in starts)
    graphs = job.shelf.keep(
        _condensed(each, np.unique(joins.row[mine]), base)
        for each, mine in zip(events, joins.by_rank(len(events)), strict=True)
    )
    graph = join_ranks(graphs, joins, base)
    bounds = [
        np.searchsorted(each.host.time_ns, times) if len(times) else times
        for each, times in zip(events, starts, strict=True)
    ]
    bounds = [
        np.minimum(points, max(len(each.host.time_ns) - 1, 0)) for points, each in zip(bounds, events, strict=True)
    ]
    begins = [times[:-1] for times in starts] if spans is not None else _repeats(graph) or _units(graph, base)
    units = max((len(each) for each in begins), default=0)
    atoms = atoms_of(graphs, begins, units, job.shelf)
    roles = roles_of(joins, len(graphs))
    error = fixed_lag_error(graph, bounds)
    played = elastic(graph)
    of_joins = join_steps(graph, begins)
    judgement = judge(played, atoms, roles, bounds, units, error.ratio, of_joins, job.shelf, job.hosts)
    return JobModel(
        graph, played, joins, kept, steps, bounds, units, atoms, roles, critical_path(graph), error, judgement,
        of_joins, untold_joins(graph, job.hosts),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Cut:
    """A trace without rows begun after its window, and the new index of each row (NONE: left out)."""

    trace: Trace
    row_of: Index


def _common_steps(traces: Sequence[Trace]) -> tuple[list[int], list[Index] | None]:
    """Return the numbers of the steps that all traces mark, their starts on each, and the end of the last."""
    marks = []
    for trace in traces:
        mine: dict[int, tuple[int, int]] = {}
        for mark in trace.steps:
            if mark.end_ns > mark.start_ns:
                mine.setdefault(mark.number, (mark.start_ns, mark.end_ns))
        marks.append(mine)
    common = set(marks[0]).intersection(*marks[1:]) if marks else set()
    numbers = sorted(common)
    while numbers and any(list(mine).index(numbers[-1]) < len(numbers) - 1 for mine in marks):
        numbers.pop()
    if not numbers:
        return [], None
    spans = []
    for mine in marks:
        starts = [mine[number][0] for number in numbers]
        if starts != sorted(starts):
            return [], None
        spans.append(np.array([*starts, max(mine[numbers[-1]][1], starts[-1])], dtype=np.int64))
    return numbers, spans


def _cut(trace: Trace, end_ns: int | None) -> _Cut:
    device, host = trace.device, trace.host_rows
    group = host.kind == HostKind.COLLECTIVE_WORK
    issued = np.where(device.launch_ns == NONE, device.start_ns, device.launch_ns)
    keep_device = np.ones(len(issued), dtype=np.bool_) if end_ns is None else issued < end_ns
    keep_host = np.ones(len(host.start_ns), dtype=np.bool_) if end_ns is None else host.start_ns <= end_ns
    row_of = np.full(len(issued) + len(host.start_ns), NONE)
    row_of[np.flatnonzero(keep_device)] = np.arange(int(keep_device.sum()))
    kept_group = np.flatnonzero(group & keep_host)
    row_of[len(issued) + kept_group] = int(keep_device.sum()) + np.arange(len(kept_group))
    is_inside = end_ns is None or bool((host.end_ns <= end_ns).all())
    if is_inside and keep_device.all() and keep_host.all():
        return _Cut(trace, row_of)
    rows = {name: getattr(device, name)[keep_device] for name in DeviceRows.__dataclass_fields__}
    calls = {name: getattr(host, name)[keep_host] for name in HostRows.__dataclass_fields__}
    if end_ns is not None:
        calls["end_ns"] = np.where(
            calls["kind"] == HostKind.COLLECTIVE_WORK, calls["end_ns"], np.minimum(calls["end_ns"], end_ns)
        )
    return _Cut(replace(trace, device=DeviceRows(**rows), host_rows=HostRows(**calls)), row_of)


def _kept(joins: Joins, traces: Sequence[Trace], ends: Sequence[int | None]) -> tuple[Joins, Index]:
    """Return the collectives with at least two members in the window, and their former numbers."""
    row = np.full(len(joins.row), NONE)
    for mine, trace, end in zip(joins.by_rank(len(traces)), traces, ends, strict=True):
        row[mine] = _cut(trace, end).row_of[joins.row[mine]]
    # A row can be in one collective twice only by mistake.
    _, first = np.unique(np.stack((joins.join, joins.rank, row)), axis=1, return_index=True)
    once = np.zeros(len(row), dtype=np.bool_)
    once[first] = True
    known = (row != NONE) & once
    counts = np.bincount(joins.join[known], minlength=joins.count)
    kept = np.flatnonzero(counts >= 2)
    number = np.full(joins.count, NONE)
    number[kept] = np.arange(len(kept))
    known &= number[joins.join] != NONE
    return Joins(
        len(kept), number[joins.join[known]], joins.rank[known], row[known],
        joins.label[kept], joins.group[kept], joins.is_pair[kept], joins.binds[kept], joins.receives[known],
        joins.bytes[kept],
    ), kept  # fmt: skip


def _first(events: RankEvents) -> int | None:
    times = [int(part.min()) for part in (events.host.time_ns, events.rows.start_ns) if len(part)]
    return min(times) if times else None


def _condensed(events: RankEvents, join_rows: Index, base: int) -> RankGraph:
    events, waits = find_waits(events)
    return condense(events, waits, join_rows, base)


def _repeats(graph: JobGraph) -> list[Index] | None:
    """For each rank, return when each repeat of its program begins; None unless all ranks repeat one equally often.

    The time before the first whole repeat, and after the last, counts as a repeat if it is half of one, else as a part
    of its neighbour.
    """
    programs = [repeated_program(rank.events) for rank in graph.ranks]
    found = [
        rank.events.rows.start_ns[program.rows[program.first :: program.length]]
        for rank, program in zip(graph.ranks, programs, strict=True)
        if program is not None
    ]
    if len(found) < len(programs):
        return None
    length_ns = np.median(np.diff(found[0])) if len(found[0]) > 1 else 0.0
    begin = max(int(times[0]) for times in found)
    found = [times[times > begin - length_ns / 2] for times in found]
    count = min(map(len, found))
    if count < 2:
        return None
    one = programs[0]
    assert one is not None
    after = (len(one.rows) - one.first) % one.length or one.length
    kept = slice(int(2 * one.first < one.length), count - int(2 * after < one.length))
    return [np.concatenate(([np.iinfo(np.int64).min // 4], times[kept])) for times in found]


def _units(graph: JobGraph, base: int) -> list[Index]:
    """For each rank, return when its parts begin: at collectives of the largest group, or one part without any."""
    joins = graph.joins
    none = [np.array([np.iinfo(np.int64).min // 4]) for _ in graph.ranks]
    if joins.count == 0:
        return none
    members = np.bincount(joins.join, minlength=joins.count)
    whole = np.flatnonzero(members == len(graph.ranks))
    if len(whole) == 0:
        return none
    whole = whole[np.argsort(graph.arrive_ns[whole], kind="stable")]
    whole = whole[:: -(-len(whole) // UNITS_MAX)]
    found = []
    for place, (rank, mine) in enumerate(zip(graph.ranks, joins.by_rank(len(graph.ranks)), strict=True)):
        row = np.full(joins.count, NONE)
        row[joins.join[mine]] = joins.row[mine]
        starts = rank.events.rows.start_ns[row[whole]]
        found.append(np.concatenate((none[place], np.maximum.accumulate(starts)))[: len(starts)])
    return found
