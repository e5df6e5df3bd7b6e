"""Aligns the clocks of the ranks' hosts, with the synchronizing collectives in the traces as bounds on each offset.

Ranks on one host share a clock.  Ranks on different hosts have clocks that NTP holds together to a millisecond or so,
and a wait of 200 us computed across them is noise.  But the trace itself holds better synchronization than NTP: no rank
can leave an all-reduce before the last one has entered it, because its data is in the result.

    rank a   ....[======]....        start_a <= end_b + x  and  start_b + x <= end_a
    rank b     [=====]               bound the offset x of clock b from both sides

Every such collective narrows the bounds; the median difference of the ends, which lie close together, is the estimate
inside them.  The distance that remains to the bounds is stated as the residual; lateness below it is charged to no rank
(`stragglers`).  Where bounds contradict each other (clocks that drift during the trace), the residual is how far the
ends still lie apart.  Broadcasts, gathers and sends bound nothing: the sender may be gone before the receiver comes.

Where no trace names its host, the data decides: clocks that no collective contradicts and whose ends agree are one.
Several hosts are connected along the path of least total residual (Dijkstra).
Pure: matched collectives in, offsets out.  Left out: drift; each rank has one offset.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import Trace, TraceWarning
from .collective_matching import Matched, wall_offset_ns
from .report import RankClock
from .sequence_alignment import OVERLAP_SLACK_NS

__all__ = ["Clocks", "align_clocks", "doubts_of", "together"]

_SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier"})
"""Operations that no rank can end before the last has begun: each needs data from all ranks."""

SAME_CLOCK_NS = 100_000
"""How well ends on one clock agree: NCCL's ranks leave a ring one after the other."""

CONTRADICTIONS_RATIO_MAX = 0.01
"""The ratio of collectives that may contradict a common clock: rows that the trace cut or stamped wrongly."""

WALL_CLOCKS_NS = 1_000_000
"""How well NTP holds hosts together at best."""

EPOCH_NS_MIN = 10**18
"""Later times are since 1970 (this one is September 2001); earlier ones are since some boot."""

_Node = str | int
"""A clock: a host's name, or the index of a trace that names none."""


class _Bounds(NamedTuple):
    """Bounds on the second clock's offset by each collective of two ranks: least, most, and the ends' distance."""

    least: NDArray[np.int64]
    most: NDArray[np.int64]
    ends: NDArray[np.int64]


class _Edge(NamedTuple):
    """The estimate for two clocks from their collectives: add `offset_ns` to the second's times."""

    offset_ns: int
    residual_ns: int
    is_one_clock: bool


@dataclass(frozen=True, slots=True)
class Clocks:
    """One clock for each trace, in their order; `offsets_ns` takes a file's times to the axis of the first trace.

    Clocks with the same `island` are aligned to within `doubt_ns`; between islands there is only the wall clock.
    """

    clocks: list[RankClock]
    offsets_ns: NDArray[np.int64]
    doubt_ns: NDArray[np.int64]
    island: NDArray[np.int64]
    warnings: list[TraceWarning]


def align_clocks(traces: Sequence[Trace], groups: Sequence[Matched]) -> Clocks:
    """Return the alignment of each trace's clock with the first one's.  Every trace has a rank."""
    walls = np.array([wall_offset_ns(trace) for trace in traces], dtype=np.int64)
    nodes = [trace.host if trace.host is not None else place for place, trace in enumerate(traces)]
    pairs = _observe(groups, walls)
    edges = _edges(pairs, nodes)
    contradicted = _contradictions(pairs, nodes)
    reached: dict[_Node, tuple[int, _Edge]] = {}
    clocks, islands, doubts = [], [], []
    for place, (trace, node) in enumerate(zip(traces, nodes, strict=True)):
        if node not in reached:
            reached |= {each: (place, edge) for each, edge in _reach(node, edges).items()}
        island, (offset, residual, is_one_clock) = reached[node]
        residual += contradicted.get(place, 0)
        islands.append(island)
        doubts.append(0 if is_one_clock else residual)
        if island == 0:
            method = "same_host" if is_one_clock else "collectives"
        else:
            method = "wall_clock" if _is_on_epoch(trace) and _is_on_epoch(traces[0]) else "none"
        assert trace.rank is not None
        clock = RankClock(
            rank=trace.rank,
            host=trace.host,
            offset_ns=offset + int(walls[place] - walls[0]),
            residual_ns=residual if island == 0 else None,
            method=method,
        )
        clocks.append(clock)
    offsets = np.array([clock.offset_ns for clock in clocks], dtype=np.int64)
    return Clocks(clocks, offsets, np.array(doubts, np.int64), np.array(islands, np.int64), _warnings(clocks))


def doubts_of(group: Matched, clocks: Clocks) -> NDArray[np.int64]:
    """Return for each rank of `group` the lateness below which its clock says nothing.

    On a shared clock that is zero: there the residual is how well the data could have told two clocks apart, and not
    an error of the clock.
    """
    places = list(group.traces)
    if len(set(clocks.island[places].tolist())) == 1:
        return clocks.doubt_ns[places]
    is_known = all(clocks.clocks[place].method != "none" for place in places)
    return np.full(len(places), WALL_CLOCKS_NS if is_known else np.iinfo(np.int64).max, dtype=np.int64)


def together(group: Matched, clocks: Clocks) -> NDArray[np.bool_]:
    """Return (n): whether all ranks of each collective were in it at one instant, as far as the clocks can tell."""
    offsets = clocks.offsets_ns[list(group.traces)]
    residuals = [clocks.clocks[place].residual_ns or 0 for place in group.traces]
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    last = np.where(group.has, group.start_ns + offsets, least).max(axis=1, initial=least)
    first = np.where(group.has, group.end_ns + offsets, most).min(axis=1, initial=most)
    together: NDArray[np.bool_] = last <= first + OVERLAP_SLACK_NS + max(residuals, default=0)
    return together


def _observe(groups: Sequence[Matched], walls: NDArray[np.int64]) -> dict[tuple[int, int], _Bounds]:
    """Return for pairs of traces, by index, the bounds on the second's clock from the collectives that both hold."""
    found: dict[tuple[int, int], list[_Bounds]] = {}
    for group in groups:
        binds = np.array([meta.operation in _SYNCHRONIZING for meta in group.collectives], dtype=np.bool_)
        start, end = (times + walls[list(group.traces)] for times in (group.start_ns, group.end_ns))
        for column in range(1, len(group.traces)):
            both = binds & group.has[:, 0] & group.has[:, column]
            if both.any():
                (s, e), (t, f) = ((start[both, c], end[both, c]) for c in (0, column))
                pair = (group.traces[0], group.traces[column])
                found.setdefault(pair, []).append(_Bounds(s - f, e - t, e - f))
    return {pair: _joined(bounds) for pair, bounds in found.items()}


def _joined(bounds: Sequence[_Bounds]) -> _Bounds:
    return _Bounds(*(np.concatenate(column) for column in zip(*bounds, strict=True)))


def _edges(pairs: Mapping[tuple[int, int], _Bounds], nodes: Sequence[_Node]) -> dict[tuple[_Node, _Node], _Edge]:
    """Return the estimates between clocks: ranks of one named host have one clock, and their bounds are joined."""
    found: dict[tuple[_Node, _Node], list[_Bounds]] = {}
    for (a, b), bounds in pairs.items():
        here, there = nodes[a], nodes[b]
        if (there, here) in found:
            here, there, bounds = there, here, _Bounds(-bounds.most, -bounds.least, -bounds.ends)
        if here != there:
            found.setdefault((here, there), []).append(bounds)
    return {
        pair: _estimate(_joined(bounds), may_be_one=not all(isinstance(node, str) for node in pair))
        for pair, bounds in found.items()
    }


def _estimate(bounds: _Bounds, *, may_be_one: bool) -> _Edge:
    """Return the offset of the second clock of a pair, and how far the truth may lie from it."""
    least, most = int(bounds.least.max()), int(bounds.most.min())
    middle = int(np.median(bounds.ends))
    spread = int(np.median(np.abs(bounds.ends - middle)))
    against = (bounds.least > OVERLAP_SLACK_NS) | (bounds.most < -OVERLAP_SLACK_NS)
    agree = against.mean() <= CONTRADICTIONS_RATIO_MAX and abs(middle) <= max(SAME_CLOCK_NS, 3 * spread)
    if may_be_one and agree:
        return _Edge(0, max(abs(least), abs(most)) if least <= 0 <= most else max(least, -most), True)
    if least <= most:
        middle = min(max(middle, least), most)
        return _Edge(middle, max(most - middle, middle - least), False)
    return _Edge(middle, int(np.abs(bounds.ends - middle).max()), False)


def _reach(first: _Node, edges: Mapping[tuple[_Node, _Node], _Edge]) -> dict[_Node, _Edge]:
    """Return each clock that collectives connect with the first, along the path of least residual (Dijkstra)."""
    steps: dict[_Node, list[tuple[_Node, _Edge]]] = {}
    for (a, b), edge in edges.items():
        steps.setdefault(a, []).append((b, edge))
        steps.setdefault(b, []).append((a, edge._replace(offset_ns=-edge.offset_ns)))
    reached: dict[_Node, _Edge] = {}
    ahead = [(0, 0, first, _Edge(0, 0, True))]  # the second is a tie-breaker: nodes do not compare
    order = itertools.count(1)
    while ahead:
        _, _, node, so_far = heapq.heappop(ahead)
        if node in reached:
            continue
        reached[node] = so_far
        for there, edge in steps.get(node, ()):
            if there not in reached:
                beyond = _Edge(
                    so_far.offset_ns + edge.offset_ns,
                    so_far.residual_ns + edge.residual_ns,
                    so_far.is_one_clock and edge.is_one_clock,
                )
                heapq.heappush(ahead, (beyond.residual_ns, next(order), there, beyond))
    return reached


def _contradictions(pairs: Mapping[tuple[int, int], _Bounds], nodes: Sequence[_Node]) -> dict[int, int]:
    """Return by how much collectives contradict a trace's sharing the clock of the first rank of its host."""
    found: dict[int, int] = {}
    for (a, b), bounds in pairs.items():
        if nodes[a] == nodes[b]:
            found[b] = max(found.get(b, 0), int(bounds.least.max()), -int(bounds.most.min()))
    return found


def _is_on_epoch(trace: Trace) -> bool:
    return trace.start_ns is not None and trace.start_ns + wall_offset_ns(trace) > EPOCH_NS_MIN


def _warnings(clocks: Sequence[RankClock]) -> list[TraceWarning]:
    warnings = []
    if apart := [clock.rank for clock in clocks if clock.method in ("none", "wall_clock")]:
        message = f"no collective lays the clocks of ranks {apart} on the others'; their waits are not comparable"
        warnings.append(TraceWarning("clocks_not_aligned", message, len(apart)))
    if differ := [
        c.rank for c in clocks if c.method == "same_host" and c.host and (c.residual_ns or 0) > SAME_CLOCK_NS
    ]:
        message = f"ranks {differ} name the host of others, and their clocks contradict that"
        warnings.append(TraceWarning("host_clocks_differ", message, len(differ)))
    return warnings
