"""Matches the rows of several ranks' traces that belong to one collective.

In one rank's trace, waiting for a late rank looks exactly like a slow link.  Comparing ranks tells them apart, but only
if the rows of one collective are found in every trace.  Neither time nor row order is enough: clocks differ, and traces
begin and end anywhere (see `sequence_alignment`).

The metadata give a collective's process group: its name and ranks.  Traces without metadata (torch before 2.1) show
kernels but no groups.  Their collectives are treated as one sequence of one group of all ranks, with a warning, and
pairs that do not overlap on the common clock are dropped later (`host_clocks`).

A send and its receive are matched as a collective of two ranks if the metadata name the peer ("Src Rank", "Dst Rank");
other messages are left out and counted.  The kernel of a batch (`batch_isend_irecv`) does not describe its messages,
but the calls before its launch do; the kernel is a row of each message.  A SendRecv kernel without metadata is treated
as an all-to-all, under the same condition.

Pure: traces in, matched rows out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work
from pacecar.ledger.classification import collective_operation

from ..trace.columns import NONE, WORKS, CollectiveColumns, HostKind, Trace, TraceWarning
from ..trace.steps import step_numbers
from .message_batches import BATCH, POINT_TO_POINT, batched_calls
from .sequence_alignment import CallSequence, align

__all__ = ["Events", "Matched", "Matching", "events_of", "match", "wall_offset_ns"]

_SIZES_DIFFER = frozenset({"all_to_all", "send_recv", "gather", "scatter"})
"""Operations in which the number of bytes may differ between ranks."""
_SAME_AS = {"send_recv": "all_to_all", "recv": "send", "irecv": "send", "isend": "send"}

_Key = tuple[str | None, tuple[int, ...] | None, tuple[int, int] | None]
"""A process group: its name, its ranks if known (several meshes may use one name), and for sends and receives the pair
of sender and receiver."""


@dataclass(frozen=True, slots=True)
class Events:
    """All collectives of one trace, on device and host, sorted by start; `collectives[meta[i]]` describes row i."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    issue_ns: NDArray[np.int64]
    meta: NDArray[np.int64]
    collectives: tuple[CollectiveColumns, ...]
    source: NDArray[np.int64]
    """The row in the trace; host rows are numbered after all device rows."""


@dataclass(frozen=True, slots=True)
class Matched:
    """The collectives of one process group that at least two traces hold; n of them on k ranks.

    `traces` are the k indices in the list of traces, `rows` (n, k) the indices in each one's `Events`, NONE where that
    trace lacks it; `start_ns` and `end_ns` (n, k) are times of the files, meaningless where the row is NONE.  `size`
    is how many ranks the group has, None when unknown.  `is_assumed`: the group is assumed, without metadata.  `pair`
    is the sender and the receiver of messages.
    """

    group: str | None
    size: int | None
    is_assumed: bool
    pair: tuple[int, int] | None
    traces: tuple[int, ...]
    collectives: tuple[CollectiveColumns, ...]
    rows: NDArray[np.int64]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]

    @property
    def has(self) -> NDArray[np.bool_]:
        """Return (n, k): whether that trace holds that collective."""
        present: NDArray[np.bool_] = self.rows != NONE
        return present

    def only(self, keep: NDArray[np.bool_]) -> Matched:
        """Return the group with only the collectives for which `keep` (n) holds."""
        chosen = tuple(c for c, kept in zip(self.collectives, keep.tolist(), strict=True) if kept)
        return Matched(
            group=self.group,
            size=self.size,
            is_assumed=self.is_assumed,
            pair=self.pair,
            traces=self.traces,
            collectives=chosen,
            rows=self.rows[keep],
            start_ns=self.start_ns[keep],
            end_ns=self.end_ns[keep],
        )


@dataclass(frozen=True, slots=True)
class Matching:
    """All groups of a job, each trace's events, and what could not be matched."""

    groups: list[Matched]
    events: list[Events]
    warnings: list[TraceWarning]


def wall_offset_ns(trace: Trace) -> int:
    """Return the offset from the file's times to the epoch: zero for files that use the epoch (torch before 2.3)."""
    return 0 if trace.wall_offset_ns is None else trace.wall_offset_ns


def match(traces: Sequence[Trace], world_size: int | None) -> Matching:
    """Return the collectives that the traces share; each trace is a different rank."""
    events = [events_of(trace) for trace in traces]
    keys: dict[_Key, dict[int, NDArray[np.int64]]] = {}
    left_out = 0
    for place, mine in enumerate(events):
        found, pairs = _by_group(mine, traces[place].rank)
        left_out += pairs
        for key, rows in found.items():
            keys.setdefault(key, {})[place] = rows
    warnings = [] if left_out == 0 else [_point_to_point(left_out)]
    groups: list[Matched] = []
    unmatched = alone = ambiguous = repeated = 0
    for key, members in keys.items():
        total = sum(map(len, members.values()))
        if len(members) < 2:
            alone += total
            continue
        if _names_several(key, members, events):
            repeated += total
            continue
        matched, doubts = _match_group(key, members, traces, events, world_size)
        ambiguous += doubts
        unmatched += total - int(matched.has.sum())
        if len(matched.collectives):
            groups.append(matched)
    if repeated:
        message = f"{repeated} collectives belong to groups with unknown ranks that share a name"
        warnings.append(TraceWarning("group_names_repeat", message, repeated))
    warnings += _warnings(groups, unmatched, alone, ambiguous)
    return Matching(groups, events, warnings)


def events_of(trace: Trace) -> Events:
    """Return the collectives of one trace.

    Rows with one sequence number are one collective: NCCL may cut a large one into several kernels.  If no operation
    is known, the name of the kernel stands in for it.
    """
    rows, host = trace.device, trace.host_rows
    of_device = rows.work == WORKS.index(Work.COMMUNICATION)
    of_host = host.kind == HostKind.COLLECTIVE_WORK
    issue = np.where(rows.launch_ns == NONE, rows.start_ns, rows.launch_ns)
    start = np.concatenate((rows.start_ns[of_device], host.start_ns[of_host]))
    end = np.concatenate((rows.end_ns[of_device], host.end_ns[of_host]))
    issue = np.concatenate((issue[of_device], host.start_ns[of_host]))
    meta = np.concatenate((rows.collective[of_device], host.collective[of_host])).astype(np.int64)
    name = np.concatenate((rows.name[of_device], host.name[of_host]))
    collectives = list(trace.collectives)
    for index in np.unique(name[meta == NONE]).tolist():
        meta[(meta == NONE) & (name == index)] = len(collectives)
        operation = collective_operation(trace.names[index])
        collectives.append(CollectiveColumns(operation=trace.names[index] if operation is None else operation))
    source = np.concatenate((np.flatnonzero(of_device), len(rows.start_ns) + np.flatnonzero(of_host)))
    order = np.lexsort((end, start))
    events = Events(start[order], end[order], issue[order], meta[order], tuple(collectives), source[order])
    return _unpacked(_joined(events), trace)


def _unpacked(events: Events, trace: Trace) -> Events:
    """Return the events with each batch replaced by its messages: the calls since the previous launch."""
    is_batch = np.array([meta.operation == BATCH for meta in events.collectives] or [False])[events.meta]
    if not is_batch.any():
        return events
    is_single = np.array([meta.operation in POINT_TO_POINT for meta in events.collectives])[events.meta]
    calls, of = batched_calls(events.issue_ns, events.start_ns, is_batch, is_single, trace)
    whole = np.ones(len(is_batch), dtype=np.bool_)
    whole[of] = False
    row = np.concatenate((np.flatnonzero(whole), of))
    meta = np.concatenate((events.meta[whole], trace.host_rows.collective[calls].astype(np.int64)))
    order = np.lexsort((np.arange(len(row)), events.end_ns[row], events.start_ns[row]))
    row = row[order]
    columns = (events.start_ns[row], events.end_ns[row], events.issue_ns[row], meta[order])
    return Events(*columns, events.collectives, events.source[row])


def _joined(events: Events) -> Events:
    """Return the events with those of one group and sequence number merged, from first start to last end."""
    firsts: dict[tuple[object, ...], int] = {}
    into = np.arange(len(events.meta))
    for at, index in enumerate(events.meta.tolist()):
        meta = events.collectives[index]
        if meta.sequence is not None:
            key = (meta.group, meta.ranks, meta.sequence, meta.operation)
            into[at] = firsts.setdefault(key, at)
    keep = into == np.arange(len(into))
    if keep.all():
        return events
    end = events.end_ns.copy()
    np.maximum.at(end, into, events.end_ns)
    columns = (events.start_ns[keep], end[keep], events.issue_ns[keep], events.meta[keep])
    return Events(*columns, events.collectives, events.source[keep])


def _by_group(events: Events, rank: int | None) -> tuple[dict[_Key, NDArray[np.int64]], int]:
    """Return the indices of each group's events, and how many were sends or receives without a known peer."""
    known: dict[_Key, int] = {}
    # Where there are messages a batch without any is one whose calls the trace lacks; else it is of collectives.
    has_messages = any(meta.operation in POINT_TO_POINT for meta in events.collectives)
    peered = {*POINT_TO_POINT, BATCH} if has_messages else POINT_TO_POINT
    number = np.full(len(events.collectives) + 1, NONE, dtype=np.int64)
    for index, meta in enumerate(events.collectives):
        pair = _pair(meta, rank)
        if meta.operation not in peered or pair is not None:
            number[index] = known.setdefault((meta.group, meta.ranks, pair), len(known))
    mine = number[events.meta]
    found = {key: np.flatnonzero(mine == at) for key, at in known.items()}
    return {key: rows for key, rows in found.items() if len(rows)}, int((mine == NONE).sum())


def _pair(meta: CollectiveColumns, rank: int | None) -> tuple[int, int] | None:
    """Return sender and receiver of a message of this rank; None for other operations and for unknown peers."""
    if meta.operation not in POINT_TO_POINT or rank is None:
        return None
    if meta.operation in ("send", "isend"):
        return None if meta.destination_rank is None else (rank, meta.destination_rank)
    return None if meta.source_rank is None else (meta.source_rank, rank)


def _names_several(key: _Key, members: Mapping[int, NDArray[np.int64]], events: Sequence[Events]) -> bool:
    """Return whether several groups share this group's name: more ranks use it than the group has."""
    if key[1] is not None or key[2] is not None:
        return False
    place, rows = next(iter(members.items()))
    size = events[place].collectives[int(events[place].meta[rows[0]])].group_size
    return size is not None and len(members) > size


def _match_group(
    key: _Key,
    members: Mapping[int, NDArray[np.int64]],
    traces: Sequence[Trace],
    events: Sequence[Events],
    world_size: int | None,
) -> tuple[Matched, int]:
    """Return one group's matched collectives, and for how many ranks the alignment was ambiguous."""
    places = sorted(members)
    operations: dict[str, int] = {}
    calls = {place: _calls(traces[place], events[place], members[place], operations) for place in places}
    rows, doubts = _laid([calls[place] for place in places])
    columns = [(events[place], rows[:, column]) for column, place in enumerate(places)]
    collectives = tuple(_agreed(columns, at) for at in range(len(rows)))
    name, ranks, pair = key
    size = len(ranks) if ranks else next((c.group_size for c in collectives if c.group_size), None)
    is_assumed = name is None and ranks is None and pair is None
    if pair is not None:
        name, size = f"{name or ''} {pair[0]} to {pair[1]}".strip(), 2
    return Matched(
        group=name,
        pair=pair,
        size=size if size is not None or not is_assumed else world_size,
        is_assumed=is_assumed,
        traces=tuple(places),
        collectives=collectives,
        rows=rows,
        start_ns=np.stack([mine.start_ns[at] for mine, at in columns], axis=1),
        end_ns=np.stack([mine.end_ns[at] for mine, at in columns], axis=1),
    ), doubts


def _laid(calls: Sequence[CallSequence]) -> tuple[NDArray[np.int64], int]:
    """Return (n, k) each rank's event of each collective that at least two hold, and how many ranks were ambiguous.

    All are aligned with the longest sequence; calls that it lacks are added beyond its ends and in its gaps.
    """
    at = max(range(len(calls)), key=lambda column: len(calls[column]))
    pivot = calls[at]
    rows = np.full((len(pivot), len(calls)), NONE, dtype=np.int64)
    rows[:, at] = pivot.row
    beyond: dict[tuple[bool, int, int], dict[int, int]] = {}
    doubts = 0
    for column, mine in enumerate(calls):
        if column == at:
            continue
        laid = align(pivot, mine)
        doubts += laid.is_ambiguous
        rows[:, column] = np.where(laid.partner == NONE, NONE, mine.row[laid.partner])
        if laid.by_sequence or laid.shift is not None:
            numbers = mine.sequence if laid.by_sequence else np.arange(len(mine)) - (laid.shift or 0)
            for place in np.setdiff1d(np.arange(len(mine)), laid.partner).tolist():
                key = (laid.by_sequence, int(numbers[place]), int(mine.operation[place]))
                beyond.setdefault(key, {})[column] = place
    order = [float(place) for place in range(len(rows))]
    more = []
    for (by_sequence, number, _), held in sorted(beyond.items()):
        if len(held) > 1 and len({int(calls[column].bytes[place]) for column, place in held.items()} - {NONE}) < 2:
            line = np.full(len(calls), NONE, dtype=np.int64)
            for column, place in held.items():
                line[column] = calls[column].row[place]
            more.append(line)
            order.append(int(np.searchsorted(pivot.sequence, number)) - 0.5 if by_sequence else float(number))
    rows = np.concatenate((rows, np.array(more, dtype=np.int64).reshape(-1, len(calls))))
    rows = rows[np.argsort(order, kind="stable")]
    return rows[(rows != NONE).sum(axis=1) >= 2], doubts


def _calls(trace: Trace, events: Events, rows: NDArray[np.int64], operations: dict[str, int]) -> CallSequence:
    """Return one group's events as the columns that `sequence_alignment` compares."""
    rows = rows[np.argsort(events.issue_ns[rows], kind="stable")]
    # A device may run work in a later step than it was launched in: what was launched before the trace began is
    # first, and its step is unknown.
    is_launched = (events.issue_ns < events.start_ns)[rows] & (events.source[rows] < len(trace.device.start_ns))
    begin = events.start_ns[rows[is_launched]].min(initial=np.iinfo(np.int64).max)
    is_left_over = ~is_launched & is_launched.any() & (events.start_ns[rows] <= begin)
    order = np.argsort(~is_left_over, kind="stable")
    rows, is_left_over = rows[order], is_left_over[order]
    metas = [events.collectives[index] for index in events.meta[rows].tolist()]
    wall = wall_offset_ns(trace)
    names = [_SAME_AS.get(meta.operation, meta.operation) for meta in metas]
    sizes = [NONE if meta.bytes is None or meta.operation in _SIZES_DIFFER else meta.bytes for meta in metas]
    return CallSequence(
        start_ns=events.start_ns[rows] + wall,
        end_ns=events.end_ns[rows] + wall,
        operation=np.array([operations.setdefault(name, len(operations)) for name in names], dtype=np.int64),
        bytes=np.array(sizes, dtype=np.int64),
        sequence=np.array([_sequence(meta) for meta in metas], dtype=np.int64),
        step=np.where(is_left_over, NONE, step_numbers(trace, events.issue_ns[rows])),
        row=rows,
    )


def _sequence(meta: CollectiveColumns) -> int:
    """Return sequence numbers that all ranks agree on; each rank numbers its own sends and receives."""
    return NONE if meta.sequence is None or meta.operation in POINT_TO_POINT else meta.sequence


def _agreed(columns: Sequence[tuple[Events, NDArray[np.int64]]], at: int) -> CollectiveColumns:
    """Return one collective merged from all its ranks: the fullest metadata, and the mean of sizes that differ."""
    seen = [events.collectives[events.meta[rows[at]]] for events, rows in columns if rows[at] != NONE]
    full = (meta for meta in seen if meta.operation not in _SAME_AS and meta.bytes is not None)
    best: CollectiveColumns = next(full, seen[0])
    sizes = [meta.bytes for meta in seen if meta.bytes is not None]
    if len(set(sizes)) > 1:
        best = msgspec.structs.replace(best, bytes=sum(sizes) // len(sizes))
    return best


def _point_to_point(count: int) -> TraceWarning:
    message = f"{count} sends and receives are left out of the comparison of ranks: the traces do not name their peers"
    return TraceWarning("point_to_point_left_out", message, count)


def _warnings(groups: Sequence[Matched], unmatched: int, alone: int, ambiguous: int) -> list[TraceWarning]:
    warnings = []
    if unmatched:
        message = f"{unmatched} collectives were found in no other rank's trace and are left out of the comparison"
        warnings.append(TraceWarning("unmatched_collectives", message, unmatched))
    if alone:
        message = f"{alone} collectives belong to groups with the trace of only one rank"
        warnings.append(TraceWarning("groups_with_one_rank", message, alone))
    if ambiguous:
        message = f"{ambiguous} traces could be aligned with the others in several ways; the likeliest was used"
        warnings.append(TraceWarning("ambiguous_alignment", message, ambiguous))
    assumed = sum(len(group.collectives) for group in groups if group.is_assumed)
    if assumed:
        message = f"{assumed} collectives do not name a process group: treated as one group of all ranks"
        warnings.append(TraceWarning("groups_assumed_global", message, assumed))
    return warnings
