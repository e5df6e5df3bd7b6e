"""Joins the ranks' graphs at their collectives, and orders all nodes for replay.

A collective is one node that all its ranks arrive at and leave: no rank leaves before the last arrives.  The time from
the last arrival to the first end is on the wire; how much later than the first a rank leaves is its own scatter.  A
send and its receive are a collective of two.

A wrong pairing can make a cycle: a rank would wait for itself.  The collective that closes it is reported and split
(each rank then takes as long as recorded), so the rest of the graph still gives answers.

Pure: columns in, arrays out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .rank_graph import EdgeKind, RankGraph, RankWeights

__all__ = ["JobGraph", "Joins", "ReplayScenario", "join_ranks", "join_steps"]

Index = NDArray[np.int64]

CYCLES_MAX = 100
"""The most cycles that are broken one by one; after that, every collective left in a cycle is split."""

EARLY_RATIO_MIN = 0.1
"""A rank that ends before the last arrival by more than this share of its duration did not wait for it.  One that
waited ends as the last arrives, except for clock errors."""

LEAST = np.iinfo(np.int64).min // 2

_RANK_KINDS = (
    EdgeKind.SOURCE, EdgeKind.HOST, EdgeKind.SYNC, EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.LAUNCH,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Joins:
    """n collectives: member i is row `row[i]` of rank `rank[i]` (by place) in collective `join[i]`.

    `label` numbers kinds of collectives that can be compared (operation, size, group size); `group` process groups.
    `bytes` is the size, NONE where it is not known.  `is_pair` are sends with their receives.  If `binds` is false
    (a broadcast, a small send) a rank may leave before the last arrives, except a member that `receives` (n members):
    nothing arrives before it is sent.
    """

    count: int
    join: Index
    rank: Index
    row: Index
    label: Index
    group: Index
    is_pair: NDArray[np.bool_]
    binds: NDArray[np.bool_]
    receives: NDArray[np.bool_]
    bytes: Index

    def by_rank(self, ranks: int) -> list[Index]:
        """Return which members are of each rank, in their order."""
        order = np.argsort(self.rank, kind="stable")
        return np.split(order, np.cumsum(np.bincount(self.rank, minlength=ranks))[:-1])[:ranks]


@dataclass(frozen=True, slots=True)
class ReplayScenario:
    """The changes of a scenario: durations of some ranks (by place), and the wire time of collectives.

    Durations are computed from the rank's graph whenever they are needed: those of all ranks take more memory than the
    graph.  `scatter_ratio` is how much shorter the time becomes by which ranks leave a collective after the first.
    """

    ranks: Mapping[int, Callable[[RankGraph], RankWeights]] = field(default_factory=dict)
    wire_ns: Index | None = None
    scatter_ratio: float = 1.0


@dataclass(frozen=True)
class JobGraph:
    """The graph of all ranks.  Node 0 is the common beginning, at zero; times of nodes are nanoseconds after `base_ns`.

    Edges are in replay order: by level of their target.  `slices` locates each rank's edges of each kind; `level_edges`
    and `level_nodes` bound the levels.  `new` maps nodes to places in the order.
    """

    ranks: Sequence[RankGraph]
    joins: Joins
    base_ns: int
    offset: Index
    source: Index
    target: Index
    kind: NDArray[np.uint8]
    rank: Index
    ref: Index
    place: Index
    slices: dict[tuple[int, int], slice]
    leave: slice
    leave_join: Index
    leave_base_ns: Index
    arrive_ns: Index
    wire_ns: Index
    order: Index
    node_level_end: Index
    edge_level_end: Index
    broken: tuple[int, ...] = ()
    """Collectives that closed a cycle and were split."""

    def weights(self, scenario: ReplayScenario | None = None, *, fixed: bool = False) -> Index:
        """Return the weights of all edges, in the order of their creation."""
        found = self._whole(fixed=True) if fixed else self._recorded
        if scenario is None:
            return found
        found = found.copy()
        for place, change in scenario.ranks.items():
            rank = self.ranks[place]
            self._fill(found, place, rank, change(rank), fixed=fixed)
        if scenario.wire_ns is not None and len(self.leave_join):
            is_in = self.leave_join != NONE
            more = np.where(is_in, (scenario.wire_ns - self.wire_ns)[np.maximum(self.leave_join, 0)], 0)
            found[self.leave] += more
        if scenario.scatter_ratio != 1.0 and len(self.leave_join):
            is_in = self.leave_join != NONE
            scatter = np.where(is_in, self.leave_base_ns - self.wire_ns[np.maximum(self.leave_join, 0)], 0)
            found[self.leave] += np.rint(np.maximum(scatter, 0) * (scenario.scatter_ratio - 1)).astype(np.int64)
        return found

    def _fill(self, found: Index, place: int, rank: RankGraph, weights: RankWeights, *, fixed: bool) -> None:
        for kind, values in rank.edge_weights(weights, fixed=fixed).items():
            found[self.slices[place, kind]] = values

    def _whole(self, *, fixed: bool) -> Index:
        found = np.zeros(len(self.source), dtype=np.int64)
        for place, rank in enumerate(self.ranks):
            self._fill(found, place, rank, rank.weights, fixed=fixed)
        found[self.leave] = self.leave_base_ns
        return found

    @cached_property
    def _recorded(self) -> Index:
        return self._whole(fixed=False)

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.order)


def join_ranks(ranks: Sequence[RankGraph], joins: Joins, base_ns: int) -> JobGraph:
    """Return the graph of the job; the rows of `joins` were condensed as collectives."""
    offset = 1 + np.concatenate(([0], np.cumsum([graph.nodes for graph in ranks])))
    parts: list[tuple[Index, Index, int, int, Index]] = []
    for place, graph in enumerate(ranks):
        for kind in _RANK_KINDS:
            source, target, ref = graph.edges[kind]
            moved = np.where(source == NONE, 0, source + offset[place])
            parts.append((moved, target + offset[place], kind, place, ref))
    arrive, end, start_ns, end_ns = _members(ranks, joins, offset)
    join_node = offset[-1] + joins.join
    parts.append((arrive, join_node, EdgeKind.ARRIVE, NONE, np.arange(len(arrive))))
    parts.append((join_node, end, EdgeKind.LEAVE, NONE, np.arange(len(arrive))))
    slices, at = {}, 0
    for source, _, kind, place, _ in parts:
        slices[place, kind] = slice(at, at + len(source))
        at += len(source)
    last, least = np.full(joins.count, LEAST), np.full(joins.count, -LEAST)
    np.maximum.at(last, joins.join, start_ns)
    ahead = last[joins.join] - end_ns
    may_leave = ~joins.binds[joins.join] & ~joins.receives
    leaves_early = may_leave & (ahead > np.maximum(EARLY_RATIO_MIN * (end_ns - start_ns), 0))
    # A row in several collectives (sends and receives in one kernel) ends with the last that begins.
    latest = np.full(int(offset[-1]), LEAST)
    np.maximum.at(latest, end, last[joins.join])
    leave_ns = end_ns - latest[end]
    stays = np.flatnonzero(~leaves_early)
    np.minimum.at(least, joins.join[stays], leave_ns[stays])
    wire = np.maximum(least, 0)
    source = np.concatenate([part[0] for part in parts])
    target = np.concatenate([part[1] for part in parts])
    nodes = int(offset[-1]) + joins.count
    leave = slices[NONE, EdgeKind.LEAVE]
    leave_join = joins.join.copy()
    apart = _Apart(arrive, leave, joins, leave_join, leave_ns, end_ns - start_ns)
    apart.take(np.flatnonzero(leaves_early), source)
    order, level, broken = _ordered(source, target, nodes, apart)
    position = np.empty(nodes, dtype=np.int64)
    position[order] = np.arange(nodes)
    played = np.argsort(position[target], kind="stable")
    levels = np.arange(int(level.max(initial=0)) + 1)
    return JobGraph(
        ranks=ranks, joins=joins, base_ns=base_ns, offset=offset, source=source, target=target,
        kind=np.concatenate([np.full(len(part[0]), part[2], dtype=np.uint8) for part in parts]),
        rank=np.concatenate([np.full(len(part[0]), part[3], dtype=np.int64) for part in parts]),
        ref=np.concatenate([part[4] for part in parts]),
        place=played, slices=slices, leave=leave, leave_join=leave_join, leave_base_ns=leave_ns,
        arrive_ns=last, wire_ns=wire, order=order,
        node_level_end=np.searchsorted(level[order], levels, side="right"),
        edge_level_end=np.searchsorted(level[target[played]], levels, side="right"),
        broken=broken,
    )  # fmt: skip


def join_steps(graph: JobGraph, step_starts: Sequence[Index]) -> Index:
    """Return the step in which the last rank issued each collective; NONE before the first step.

    `step_starts` are when each step began on each rank, on the common clock.
    """
    joins = graph.joins
    found = np.full(joins.count, NONE)
    for rank, starts, mine in zip(graph.ranks, step_starts, joins.by_rank(len(graph.ranks)), strict=True):
        rows, time = rank.events.rows, rank.events.host.time_ns
        at = rows.launch[joins.row[mine]]
        issued = np.where(at == NONE, rows.start_ns[joins.row[mine]], time[np.maximum(at, 0)] if len(time) else 0)
        np.maximum.at(found, joins.join[mine], np.searchsorted(starts, issued, side="right") - 1)
    return found


def _members(ranks: Sequence[RankGraph], joins: Joins, offset: Index) -> tuple[Index, Index, Index, Index]:
    """For each member, return its arrival node, its end node, and its recorded start and end."""
    arrive, end, start_ns, end_ns = (np.zeros(len(joins.join), dtype=np.int64) for _ in range(4))
    for place, (graph, mine) in enumerate(zip(ranks, joins.by_rank(len(ranks)), strict=True)):
        seg = graph.seg_of_rows()[joins.row[mine]]
        arrive[mine] = graph.arrive[seg] + offset[place]
        end[mine] = graph.seg_end(seg) + offset[place]
        rows = graph.events.rows
        start_ns[mine], end_ns[mine] = rows.start_ns[joins.row[mine]], rows.end_ns[joins.row[mine]]
    return arrive, end, start_ns, end_ns


@dataclass(frozen=True, slots=True)
class _Apart:
    """The data needed to split a collective: its members' edges and how long each was in it."""

    arrive: Index
    leave: slice
    joins: Joins
    leave_join: Index
    leave_ns: Index
    own_ns: Index

    def take(self, members: Index, source: Index) -> None:
        """Let these members leave as long after their own arrival as recorded, without the others."""
        source[self.leave.start + members] = self.arrive[members]
        self.leave_join[members] = NONE
        self.leave_ns[members] = self.own_ns[members]


def _ordered(source: Index, target: Index, nodes: int, apart: _Apart) -> tuple[Index, Index, tuple[int, ...]]:
    """Return the nodes by level (the most edges from a beginning), each node's level, and the split collectives."""
    broken: list[int] = []
    joins_at = nodes - apart.joins.count
    while True:
        level, left = _levels(source, target, nodes)
        if not left.any():
            return np.argsort(level, kind="stable"), level, tuple(broken)
        in_cycle = _cycle(source, target, left)
        stuck = [node - joins_at for node in in_cycle if node >= joins_at]
        is_hopeless = len(broken) >= CYCLES_MAX or not stuck
        stuck = np.flatnonzero(left[joins_at:]).tolist() if is_hopeless else stuck[:1]
        if not stuck:  # a cycle within one rank: rows that overlap on a stream; its nodes keep the order of numbers
            level[left] = int(level.max()) + 1 + np.arange(int(left.sum()))
            return np.argsort(level, kind="stable"), level, tuple(broken)
        for join in stuck:
            apart.take(np.flatnonzero(apart.joins.join == join), source)
        broken += stuck


def _levels(source: Index, target: Index, nodes: int) -> tuple[Index, NDArray[np.bool_]]:
    """Return the level of each node by Kahn's algorithm, and which nodes were not reached because of a cycle."""
    order = np.argsort(source, kind="stable")
    begins = np.searchsorted(source[order], np.arange(nodes + 1))
    targets = target[order]
    missing = np.bincount(target, minlength=nodes)
    level = np.zeros(nodes, dtype=np.int64)
    ready, depth, done = np.flatnonzero(missing == 0), 0, 0
    while len(ready):
        level[ready] = depth
        done += len(ready)
        counts = begins[ready + 1] - begins[ready]
        total = int(counts.sum())
        if total == 0:
            break
        within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        reached = targets[np.repeat(begins[ready], counts) + within]
        np.subtract.at(missing, reached, 1)
        reached = reached[missing[reached] == 0]
        ready, depth = np.unique(reached), depth + 1
    return level, missing > 0


def _cycle(source: Index, target: Index, left: NDArray[np.bool_]) -> list[int]:
    """Return the nodes of one cycle among those that are left."""
    inside = np.flatnonzero(left[source] & left[target])
    before = dict(zip(target[inside].tolist(), source[inside].tolist(), strict=True))
    node: int | None = next(iter(before), None)
    seen: dict[int, int] = {}
    while node is not None and node not in seen:
        seen[node] = len(seen)
        node = before.get(node)
    if node is None:
        return []
    return [each for each, at in seen.items() if at >= seen[node]]
