"""Finds which other rows each device row had to wait for, besides its launch and the row before it on its stream.

Traces rarely record CUDA's waits for events, so they are inferred from the host's calls:

    record, wait, launch       (`wait_stream`) the row waits for the tail of the stream that its thread launched on
                               before; so does every collective, whose record and wait are inside its call
    wait, launch               (`work.wait()`) the row waits for the latest collective that nothing has awaited yet; for
                               a send only if there is no other.  If that one ended too late in any step, all rows of
                               the site (the same kernel under the same operator) wait for the one before it
    neither, yet late          a row without another reason that begins right after a row of another stream ended

Waits that the recorded times contradict are dropped.  Rows without a launch wait for what ended last before them; if
no row has a launch, `launchless_waits` decides.

Pure: columns in, pairs of indices out.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..trace.columns import NONE, HostKind
from .causes import CauseCode
from .launchless_waits import launchless_waits
from .rank_events import HostLane, RankEvents, WorkRows

__all__ = ["EVENT_LAG_NS_MAX", "SLACK_NS", "UNEXPLAINED_NS", "device_waits"]

Index = NDArray[np.int64]

SLACK_NS = 2_000
"""A row may begin this much before the row that it awaits ends: time stamps; gaps of -0.9 us were seen on a B200."""

EVENT_LAG_NS_MAX = 50_000
"""An unexplained host call awaited a row that ended at most this long before the call returned."""

ROW_LAG_NS_MAX = 10_000
"""An unexplained row awaited one that ended at most this long before it began: events take 1 to 2 us."""

UNEXPLAINED_NS = 20_000
"""A row that begins this long after its launch and the row before it was waiting for something else."""

PENDING_MAX = 64
"""The most collectives under way that nothing has awaited; DDP has one for each bucket."""

_SENDS = ("send", "isend")

_WAIT_CALL, _RECORD_CALL = "StreamWaitEvent", "EventRecord"


class _Calls(NamedTuple):
    """For each launch, in order: how many waits for events came since the launch before, by kind."""

    paired: Index
    """Waits directly after a record on the same thread."""
    alone: Index


def device_waits(events: RankEvents) -> tuple[Index, Index]:
    """Return pairs (row, awaited row)."""
    rows = events.rows
    pairs: list[tuple[int, int]] = []
    launched = np.flatnonzero(rows.launch != NONE)
    launched = launched[np.argsort(rows.launch[launched], kind="stable")]
    if len(launched):
        calls = _calls(events, launched)
        before = _tails_of_thread(rows, launched)
        is_link = rows.cause[launched] == CauseCode.LINK
        paired = is_link if calls is None else is_link | (calls.paired > 0)
        known = paired & (before != NONE)
        pairs += list(zip(launched[known].tolist(), before[known].tolist(), strict=True))
        if calls is not None:
            pairs += _by_calls(rows, launched, calls, _are_sends(events))
    unlaunched = np.flatnonzero(rows.launch == NONE)
    told = np.zeros(len(rows.launch), dtype=np.bool_)
    of_program: list[tuple[int, int]] = []
    if len(launched) == 0:
        of_program, told = launchless_waits(events)
    unlaunched = unlaunched[~told[unlaunched]]
    if len(unlaunched):
        pairs += _by_time(rows, unlaunched[_is_late(rows, unlaunched, None, [])], None)
    pairs = _sound(rows, pairs) + of_program
    told |= rows.launch != NONE
    if told.any():
        some = np.flatnonzero(told)
        pairs += _by_time(rows, some[_is_late(rows, some, events.host, pairs)], ROW_LAG_NS_MAX)
    if not pairs:
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    unique = np.unique(np.array(pairs, dtype=np.int64), axis=0)
    return unique[:, 0], unique[:, 1]


def _sound(rows: WorkRows, pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the pairs that the recorded times do not contradict."""
    if not pairs:
        return []
    found = np.array(pairs, dtype=np.int64)
    keep = rows.end_ns[found[:, 1]] <= rows.start_ns[found[:, 0]] + SLACK_NS
    keep &= rows.stream[found[:, 0]] != rows.stream[found[:, 1]]
    return [pair for pair, kept in zip(pairs, keep.tolist(), strict=True) if kept]


def _calls(events: RankEvents, launched: Index) -> _Calls | None:
    """Return the waits for events before each launch; None if the trace has no such calls."""
    trace, rows = events.trace, events.rows
    host = trace.host_rows
    word = np.array([1 if _WAIT_CALL in name else 2 if _RECORD_CALL in name else 0 for name in trace.names] or [0])
    kind = np.where(host.kind == HostKind.RUNTIME, word[host.name], 0)
    kind = np.where(host.kind == HostKind.LAUNCH, 3, kind)
    mine = np.flatnonzero(kind)
    if not (kind[mine] == 1).any():
        return None
    order = np.lexsort((events.call_start_ns[mine], host.thread[mine]))
    mine = mine[order]
    is_own, ends = _of_collectives(events, mine, kind[mine])
    follows = np.zeros(len(mine), dtype=np.bool_)
    follows[1:] = (kind[mine][:-1] == 2) & ~ends[:-1] & (host.thread[mine][1:] == host.thread[mine][:-1])
    waits = (kind[mine] == 1) & ~is_own
    # On any thread: autograd's thread waits for its gradients, and what another thread launches next waits too.
    at = events.host.time_ns[rows.launch[launched]]

    def count(which: NDArray[np.bool_]) -> Index:
        times = np.sort(events.call_start_ns[mine[which]])
        return np.diff(np.searchsorted(times, at), prepend=0)

    return _Calls(count(waits & follows), count(waits & ~follows))


def _busiest(rows: WorkRows) -> int:
    """Return the stream with the most launches other than collectives, NONE for none."""
    other = rows.stream[(rows.cause != CauseCode.LINK) & (rows.launch != NONE)]
    return int(np.bincount(other).argmax()) if len(other) else NONE


def _of_collectives(events: RankEvents, mine: Index, kind: Index) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Return which of these calls (in order, by thread) are NCCL's own, and which record the end of a collective.

    After a launch NCCL records and waits on streams on which nothing runs, in some versions; then torch records the end
    for later waiters, unless the collective is on the current stream.  A wait directly after that is a `work.wait()`,
    not the second half of a `wait_stream`.
    """
    rows, host = events.rows, events.trace.host_rows
    links = np.flatnonzero((rows.cause == CauseCode.LINK) & (rows.launch != NONE))
    is_aside = rows.stream[links] != _busiest(rows)
    start, thread = events.call_start_ns[mine], host.thread[mine]
    launched = events.host.time_ns[rows.launch[links]]
    at = np.flatnonzero((kind == 3) & np.isin(start, launched))
    aside = np.isin(start[at], launched[is_aside])
    padded, threads = np.append(kind, [0, 0, 0]), np.append(thread, [NONE, NONE, NONE])
    after = [np.where(threads[at + n] == thread[at], padded[at + n], 0) for n in (1, 2, 3)]
    has_pair = (after[0] == 2) & (after[1] == 1) & ((after[2] == 2) | ~aside)
    own, ends = np.zeros(len(kind), dtype=np.bool_), np.zeros(len(kind), dtype=np.bool_)
    if len(at) and has_pair.all():
        own[at + 2] = True
        ends[at[aside] + 3] = True
    else:
        ends[at[aside & (after[0] == 2)] + 1] = True
    return own, ends


def _tails_of_thread(rows: WorkRows, launched: Index) -> Index:
    """For each launch, return the last row on the stream that its thread launched on before; NONE for none.

    Collectives do not tell which stream that is, because they have streams of their own.  If the stream is the row's
    own, the device's busiest stream is used instead.
    """
    stream, thread = rows.stream[launched], rows.thread[launched]
    own = rows.cause[launched] != CauseCode.LINK
    if not own.any():
        return np.full(len(launched), NONE)
    busiest = int(np.bincount(stream[own]).argmax())
    chosen = np.full(len(launched), busiest)
    for one in np.unique(thread).tolist():
        mine = np.flatnonzero(thread == one)
        last = np.maximum.accumulate(np.where(own[mine], np.arange(len(mine)), -1))
        before = np.concatenate(([-1], last[:-1]))
        known = before >= 0
        chosen[mine[known]] = stream[mine[before[known]]]
    chosen = np.where(chosen == stream, busiest, chosen)
    tail = np.full(len(launched), NONE)
    for one in np.unique(chosen).tolist():
        on = np.flatnonzero(stream == one)
        asked = np.flatnonzero((chosen == one) & (stream != one))
        at = np.searchsorted(on, asked) - 1
        tail[asked] = np.where(at >= 0, launched[on[np.maximum(at, 0)]] if len(on) else NONE, NONE)
    return tail


def _are_sends(events: RankEvents) -> NDArray[np.bool_]:
    """For each row, return whether it only sends: work that goes on with its data must have received some."""
    trace = events.trace
    is_send = np.array([meta.operation in _SENDS for meta in trace.collectives] or [False], dtype=np.bool_)
    found = np.zeros(len(events.rows.start_ns), dtype=np.bool_)
    known = np.flatnonzero(trace.device.collective != NONE)
    found[known] = is_send[trace.device.collective[known]]
    return found


def _by_calls(rows: WorkRows, launched: Index, calls: _Calls, is_send: NDArray[np.bool_]) -> list[tuple[int, int]]:
    """Return the pairs from waits alone, by the rule of sites in the module's docstring.

    A row after a record and a wait has a stream of its own; waits alone before it belong to the next row without one.
    """
    is_link = (rows.cause == CauseCode.LINK) & (rows.stream != _busiest(rows))
    noted = np.flatnonzero((calls.alone > 0) | is_link[launched] | _follows_open(calls, is_link[launched]))
    sites = _sites(rows, launched[noted])
    deepest: dict[tuple[int, int], int] = defaultdict(int)
    pairs: list[tuple[int, int]] = []
    start, end = rows.start_ns.tolist(), rows.end_ns.tolist()
    steps = list(
        zip(
            launched[noted].tolist(),
            calls.alone[noted].tolist(),
            (calls.paired[noted] > 0).tolist(),
            sites,
            strict=True,
        )
    )
    for _ in range(2):  # the first pass learns how far back each site reaches, the second applies it everywhere
        received: list[int] = []
        sent: list[int] = []
        pairs = []
        count = 0
        for row, alone, is_paired, site in steps:
            count += alone
            if is_link[row]:
                (sent if is_send[row] else received).append(row)
                del received[:-PENDING_MAX], sent[:-PENDING_MAX]
                continue
            if is_paired:
                continue
            for nth in range(min(count, len(received) + len(sent))):
                pending = received or sent
                depth = min(deepest[site, nth], len(pending) - 1)
                while depth < len(pending) and end[pending[-1 - depth]] > start[row] + SLACK_NS:
                    depth += 1
                if depth >= len(pending):
                    break
                deepest[site, nth] = max(deepest[site, nth], depth)
                pairs.append((row, pending.pop(-1 - depth)))
            count = 0
    return pairs


def _follows_open(calls: _Calls, is_link: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return the first rows after waits alone that do not belong to the row before."""
    could_not = is_link | (calls.paired > 0)
    at = np.arange(len(could_not))
    waiting = np.maximum.accumulate(np.where(calls.alone > 0, at, -1))
    taken = np.maximum.accumulate(np.where(~could_not, at, -1))
    before = np.concatenate(([-1], taken[:-1]))
    return (waiting >= 0) & (before < waiting)


def _sites(rows: WorkRows, noted: Index) -> list[int]:
    """Number the sites of these rows: the same kernel under the same operator has one number."""
    if len(noted) == 0:
        return []
    pairs = np.stack((rows.name[noted], rows.operator[noted]), axis=1)
    _, number = np.unique(pairs, axis=0, return_inverse=True)
    found: list[int] = number.reshape(-1).tolist()
    return found


def _is_late(rows: WorkRows, some: Index, host: HostLane | None, pairs: list[tuple[int, int]]) -> NDArray[np.bool_]:
    """For each of these rows, return whether stream, launch and the pairs found leave its start unexplained."""
    ready = _tails(rows)
    if host is not None:
        launched = some[rows.launch[some] != NONE]
        ready[launched] = np.maximum(ready[launched], host.time_ns[rows.launch[launched]])
    if pairs:
        found = np.array(pairs, dtype=np.int64)
        np.maximum.at(ready, found[:, 0], rows.end_ns[found[:, 1]])
    late: NDArray[np.bool_] = rows.start_ns[some] - ready[some] > UNEXPLAINED_NS
    return late


def _tails(rows: WorkRows) -> Index:
    """For each row, return when the row before it on its stream ended; the least integer for the first."""
    order = np.lexsort((rows.start_ns, rows.stream))
    tails = np.full(len(order), np.iinfo(np.int64).min // 4)
    same = rows.stream[order][1:] == rows.stream[order][:-1]
    tails[order[1:][same]] = rows.end_ns[order[:-1][same]]
    return tails


def _by_time(rows: WorkRows, late: Index, lag_ns_max: int | None) -> list[tuple[int, int]]:
    """For each of these rows, return the row that ended last before it, within the limit."""
    others = np.argsort(rows.end_ns, kind="stable")
    slack = 0 if lag_ns_max is None else SLACK_NS
    at = np.searchsorted(rows.end_ns[others], rows.start_ns[late] + slack, "right") - 1
    known = at >= 0
    awaited = others[np.maximum(at, 0)]
    if lag_ns_max is not None:
        known &= rows.start_ns[late] - rows.end_ns[awaited] <= lag_ns_max
    known &= (awaited != late) & (rows.stream[awaited] != rows.stream[late])
    return list(zip(late[known].tolist(), awaited[known].tolist(), strict=True))
