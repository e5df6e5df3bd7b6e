"""Aligns the clocks of the ranks' hosts by the collectives in the traces, and says how well.

Ranks on one host share a clock.  NTP holds the clocks of different hosts together to about a millisecond, so a wait of
200 us computed across hosts is noise.  The traces hold better synchronization: ranks leave a collective together.  So
the ends of all collectives and messages are fitted at once (`clock_fit`), which gives each clock an offset, a drift and
standard errors.

Two ranks share a clock only if both traces name the same host.  Clocks that agree are not proof: NTP can hold two hosts
within microseconds, and treating them as one clock blamed four ranks of a healthy job.

The fit has no reference clock; only the axis is that of the first trace, so offsets and errors are relative to it.
Broadcasts, gathers and the like do not tie clocks together: the sender may leave before the receiver arrives.

Pure: matched collectives in, corrections out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..document.report import ClockPair, RankClock
from ..trace.columns import Trace, TraceWarning
from .clock_fit import ClockFit, Meetings, RankClockCorrection, fit_clocks
from .collective_matching import Matched, wall_offset_ns
from .sequence_alignment import OVERLAP_SLACK_NS

__all__ = ["SYNCHRONIZING", "Clocks", "align_clocks", "doubts_of", "on_common_clock", "together"]

SYNCHRONIZING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "barrier"})
"""Operations that no rank can end before the last has begun: each needs data from all ranks."""

SAME_CLOCK_NS = 100_000
"""How well ends on one clock agree: NCCL's ranks leave a ring one after the other."""

WALL_CLOCKS_NS = 1_000_000
"""How well NTP holds hosts together at best."""

DOUBT_ERRORS = 2.0
"""A lateness of fewer standard errors of its clock is noise (95 % of a normal distribution)."""

SCATTERS = 5.0
"""And at least this many times their scatter: gloo's threads wake some 100 us apart, always in the same order."""

PAIRS_MAX = 1_000
"""The most pairs of clocks listed as not comparable, those with the largest error first."""

UNTOLD_NS = 1_000_000
"""With this standard error or more, the order of two clocks' events is unknown: that of the wall clocks."""

JUMP_NS_MIN = 50_000
"""The least shift of a clock's residuals within a trace that counts as a jump."""

JUMP_RATIO = 8.0
"""And the least multiple of the scatter."""

EPOCH_NS_MIN = 10**18
"""Later times are since 1970 (this one is September 2001); earlier ones are since some boot."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One clock for each trace, in their order; `offsets_ns` takes a file's times to the axis of the first trace.

    `corrections` include the drift.  `clock` numbers the clocks, `fit` has their errors.  Clocks with the same
    `island` are connected by collectives; between islands there is only the wall clock.
    """

    clocks: list[RankClock]
    offsets_ns: NDArray[np.int64]
    corrections: list[RankClockCorrection]
    clock: NDArray[np.int64]
    island: NDArray[np.int64]
    fit: ClockFit
    pairs: list[ClockPair]
    warnings: list[TraceWarning]

    def common(self, place: int, times: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return times of a trace on the common clock."""
        return self.corrections[place].common(times)

    def errors_ns(self, places: Sequence[int]) -> NDArray[np.float64] | None:
        """Return the standard error of each of these traces' times against the others'; None for different islands."""
        if len(set(self.island[list(places)].tolist())) > 1:
            return None
        clock = self.clock[list(places)]
        c = self.fit.covariance[np.ix_(clock, clock)]
        spread = np.diag(c) - 2 * c.mean(axis=1) + c.mean()
        errors: NDArray[np.float64] = np.sqrt(np.maximum(spread, 0.0))
        return errors


def align_clocks(traces: Sequence[Trace], groups: Sequence[Matched]) -> Clocks:
    """Return the alignment of each trace's clock with the others'.  Every trace has a rank."""
    walls = np.array([wall_offset_ns(trace) for trace in traces], dtype=np.int64)
    names: dict[str | int, int] = {}
    clock = np.array(
        [names.setdefault(place if t.host is None else t.host, len(names)) for place, t in enumerate(traces)],
        dtype=np.int64,
    )
    meetings, of_trace = _meetings(groups, walls, clock)
    fit = fit_clocks(meetings, len(names))
    island = fit.island[clock] if len(clock) else clock
    offset = fit.offset_ns[clock] - _reference(fit, clock) if len(clock) else np.empty(0)
    drift = fit.drift[clock] - (fit.drift[clock[0]] if len(clock) else 0.0)
    drift = np.where(island == island[0], drift, 0.0) if len(clock) else drift
    middle = fit.middle_ns[clock] if len(clock) else clock
    apart, differ, jumps = _residuals(meetings, of_trace, fit, clock, len(traces))
    found, corrections = [], []
    for place, trace in enumerate(traces):
        # The axis is that of the first trace's file, so its wall offset is subtracted again.
        whole = float(offset[place]) + int(walls[place] - walls[0])
        corrections.append(RankClockCorrection(whole, float(drift[place]), int(middle[place] - walls[place])))
        found.append(_rank_clock(trace, place, traces, fit, clock, island, round(whole), float(drift[place]), apart))
    offsets = np.array([each.offset_ns for each in found], dtype=np.int64)
    pairs = _untold(traces, fit, clock)
    warnings = _warnings(found, differ, jumps, traces)
    return Clocks(found, offsets, corrections, clock, island, fit, pairs, warnings)


def _reference(fit: ClockFit, clock: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return for each trace what its offset is counted from: the first trace's clock, in its island."""
    first = clock[0]
    base = np.where(fit.island == fit.island[first], fit.offset_ns[first], 0.0)
    found: NDArray[np.float64] = base[clock]
    # Other islands are relative to their own first trace, which the wall clock ties to the first island.
    for island in np.unique(fit.island[clock]).tolist():
        if island != fit.island[first]:
            mine = fit.island[clock] == island
            found[mine] = fit.offset_ns[clock[np.flatnonzero(mine)[0]]]
    return found


def _rank_clock(
    trace: Trace,
    place: int,
    traces: Sequence[Trace],
    fit: ClockFit,
    clock: NDArray[np.int64],
    island: NDArray[np.int64],
    offset_ns: int,
    drift: float,
    apart: NDArray[np.float64],
) -> RankClock:
    first, mine = int(clock[0]), int(clock[place])
    error = fit.error_ns(first, mine)
    c = fit.drift_covariance
    drift_error = float(np.sqrt(max(c[first, first] + c[mine, mine] - 2 * c[first, mine], 0.0)))
    is_tied = island[place] == island[0]
    if mine == first:
        method = "same_host"
    elif is_tied:
        method = "collectives"
    else:
        method = "wall_clock" if _is_on_epoch(trace) and _is_on_epoch(traces[0]) else "none"
    assert trace.rank is not None
    return RankClock(
        rank=trace.rank,
        host=trace.host,
        offset_ns=offset_ns,
        residual_ns=round(DOUBT_ERRORS * error + abs(apart[place])) if error is not None else None,
        method=method,
        standard_error_ns=round(error) if error is not None else None,
        drift_ratio=drift if is_tied else None,
        drift_standard_error_ratio=drift_error if is_tied else None,
    )


def doubts_of(group: Matched, clocks: Clocks) -> NDArray[np.int64]:
    """For each rank of `group`, return the lateness below which its clock is too inaccurate."""
    places = list(group.traces)
    errors = clocks.errors_ns(places)
    if errors is not None:
        doubts: NDArray[np.int64] = np.ceil(DOUBT_ERRORS * errors).astype(np.int64)
        return doubts
    is_known = all(clocks.clocks[place].method != "none" for place in places)
    return np.full(len(places), WALL_CLOCKS_NS if is_known else np.iinfo(np.int64).max, dtype=np.int64)


def together(group: Matched, clocks: Clocks) -> NDArray[np.bool_]:
    """Return (n): whether all ranks of each collective were in it at one instant, as far as the clocks can tell."""
    start, end = on_common_clock(group, clocks)
    doubts = clocks.errors_ns(list(group.traces))
    slack = OVERLAP_SLACK_NS + (0 if doubts is None else int(np.ceil(DOUBT_ERRORS * doubts.max(initial=0.0))))
    least, most = np.iinfo(np.int64).min, np.iinfo(np.int64).max
    last = np.where(group.has, start, least).max(axis=1, initial=least)
    first = np.where(group.has, end, most).min(axis=1, initial=most)
    is_together: NDArray[np.bool_] = last <= first + slack
    return is_together


def on_common_clock(group: Matched, clocks: Clocks) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return starts and ends (n, k) of a group's collectives on the common clock."""
    start, end = (
        np.stack([clocks.common(place, times[:, column]) for column, place in enumerate(group.traces)], axis=1)
        for times in (group.start_ns, group.end_ns)
    )
    return start, end


def _meetings(
    groups: Sequence[Matched], walls: NDArray[np.int64], clock: NDArray[np.int64]
) -> tuple[Meetings, NDArray[np.int64]]:
    """Return the ends of all collectives that bind, on the wall clock as the files know it, and whose each is."""
    meeting, of, trace, end, kind, label = ([np.empty(0, dtype=np.int64)] for _ in range(6))
    labels: dict[tuple[int, str], int] = {}
    count = 0
    peers = _peers(groups)
    for number, group in enumerate(groups):
        is_pair = group.pair is not None
        numbers = [labels.setdefault((number, meta.operation), len(labels)) for meta in group.collectives]
        binds = np.array([is_pair or meta.operation in SYNCHRONIZING for meta in group.collectives], dtype=np.bool_)
        if is_pair:
            binds &= ~_is_shared(group, peers)
        at, column = np.nonzero(group.has & binds[:, None])
        places = np.array(group.traces, dtype=np.int64)[column]
        meeting.append(count + at)
        of.append(clock[places])
        trace.append(places)
        end.append(group.end_ns[at, column] + walls[places])
        kind.append(np.full(len(at), int(is_pair)))
        label.append(np.array(numbers, dtype=np.int64)[at])
        count += len(group.collectives)
    columns = [np.concatenate(parts) for parts in (meeting, of, end, kind, label)]
    return Meetings(*columns), np.concatenate(trace)


def _peers(groups: Sequence[Matched]) -> dict[tuple[int, int], set[tuple[int, ...]]]:
    """Map each row of a message, as (trace, row's start), to the pairs of traces that it connects."""
    found: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for group in groups:
        if group.pair is not None:
            for column, place in enumerate(group.traces):
                for start in group.start_ns[group.has[:, column], column].tolist():
                    found.setdefault((place, start), set()).add(group.traces)
    return found


def _is_shared(group: Matched, peers: dict[tuple[int, int], set[tuple[int, ...]]]) -> NDArray[np.bool_]:
    """Return (n) whether a rank met another rank in the same row: a batch ends with its last message."""
    shared = np.zeros(len(group.collectives), dtype=np.bool_)
    for column, place in enumerate(group.traces):
        starts = group.start_ns[:, column].tolist()
        shared |= np.array([len(peers.get((place, start), ())) > 1 for start in starts], dtype=np.bool_)
    return shared


def _residuals(
    meetings: Meetings, of_trace: NDArray[np.int64], fit: ClockFit, clock: NDArray[np.int64], traces: int
) -> tuple[NDArray[np.float64], list[int], list[int]]:
    """Return how far each trace's ends lie from those of the first trace of its clock.

    Also return the traces that contradict being on that clock, and those whose clock jumps.
    """
    apart, scatters = np.zeros(traces), np.zeros(traces)
    jumps: list[int] = []
    if len(meetings.end_ns) == 0:
        return apart, [], jumps
    from_middle = (meetings.end_ns - fit.middle_ns[meetings.clock]).astype(np.float64)
    moved = (meetings.end_ns - meetings.end_ns[0]) + fit.offset_ns[meetings.clock]
    moved = moved + fit.drift[meetings.clock] * from_middle
    order = np.lexsort((moved, meetings.meeting))
    numbers, first, counts = np.unique(meetings.meeting[order], return_index=True, return_counts=True)
    middle = moved[order][first + counts // 2]
    residual = moved - middle[np.searchsorted(numbers, meetings.meeting)]
    for place in range(traces):
        mine = residual[of_trace == place]
        if len(mine) == 0:
            continue
        apart[place] = np.median(mine)
        scatters[place] = 1.4826 * np.median(np.abs(mine - apart[place]))
        half = len(mine) // 2
        if half >= 4:
            before, after = mine[:half], mine[half:]
            scatter = 1.4826 * np.median(np.abs(np.concatenate((before - np.median(before), after - np.median(after)))))
            shift = abs(np.median(after) - np.median(before))
            if shift > max(JUMP_NS_MIN, JUMP_RATIO * scatter):
                jumps.append(place)
    # Only within a shared clock does it tell traces apart: against the first of them.
    _, first = np.unique(clock, return_index=True)
    apart = apart - apart[first][clock]
    differ = np.flatnonzero(np.abs(apart) > np.maximum(SAME_CLOCK_NS, SCATTERS * scatters)).tolist()
    return apart, differ, jumps


def _untold(traces: Sequence[Trace], fit: ClockFit, clock: NDArray[np.int64]) -> list[ClockPair]:
    """Return the pairs of clocks whose difference is unknown, each by its first rank."""
    first = {int(number): traces[int(np.flatnonzero(clock == number)[0])] for number in np.unique(clock)}
    found: list[tuple[float, ClockPair]] = []
    numbers = sorted(first)
    for at, a in enumerate(numbers):
        for b in numbers[at + 1 :]:
            error = fit.error_ns(a, b)
            if error is None or error > UNTOLD_NS:
                one, other = first[a], first[b]
                assert one.rank is not None
                assert other.rank is not None
                pair = ClockPair(
                    ranks=[one.rank, other.rank],
                    hosts=[one.host, other.host],
                    standard_error_ns=None if error is None else round(error),
                )
                found.append((np.inf if error is None else error, pair))
        if len(found) > 20 * PAIRS_MAX:
            break
    found.sort(key=lambda each: -each[0])
    return [pair for _, pair in found[:PAIRS_MAX]]


def _is_on_epoch(trace: Trace) -> bool:
    return trace.start_ns is not None and trace.start_ns + wall_offset_ns(trace) > EPOCH_NS_MIN


def _warnings(
    clocks: Sequence[RankClock], differ: Sequence[int], jumps: Sequence[int], traces: Sequence[Trace]
) -> list[TraceWarning]:
    warnings = []
    if loose := [clock.rank for clock in clocks if clock.method in ("none", "wall_clock")]:
        message = f"no collective ties the clocks of ranks {loose} to the others'; their waits are not comparable"
        warnings.append(TraceWarning("clocks_not_aligned", message, len(loose)))
    if differ:
        ranks = [traces[place].rank for place in differ]
        message = f"ranks {ranks} name the host of others, and their clocks contradict that"
        warnings.append(TraceWarning("host_clocks_differ", message, len(differ)))
    if jumps:
        ranks = [traces[place].rank for place in jumps]
        message = f"the clocks of ranks {ranks} jump against the others' during the trace"
        warnings.append(TraceWarning("clock_jumps", message, len(jumps)))
    return warnings
