"""Walks the critical path of a job backwards and charges every nanosecond of its wall time to one rank and cause.

From the last node, the walk follows the edge that bound each node, and unfolds it into the rows and host intervals
that it was condensed from.  The cursor only moves back: a row that began before its predecessor ended (clocks, time
stamps) is cut there, so the parts add up to the wall time exactly, in integers.

A share of the path is not blame: among healthy ranks that finish almost together, one has most of the path by chance.
`verdict` finds late ranks by equalizing.

Pure: a graph in, columns out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .causes import CauseCode
from .job_graph import JobGraph
from .rank_graph import EdgeKind, RankGraph
from .replay import play

__all__ = ["CriticalPath", "critical_path"]

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The parts of the path, the last first: they follow each other without gaps, from `wall_ns` back to zero.

    `rank` is a place in the list of ranks; `row` a row of that rank's events, NONE for host time; `name` indexes the
    names of its trace; `join` numbers collectives for time on the wire.
    """

    wall_ns: int
    rank: Index
    cause: NDArray[np.uint8]
    name: Index
    row: Index
    join: Index
    start_ns: Index
    end_ns: Index


class _Walk:
    """The parts so far, and a cursor that only moves back."""

    def __init__(self, wall_ns: int) -> None:
        self.cursor = wall_ns
        self._parts: list[NDArray[np.int64]] = []

    def add(self, rank: int, bounds: Index, cause: Index, name: Index, row: Index, join: Index) -> None:
        """Add the pieces between ascending `bounds` (n + 1), as far as they lie before the cursor and after zero."""
        cut = np.minimum.accumulate(np.concatenate(([self.cursor], np.clip(bounds[:-1], 0, None)[::-1])))
        start, end = cut[1:][::-1], cut[:-1][::-1]
        self.cursor = int(start[0]) if len(start) else self.cursor
        keep = end > start
        columns = np.stack((np.full(len(start), rank), cause, name, row, join, start, end))
        self._parts.append(columns[:, keep][:, ::-1])

    def finish(self, wall_ns: int) -> CriticalPath:
        columns = np.concatenate([np.empty((7, 0), dtype=np.int64), *self._parts], axis=1)
        rank, cause, name, row, join, start, end = columns
        return CriticalPath(wall_ns, rank, cause.astype(np.uint8), name, row, join, start, end)


def critical_path(graph: JobGraph) -> CriticalPath:
    """Return the critical path of the recorded run, from the last node's time back to the common beginning."""
    weights = graph.weights()
    times = play(graph, weights)
    node = int(times.argmax())
    wall = max(int(times[node]), 0)
    walk = _Walk(wall)
    targets = graph.target[graph.place]
    position = np.empty(graph.nodes, dtype=np.int64)
    position[graph.order] = np.arange(graph.nodes)
    placed = position[targets]
    begins = np.searchsorted(placed, np.arange(graph.nodes + 1))
    rank = _rank_of(graph, node)
    while node != 0 and walk.cursor > 0:
        some = graph.place[begins[position[node]] : begins[position[node] + 1]]
        edge = int(some[(times[graph.source[some]] + weights[some]).argmax()])
        source = int(graph.source[edge])
        rank = int(graph.rank[edge]) if graph.rank[edge] != NONE else _rank_of(graph, source, rank)
        _unfold(walk, graph, edge, rank if graph.kind[edge] != EdgeKind.LEAVE else _rank_of(graph, node, rank), times)
        node = source
    if walk.cursor > 0:
        walk.add(rank, np.array([0, walk.cursor]), *_one(CauseCode.UNKNOWN))
    return walk.finish(wall)


def _rank_of(graph: JobGraph, node: int, default: int = 0) -> int:
    """Return the place of the rank that owns a node; a collective's belongs to none."""
    if node == 0 or node >= graph.offset[-1]:
        return default
    return int(np.searchsorted(graph.offset, node, side="right")) - 1


def _one(cause: int, name: int = NONE, row: int = NONE, join: int = NONE) -> tuple[Index, Index, Index, Index]:
    return np.array([cause]), np.array([name]), np.array([row]), np.array([join])


def _unfold(walk: _Walk, graph: JobGraph, edge: int, place: int, times: Index) -> None:
    """Add the time between the two ends of an edge."""
    kind, ref = int(graph.kind[edge]), int(graph.ref[edge])
    begin, end = int(times[graph.source[edge]]), int(times[graph.target[edge]])
    if kind == EdgeKind.LEAVE:
        join = int(graph.joins.join[ref])
        row = int(graph.joins.row[ref])
        name = int(graph.ranks[place].events.rows.name[row])
        walk.add(place, np.array([begin, end]), *_one(CauseCode.LINK, name, row, join))
        return
    if kind == EdgeKind.ARRIVE:
        return
    rank = graph.ranks[place]
    if kind == EdgeKind.HOST:
        _host(walk, graph, rank, place, int(rank.host_begin[ref]), int(rank.host_begin[ref + 1]))
    elif kind == EdgeKind.SYNC:
        walk.add(place, np.array([begin, end]), *_one(CauseCode.HOST_BOUND))
    elif kind == EdgeKind.SOURCE and ref == NONE:
        walk.add(place, np.array([begin, end]), *_one(CauseCode.UNKNOWN))
    elif kind == EdgeKind.LAUNCH:
        _launched(walk, graph, rank, place, ref)
    else:
        seg = int(rank._seg_of[ref]) if kind == EdgeKind.EVENT else ref
        first = int(rank.seg_first[seg])
        lead = CauseCode.UNKNOWN if kind == EdgeKind.SOURCE else CauseCode.HOST_BOUND
        _rows(walk, graph, rank, place, seg, first, begin, lead)


def _rows(
    walk: _Walk, graph: JobGraph, rank: RankGraph, place: int, seg: int, first: int, begin: int, lead: CauseCode
) -> None:
    """Add the rows of a segment from `first` on, each with the gap before it; `begin` is what the first waited for."""
    rows, order = rank.events.rows, rank.order[first : int(rank.seg_last[seg]) + 1]
    start, end = rows.start_ns[order] - graph.base_ns, rows.end_ns[order] - graph.base_ns
    count = len(order)
    delay = rank.delay_ns[first : first + count]
    bounds = np.empty(3 * count + 1, dtype=np.int64)
    bounds[0] = begin
    bounds[1::3], bounds[2::3], bounds[3::3] = start - delay, start, end
    cause = np.empty(3 * count, dtype=np.int64)
    cause[0::3], cause[1::3] = CauseCode.HOST_BOUND, rank.delay_cause[first : first + count]
    cause[0], cause[2::3] = lead, rows.cause[order]
    name = np.full(3 * count, NONE)
    row = np.full(3 * count, NONE)
    name[2::3], row[2::3] = rows.name[order], order
    if rank.is_join[seg]:  # the edge that leaves the collective has its time
        bounds, cause, name, row = bounds[:-1], cause[:-1], name[:-1], row[:-1]
    walk.add(place, bounds, cause, name, row, np.full(len(cause), NONE))


def _launched(walk: _Walk, graph: JobGraph, rank: RankGraph, place: int, seg: int) -> None:
    """Add a segment that waited for its host: the rows since the binding launch, and the host up to that launch."""
    rows, lane = rank.events.rows, rank.events.host
    first, last = int(rank.seg_first[seg]), int(rank.seg_last[seg])
    launch = rows.launch[rank.order[first : last + 1]]
    lag = rank.lag_ns[first : last + 1]
    done = np.cumsum(rank.gap_ns[first : last + 1] + rank.weights.row_ns[first : last + 1])
    rest = done[-1] - done + rank.weights.row_ns[first : last + 1]
    ready = np.where(launch == NONE, np.iinfo(np.int64).min // 4, lane.time_ns[np.maximum(launch, 0)] + lag + rest)
    at = int(ready.argmax()) if not rank.is_join[seg] else 0
    point = int(launch[at])
    _rows(walk, graph, rank, place, seg, first + at, int(lane.time_ns[point]) - graph.base_ns, CauseCode.HOST_BOUND)
    _host(walk, graph, rank, place, int(rank.host_begin[rank.host_of_seg[seg]]), point)


def _host(walk: _Walk, graph: JobGraph, rank: RankGraph, place: int, begin: int, end: int) -> None:
    """Add the host's intervals between two points."""
    lane = rank.events.host
    if end <= begin:
        return
    cause = lane.cause[begin:end].astype(np.int64)
    cause[cause == CauseCode.BLOCKED] = CauseCode.UNKNOWN
    nothing = np.full(end - begin, NONE)
    walk.add(place, lane.time_ns[begin : end + 1] - graph.base_ns, cause, lane.name[begin:end], nothing, nothing)
