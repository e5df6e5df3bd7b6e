"""Finds the ranks that the others wait for in collectives, and the cause of their delay.

The rank with the most communication is not the slow one but the one that waits.  The slow one is the last to come, and
it causes the waits of all the others.  So each collective's waiting is charged once, to the rank that came last.  If it
was late by less than clocks and launches scatter, the waiting is charged to no rank.

The cause follows from its own ledger: between the collective before, which all ranks left together, and this one it
spent time that the median rank did not.  The heading in which its ledger exceeds the median rank's most is the cause.

    rank 0   |=all=|cccc|[wait..........|wire]
    rank 1   |=all=|cccc|[wait..........|wire]
    rank 2   |=all=|cccc|hhhhhhhhhhhhhhh|[wire]    late by the h: host_bound

Where no heading explains a quarter of the delay the cause is unknown.  It is also unknown where most of the delay is
older than the traces: profilers start at different times, and before the first collective that all traces hold a rank
may be late only because its trace is.  A delay that was passed on by another collective has the heading
exposed_communication; the late rank of that collective caused it.

Pure: arrivals and charges in, stragglers out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.records import LEDGER_HEADINGS

from ..ledger.attribution import Work, attribute_windows
from ..trace.columns import NONE, WORKS, Trace
from .clocks import Clocks, doubts_of
from .collective_arrivals import Arrivals
from .one_trace import Charges
from .report import LateTraceRank
from .sequence_alignment import OVERLAP_SLACK_NS

__all__ = ["LATE_NS_MIN", "Blame", "find_stragglers"]

LATE_NS_MIN = 20_000
"""The least lateness that counts: a kernel launch takes about 5 us, and equal ranks scatter by a few of them."""

OLDER_RATIO_MAX = 0.5
"""The ratio of the delay that may be older than the traces; beyond it they say nothing of the cause."""

EXPLAINED_RATIO_MIN = 0.25
"""The ratio of the delay that a heading must hold to be called its cause."""

SHARE_MIN = 0.02
"""The share of all charged waiting from which on a rank is listed."""

STRAGGLERS_MAX = 16

PERMANENT_RATIO_MIN = 0.5
"""A rank that is last in this ratio of the collectives with a late rank is always late, not in turn with others."""

SAME_WORK_RATIO_MAX = 1.05
"""Kernel counts that differ by less are the same work."""


@dataclass(frozen=True, slots=True)
class Blame:
    """What each rank's delays cost, by index in the list of traces.

    `caused_wait_ns` counts each collective's waiting once.  `saved_ns` is how much earlier the job would have ended
    without this rank's delays, the others staying as late as they were: delays at the same time count once.
    """

    caused_wait_ns: NDArray[np.int64]
    saved_ns: NDArray[np.int64]
    stragglers: list[LateTraceRank]


@dataclass(slots=True)
class _Record:
    """What is charged to one rank.

    `chances` counts the collectives that it took part in and that some rank came late to; `from_before` those of its
    late ones before which the traces have no common beginning; `older_ns` by how much later its own trace began there
    than the median rank's.
    """

    caused_wait_ns: int = 0
    late_count: int = 0
    collectives: int = 0
    chances: int = 0
    lateness_ns: int = 0
    from_before: int = 0
    older_ns: int = 0
    saved_ns: dict[tuple[int, int], int] = field(default_factory=dict)
    excess_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(LEDGER_HEADINGS, 0))
    kernels: int = 0
    kernels_median: int = 0


class _Stretch(NamedTuple):
    """What a rank did before one collective.

    The parts of its ledger from the collective before, in `LEDGER_HEADINGS` order; the kernels in it; and when its
    trace began, where there is no collective before (else zero).
    """

    parts: tuple[int, ...]
    kernels: int
    began_ns: int


def find_stragglers(
    groups: Sequence[Arrivals], clocks: Clocks, traces: Sequence[Trace], charges: Sequence[Charges]
) -> Blame:
    """Return how long ranks waited for each other and why; `charges` are those of `traces`, in their order."""
    records = [_Record() for _ in traces]
    late = [_late(group, clocks) for group in groups]
    before = [_before(index, groups) for index in range(len(groups))]
    stretches = _stretches(groups, late, before, clocks, traces, charges)
    for index, group in enumerate(groups):
        for column, place in enumerate(group.group.traces):
            records[place].collectives += int(group.has[:, column].sum())
            records[place].chances += int(group.has[late[index], column].sum())
        for at in late[index].tolist():
            culprit = group.group.traces[group.late[at]]
            _charge(records[culprit], group, at, before[index][at])
            there = {
                place: stretches[place, index, at] for c, place in enumerate(group.group.traces) if group.has[at, c]
            }
            _compare(records[culprit], there.pop(culprit), list(there.values()))
    return Blame(
        caused_wait_ns=np.array([record.caused_wait_ns for record in records], dtype=np.int64),
        saved_ns=np.array([sum(record.saved_ns.values()) for record in records], dtype=np.int64),
        stragglers=_listed(records, traces),
    )


def _late(group: Arrivals, clocks: Clocks) -> NDArray[np.int64]:
    """Return the collectives whose last rank was later than ranks scatter and than its clock's doubt."""
    return np.flatnonzero(group.lateness_ns > np.maximum(LATE_NS_MIN, doubts_of(group.group, clocks)[group.late]))


def _before(index: int, groups: Sequence[Arrivals]) -> list[tuple[int, int]]:
    """Return for each collective of a group the last one, as (group, index), that all its ranks had left; else NONEs.

    It may be of another group that holds all these ranks; it is their common starting point.
    """
    group = groups[index]
    wanted = group.group.traces
    best = np.full((len(group.last_ns), 2), NONE, dtype=np.int64)
    ended = np.full(len(group.last_ns), np.iinfo(np.int64).min)
    for other, candidate in enumerate(groups):
        if not set(wanted) <= set(candidate.group.traces):
            continue
        columns = [candidate.group.traces.index(place) for place in wanted]
        full = np.flatnonzero(candidate.has[:, columns].all(axis=1))
        full = full[np.argsort(candidate.last_ns[full], kind="stable")]
        count = np.full(len(group.last_ns), len(full))
        for mine, theirs in enumerate(columns):
            left = np.maximum.accumulate(candidate.end_ns[full, theirs])
            found = np.searchsorted(left, group.start_ns[:, mine] + OVERLAP_SLACK_NS, side="right")
            count = np.where(group.has[:, mine], np.minimum(count, found), count)
        some = np.flatnonzero(count > 0)
        last = full[count[some] - 1]
        end = candidate.end_ns[np.ix_(last, columns)].max(axis=1)
        later = (end > ended[some]) & ((other != index) | (last != some))
        ended[some[later]] = end[later]
        best[some[later]] = np.stack((np.full(int(later.sum()), other), last[later]), axis=1)
    return [(int(a), int(b)) for a, b in best]


def _stretches(
    groups: Sequence[Arrivals],
    late: Sequence[NDArray[np.int64]],
    before: Sequence[Sequence[tuple[int, int]]],
    clocks: Clocks,
    traces: Sequence[Trace],
    charges: Sequence[Charges],
) -> dict[tuple[int, int, int], _Stretch]:
    """Return by (trace, group, collective) what each rank did before each collective that some rank was late to."""
    windows: dict[int, list[tuple[int, int]]] = {}
    keys: dict[int, list[tuple[int, int, int]]] = {}
    began: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        for at in late[index].tolist():
            other, previous = before[index][at]
            for column, place in enumerate(group.group.traces):
                if not group.has[at, column]:
                    continue
                start, beginning = int(group.group.start_ns[at, column]), 0
                if other == NONE:
                    since = min(start if (first := traces[place].start_ns) is None else first, start)
                    beginning = since + int(clocks.offsets_ns[place])
                else:
                    theirs = groups[other].group
                    since = min(int(theirs.end_ns[previous, theirs.traces.index(place)]), start)
                windows.setdefault(place, []).append((since, start))
                keys.setdefault(place, []).append((place, index, at))
                began.setdefault(place, []).append(beginning)
    found: dict[tuple[int, int, int], _Stretch] = {}
    for place, some in windows.items():
        told = _told(some, traces[place], charges[place])
        found |= {
            key: _Stretch(parts, kernels, beginning)
            for key, (parts, kernels), beginning in zip(keys[place], told, began[place], strict=True)
        }
    return found


def _told(windows: list[tuple[int, int]], trace: Trace, charges: Charges) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the parts of the ledger of each window of one trace, and the kernels in it."""
    ledgers = attribute_windows(charges.work, windows, causes=charges.causes, observed=charges.observed)
    rows = trace.device
    starts = np.sort(rows.start_ns[rows.work == WORKS.index(Work.COMPUTE)])
    inside = np.searchsorted(starts, np.array(windows, dtype=np.int64))
    for ledger, count in zip(ledgers, (inside[:, 1] - inside[:, 0]).tolist(), strict=True):
        yield tuple(ledger.parts().values()), count


def _charge(record: _Record, group: Arrivals, at: int, before: tuple[int, int]) -> None:
    record.late_count += 1
    record.caused_wait_ns += int(group.wait_ns[at].sum())
    record.lateness_ns += int(group.lateness_ns[at])
    record.from_before += before[0] == NONE
    start = group.start_ns[at][group.has[at]]
    saved = int(group.last_ns[at]) - int(np.sort(start)[-2])
    # Collectives with the same starting point run at the same time: their delays are one delay.
    record.saved_ns[before] = max(record.saved_ns.get(before, 0), saved)


def _compare(record: _Record, mine: _Stretch, others: Sequence[_Stretch]) -> None:
    """Add to `record` by how much each heading of `mine` exceeds the median of the others'."""
    table = np.array([(*other.parts, other.kernels, other.began_ns) for other in others], dtype=np.int64)
    *parts, kernels, began = np.sort(table, axis=0)[len(others) // 2].tolist()
    for heading, value, median in zip(LEDGER_HEADINGS, mine.parts, parts, strict=True):
        record.excess_ns[heading] += value - median
    record.kernels += mine.kernels
    record.kernels_median += kernels
    record.older_ns += mine.began_ns - began


def _listed(records: Sequence[_Record], traces: Sequence[Trace]) -> list[LateTraceRank]:
    total = sum(record.caused_wait_ns for record in records)
    order = sorted(range(len(records)), key=lambda place: -records[place].caused_wait_ns)
    listed = []
    for place in order[:STRAGGLERS_MAX]:
        record, rank = records[place], traces[place].rank
        if record.caused_wait_ns > 0 and record.caused_wait_ns >= SHARE_MIN * total and rank is not None:
            listed.append(_straggler(rank, record, total))
    return listed


def _straggler(rank: int, record: _Record, total: int) -> LateTraceRank:
    heading, excess = max(record.excess_ns.items(), key=lambda item: item[1])
    told = record.lateness_ns - max(record.older_ns, 0)
    is_told = told >= (1 - OLDER_RATIO_MAX) * record.lateness_ns
    is_explained = excess > 0 and excess >= EXPLAINED_RATIO_MIN * told
    cause, lateness = (heading, excess) if is_told and is_explained else ("unknown", record.lateness_ns)
    return LateTraceRank(
        rank=rank,
        caused_wait_ns=record.caused_wait_ns,
        late_count=record.late_count,
        collectives=record.collectives,
        cause=cause,
        excess_ns=lateness,
        evidence="; ".join((_pattern(record, total), *_reasons(record, heading, is_explained=is_explained))),
    )


def _pattern(record: _Record, total: int) -> str:
    often = "again and again" if record.late_count >= PERMANENT_RATIO_MIN * record.chances else "in turn with others"
    return (
        f"late {often}: last by more than {LATE_NS_MIN // 1000} us in {record.late_count} of the {record.chances}"
        f" collectives that anybody was late to, by {_ms(record.lateness_ns / record.late_count)} ms on average,"
        f" {record.caused_wait_ns / total:.0%} of all waiting for late ranks"
    )


def _reasons(record: _Record, heading: str, *, is_explained: bool) -> Iterator[str]:
    """Yield what is known of the delay: how much is older than the traces, and what its ledgers have more."""
    is_older = record.older_ns > LATE_NS_MIN
    if is_older:
        yield (
            f"{_ms(min(record.older_ns, record.lateness_ns))} of the {_ms(record.lateness_ns)} ms are older than the"
            " traces: its own begins that much later than the median rank's, and what it did before nobody saw"
        )
    beside = "for the rest, " if is_older else ""
    words = "without a known cause" if heading == "unknown" else HEADING_WORDS[heading]
    more = f"{_ms(record.excess_ns[heading])} ms more {words} than the median rank"
    if not is_explained:
        yield f"{beside}no heading of its ledgers before them exceeds the median rank's by as much (the most: {more})"
        return
    text = f"{beside}before them {more}"
    if heading == "exposed_communication":
        text += ": other collectives held it up"
    elif heading == "compute" and record.kernels_median:
        counts = f"{record.kernels} kernels against {record.kernels_median}"
        has_more = record.kernels > SAME_WORK_RATIO_MAX * record.kernels_median
        text += f": it had more to do, {counts}" if has_more else f": the same work took longer, {counts}"
    yield text


def _ms(nanoseconds: float) -> str:
    return f"{nanoseconds / 1e6:.3f}"
