"""Condenses one rank's columns into nodes and edges: only points where something waits become nodes.

Between two waits a stream is max-plus linear.  Its rows i = 1..n run one after the other, each no earlier than its own
launch, so the end of the last one is

    end = max(stream_in + A, host_in + B)      A = sum of gaps and durations
                                               B = max over i of (launch offset i + lag i + rest of the chain from i)

which is exact.  The host lane is cut where it waits for a row; between two cuts it is a sum.  An edge that bound keeps
its recorded delay, so a replay of unchanged durations gives the recorded times.

Pure: columns in, arrays out.  Left out: waits between ranks (`job_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE
from .causes import CauseCode
from .device_waits import UNEXPLAINED_NS
from .rank_events import RankEvents
from .waits import Waits

__all__ = ["BLOCKED_OWN_NS", "EdgeKind", "Lags", "RankGraph", "RankWeights", "condense"]

Index = NDArray[np.int64]

BLOCKED_OWN_NS = 3_000
"""The duration of a blocking call that has nothing to wait for."""

SYNC_LAG_NS = 5_000
"""A synchronization returns 3 to 8 us after the device has finished; assumed where it did not block."""

LAG_QUANTILE = 0.05
"""This quantile of the lags of binding edges is the least that the hardware needs, almost free of other delays."""

KNOWN_DELAYS = (CauseCode.DATA_WAIT, CauseCode.OPTIMIZER_HOST, CauseCode.CHECKPOINT, CauseCode.GC)

NEVER = np.iinfo(np.int64).min // 4


class EdgeKind:
    """Kinds of edges; columns named `kind` hold these."""

    SOURCE, HOST, SYNC, STREAM, EVENT, LAUNCH, ARRIVE, LEAVE = range(8)


@dataclass(frozen=True, slots=True)
class Lags:
    """The least time between two rows of a stream, a launch and its row, and an event and its waiter."""

    stream_ns: int = 1_000
    launch_ns: int = 4_000
    event_ns: int = 1_500


@dataclass(frozen=True, slots=True)
class RankWeights:
    """The durations that a replay may change: of rows and of their unexplained delays, and of host intervals."""

    row_ns: Index
    delay_ns: Index
    host_ns: Index


@dataclass(frozen=True)
class RankGraph:
    """Nodes and edges of one rank.

    Nodes are first the starts of host segments and the end of the lane, then the ends of row segments, then the
    arrivals of segments that are collectives.  Row columns are in stream order (`order` has the indices into
    `events.rows`).  `delay_ns` is the part of a start that no edge explains, `delay_cause` its cause; `bound` is the
    kind of edge that bound each row.
    """

    events: RankEvents
    order: Index
    gap_ns: Index
    lag_ns: Index
    delay_ns: Index
    delay_cause: NDArray[np.uint8]
    bound: NDArray[np.uint8]
    host_begin: Index
    """The points at which host segments begin; last the lane's last point."""
    host_own_ns: Index
    seg_first: Index
    seg_last: Index
    is_join: NDArray[np.bool_]
    host_of_seg: Index
    """The host segment that launched a row segment, NONE for none."""
    edges: dict[int, tuple[Index, Index, Index]]
    """By kind: (source node, target node, what the edge is about: a segment, a pair or a row); local nodes."""
    pair_ns: dict[int, Index]
    """Lags of the SYNC and EVENT edges."""
    arrive: Index
    """The arrival node of each segment, NONE if it is not a collective."""
    lags: Lags
    is_elastic: bool = False
    """Whether unexplained delays count as waits instead of the rank's own time."""

    @property
    def nodes(self) -> int:
        """How many nodes there are."""
        return len(self.host_begin) + len(self.seg_first) + int(self.is_join.sum())

    @property
    def weights(self) -> RankWeights:
        """The recorded durations, of an elastic rank without unexplained delays.

        The first row of a stream, and the first that was launched in the record, keep their delays: they may have
        waited for earlier work, which no change makes faster.
        """
        rows = self.events.rows
        delay = self.delay_ns
        if self.is_elastic:
            delay = np.where(self.delay_cause == CauseCode.UNKNOWN, 0, delay)
            for some in (np.arange(len(delay)), np.flatnonzero(rows.launch[self.order] != NONE)):
                first = some[np.unique(rows.stream[self.order[some]], return_index=True)[1]]
                delay[first] = self.delay_ns[first]
        return RankWeights((rows.end_ns - rows.start_ns)[self.order], delay, self.host_own_ns)

    def edge_weights(self, weights: RankWeights, *, fixed: bool = False) -> dict[int, Index]:
        """Return the weights of each kind of edges with these durations; `fixed`: with the least lags, no delays."""
        rows = self.events.rows
        stream, launch = self.gap_ns, self.lag_ns
        event = self.pair_ns[EdgeKind.EVENT]
        if fixed:
            # The host's known activity before a row without a launch is an explanation.
            known = np.where(np.isin(self.delay_cause, KNOWN_DELAYS), self.delay_ns, 0)
            stream = self.lags.stream_ns + np.where(self.bound == EdgeKind.STREAM, known, 0)
            launch = self.lags.launch_ns + np.where(self.bound == EdgeKind.LAUNCH, known, 0)
            event = np.minimum(event, self.lags.event_ns)
            event = event + np.where(self.bound == EdgeKind.EVENT, known, 0)[self._pair_row]
        else:
            more = weights.delay_ns - self.delay_ns
            if more.any():
                stream = stream + np.where(self.bound == EdgeKind.STREAM, more, 0)
                launch = launch + np.where(self.bound == EdgeKind.LAUNCH, more, 0)
        done = np.cumsum(stream + weights.row_ns)
        host = np.concatenate(([0], np.cumsum(weights.host_ns)))
        # From the first row's start to the segment's end; a collective's segment ends where it arrives.
        chain = np.where(self.is_join, 0, done[self.seg_last] - done[self.seg_first] + weights.row_ns[self.seg_first])
        found: dict[int, Index] = {
            EdgeKind.HOST: np.diff(host[self.host_begin]) if len(self.host_begin) else self.host_begin
        }
        of_source: Index = self.edges[EdgeKind.SOURCE][2]
        begin = self.pair_ns[EdgeKind.SOURCE]
        found[EdgeKind.SOURCE] = begin + np.where(of_source == NONE, 0, chain[of_source]) if len(chain) else begin
        sync = self.pair_ns[EdgeKind.SYNC]
        found[EdgeKind.SYNC] = np.minimum(sync, SYNC_LAG_NS) if fixed else sync
        seg = self.edges[EdgeKind.STREAM][2]
        found[EdgeKind.STREAM] = stream[self.seg_first[seg]] + chain[seg]
        pair_seg = self._seg_of[self._pair_row]
        found[EdgeKind.EVENT] = event + chain[pair_seg]
        if not fixed and len(event):
            more = np.where(self.bound == EdgeKind.EVENT, weights.delay_ns - self.delay_ns, 0)
            found[EdgeKind.EVENT] = found[EdgeKind.EVENT] + more[self._pair_row]
        seg = self.edges[EdgeKind.LAUNCH][2]
        found[EdgeKind.LAUNCH] = self._launches(rows.launch[self.order], launch, done, weights.row_ns, host)[seg]
        return found

    def _launches(self, at: Index, lag: Index, done: Index, row_ns: Index, host: Index) -> Index:
        """Return B of every segment; meaningless for those without a launch."""
        if len(self.seg_first) == 0:
            return self.seg_first
        launched = at != NONE
        rest = np.where(self.in_join, 0, row_ns - done)
        value = np.where(launched, host[np.maximum(at, 0)] + lag + rest, NEVER)
        most = np.maximum.reduceat(value, self.seg_first)
        end = np.where(self.is_join, 0, done[self.seg_last])
        begins = self.host_begin if len(self.host_begin) else np.zeros(1, dtype=np.int64)
        begin = host[begins[np.maximum(self.host_of_seg, 0)]]
        found: Index = most + end - begin
        return found

    @property
    def _seg_of(self) -> Index:
        return np.repeat(np.arange(len(self.seg_first)), self.seg_last - self.seg_first + 1)

    @property
    def in_join(self) -> NDArray[np.bool_]:
        """Whether each row (in stream order) is of a collective of the graph."""
        return self.is_join[self._seg_of]

    @property
    def _pair_row(self) -> Index:
        return self.edges[EdgeKind.EVENT][2]

    def seg_of_rows(self) -> Index:
        """Return the segment of each row of `events.rows`."""
        found = np.empty(len(self.order), dtype=np.int64)
        found[self.order] = self._seg_of
        return found

    def seg_end(self, seg: Index) -> Index:
        """Return the nodes at which these segments end."""
        return len(self.host_begin) + seg


def condense(events: RankEvents, waits: Waits, join_rows: Index, base_ns: int) -> RankGraph:
    """Return the graph of one rank; `join_rows` are its rows of collectives with other ranks in the graph."""
    rows, lane = events.rows, events.host
    order = np.lexsort((rows.end_ns, rows.start_ns, rows.stream))
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    host_begin, host_own, sync = _host_segments(events, waits)
    if not events.is_host_job and (rows.launch == NONE).all():  # a host lane that nothing ties to the work
        host_begin, sync = host_begin[:0], (sync[0][:0], sync[1][:0], sync[2][:0])
    start, end, stream = rows.start_ns[order], rows.end_ns[order], rows.stream[order]
    launch = rows.launch[order]
    first = np.ones(len(order), dtype=np.bool_)
    first[1:] = stream[1:] != stream[:-1]
    before = np.where(first, NEVER, np.concatenate(([NEVER], end[:-1])) if len(end) else end)
    launched = np.full(len(order), NEVER)
    launched[launch != NONE] = lane.time_ns[launch[launch != NONE]]
    row, awaited = place[waits.row], waits.awaited
    latest = np.full(len(order), NEVER)
    np.maximum.at(latest, row, rows.end_ns[awaited])
    ready = np.stack((before, latest, launched))
    lags = _lags(ready, start)
    bound, gap, lag, delay = _bind(ready, start, lags)
    event = _event_lags(row, rows.end_ns[awaited], latest, start, bound, lags)
    is_join_row = np.zeros(len(order), dtype=np.bool_)
    is_join_row[place[join_rows]] = True
    of_host = _host_of_rows(launch, host_begin, first)
    begins = first | is_join_row | (of_host != np.concatenate(([NONE], of_host[:-1])))
    begins[row] = True
    after = np.concatenate((is_join_row, [False]))
    after[place[awaited]] = True
    after[place[waits.awaited_of]] = True
    begins[1:] |= after[:-1][: len(begins) - 1]
    seg_first = np.flatnonzero(begins)
    seg_last = np.append(seg_first[1:], len(order)) - 1 if len(seg_first) else seg_first
    seg_of = np.cumsum(begins) - 1
    is_join = is_join_row[seg_first]
    has_launch = np.zeros(len(seg_first), dtype=np.bool_)
    has_launch[seg_of[launch != NONE]] = True
    host_of_seg = np.where(has_launch, of_host[seg_last], NONE)
    arrive = np.full(len(seg_first), NONE)
    arrive[is_join] = len(host_begin) + len(seg_first) + np.arange(int(is_join.sum()))
    into = np.where(is_join, arrive, len(host_begin) + np.arange(len(seg_first)))
    edges = _edges(host_begin, sync, seg_of, first[seg_first], host_of_seg, into, place, row, awaited)
    delay_cause = _delay_causes(events, order, start, delay)
    graph = RankGraph(
        events, order, gap, lag, delay, delay_cause, bound, host_begin, host_own, seg_first, seg_last, is_join,
        host_of_seg, edges, {EdgeKind.SYNC: sync[2], EdgeKind.EVENT: event}, arrive, lags,
    )  # fmt: skip
    return _with_sources(graph, into, start, base_ns)


def _host_segments(events: RankEvents, waits: Waits) -> tuple[Index, Index, tuple[Index, Index, Index]]:
    """Return where host segments begin, each interval's own time, and (cut, row, lag) of each wait of the host."""
    time = events.host.time_ns
    own = np.diff(time)
    if len(time) == 0:
        nothing = np.empty(0, dtype=np.int64)
        return nothing, own, (nothing, nothing, nothing)
    keep = (waits.point > 0) & (waits.point < len(time))
    point, row = waits.point[keep], waits.awaited_of[keep]
    cuts, cut = np.unique(point, return_inverse=True)
    end = events.rows.end_ns[row]
    latest = np.full(len(cuts), NEVER)
    np.maximum.at(latest, cut, end)
    blocks = latest > time[cuts - 1]
    own[cuts[blocks] - 1] = np.minimum(own[cuts[blocks] - 1], BLOCKED_OWN_NS)
    binds = (end == latest[cut]) & blocks[cut]
    lag = np.where(binds, time[point] - end, np.minimum(time[point] - end, SYNC_LAG_NS))
    return np.concatenate(([0], cuts, [len(time) - 1])), own, (cut + 1, row, lag)


def _lags(ready: Index, start: Index) -> Lags:
    """Return the least lags, estimated from the edges that bound."""
    usual = Lags()
    constants = (usual.stream_ns, usual.event_ns, usual.launch_ns)
    binding = (ready + np.array(constants)[:, None]).argmax(axis=0) if len(start) else np.empty(0, dtype=np.int64)
    found = []
    for kind, constant in enumerate(constants):
        seen = (start - ready[kind])[(binding == kind) & (ready[kind] > NEVER)]
        seen = seen[(seen >= 0) & (seen < UNEXPLAINED_NS)]
        found.append(int(np.quantile(seen, LAG_QUANTILE)) if len(seen) >= 20 else constant)
    return Lags(found[0], found[2], found[1])


def _bind(ready: Index, start: Index, lags: Lags) -> tuple[NDArray[np.uint8], Index, Index, Index]:
    """Return which kind of edge bound each row, the lags of stream and launch, and the unexplained delay."""
    constants = np.array((lags.stream_ns, lags.event_ns, lags.launch_ns))[:, None]
    kinds = np.array((EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.LAUNCH), dtype=np.uint8)
    at = (ready + constants).argmax(axis=0) if len(start) else np.empty(0, dtype=np.int64)
    most = (ready + constants).max(axis=0, initial=NEVER) if len(start) else start
    has_any = (ready > NEVER).any(axis=0)
    bound = np.where(has_any, kinds[at], EdgeKind.SOURCE).astype(np.uint8)
    delay = np.where(has_any, np.maximum(start - most, 0), 0)

    def lag(kind: int, place: int, constant: int) -> Index:
        apart = start - ready[place]
        chosen: Index = np.where(bound == kind, apart, np.minimum(apart, constant))
        return np.where(ready[place] > NEVER, chosen, 0)

    stream = lag(EdgeKind.STREAM, 0, lags.stream_ns)
    launch = lag(EdgeKind.LAUNCH, 2, lags.launch_ns)
    return bound, stream, launch, delay


def _event_lags(row: Index, end: Index, latest: Index, start: Index, bound: NDArray[np.uint8], lags: Lags) -> Index:
    binds = (bound[row] == EdgeKind.EVENT) & (end == latest[row])
    found: Index = np.where(binds, start[row] - end, np.minimum(start[row] - end, lags.event_ns))
    return found


def _host_of_rows(launch: Index, host_begin: Index, first: NDArray[np.bool_]) -> Index:
    """Return the host segment of each row's launch; a row without a launch has that of the row before on its stream."""
    known = launch != NONE
    if not known.any():
        return np.full(len(launch), NONE)
    of = np.where(known, np.searchsorted(host_begin[:-1], launch, side="right") - 1, NONE)
    at = np.maximum.accumulate(np.where(known | first, np.arange(len(launch)), 0))
    filled: Index = of[at]
    return filled


def _edges(
    host_begin: Index,
    sync: tuple[Index, Index, Index],
    seg_of: Index,
    is_first: NDArray[np.bool_],
    host_of_seg: Index,
    into: Index,
    place: Index,
    row: Index,
    awaited: Index,
) -> dict[int, tuple[Index, Index, Index]]:
    hosts = len(host_begin)
    segs = np.arange(len(into))
    follows, launched = segs[~is_first], segs[host_of_seg != NONE]
    steps = np.arange(max(hosts - 1, 0))
    return {
        EdgeKind.HOST: (steps, steps + 1, steps),
        EdgeKind.SYNC: (hosts + seg_of[place[sync[1]]], sync[0], np.arange(len(sync[0]))),
        EdgeKind.STREAM: (hosts + follows - 1, into[follows], follows),
        EdgeKind.EVENT: (hosts + seg_of[place[awaited]], into[seg_of[row]], row),
        EdgeKind.LAUNCH: (host_of_seg[launched], into[launched], launched),
    }


def _delay_causes(events: RankEvents, order: Index, start: Index, delay: Index) -> NDArray[np.uint8]:
    """Return the causes of unexplained delays: the host's activity if a row has no launch, else unknown."""
    cause = np.where(delay > UNEXPLAINED_NS, CauseCode.UNKNOWN, CauseCode.HOST_BOUND).astype(np.uint8)
    lane = events.host
    if len(lane.cause) == 0:
        return cause
    alone = np.flatnonzero((events.rows.launch[order] == NONE) & (delay > 0))
    middle = start[alone] - delay[alone] // 2
    at = np.searchsorted(lane.time_ns, middle, side="right") - 1
    inside = (at >= 0) & (at < len(lane.cause))
    found = np.where(inside, lane.cause[np.clip(at, 0, len(lane.cause) - 1)], CauseCode.HOST_BOUND)
    cause[alone] = np.where(found == CauseCode.BLOCKED, CauseCode.UNKNOWN, found)
    return cause


def _with_sources(graph: RankGraph, into: Index, start: Index, base_ns: int) -> RankGraph:
    """Add edges from the common beginning to the host lane and to segments without other incoming edges."""
    heads = graph.seg_first[graph.bound[graph.seg_first] == EdgeKind.SOURCE]
    seg = np.searchsorted(graph.seg_first, heads)
    target, time = into[seg], start[heads]
    if len(graph.host_begin):
        target = np.concatenate(([0], target))
        time = np.concatenate((graph.events.host.time_ns[:1], time))
        seg = np.concatenate(([NONE], seg))
    graph.edges[EdgeKind.SOURCE] = (np.full(len(target), NONE), target, seg)
    graph.pair_ns[EdgeKind.SOURCE] = time - base_ns
    return graph
