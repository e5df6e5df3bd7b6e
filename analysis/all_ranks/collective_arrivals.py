"""Splits each rank's time in a collective into waiting and wire, and sums up who waited for whom.

A collective's row begins on each rank when that rank arrives and spins until the last one has come, so its duration has
two parts that need opposite remedies:

    rank 0   [wait........|wire]      wait = last arrival - own arrival     another rank's delay
    rank 1        [wait...|wire]
    rank 2                [wire]      wire = end - last arrival             the link alone

Bus bandwidth from whole durations mixes the two and is always too low; from the wire part it is the link's.  If
ranks are missing, the last may be among them: wait is then a lower bound and wire an upper bound.

The rank with the most communication is not slow: it waits.  So the waiting of a collective counts for the rank that
arrived last, unless it was late by less than clocks and launches scatter.  That is a fact and not blame: another rank
may have held it up (`verdict_report`).

Pure: matched collectives and clocks in, columns out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..align.collective_matching import Matched
from ..align.host_clocks import Clocks, doubts_of, on_common_clock

__all__ = ["LATE_NS_MIN", "Arrivals", "Lateness", "arrivals_of", "by_trace", "lateness_of"]

LATE_NS_MIN = 20_000
"""The least lateness that counts: a kernel launch takes about 5 us, and equal ranks scatter by a few of them."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """One group's collectives on the common clock: n of them on k ranks; zero where `has` is false.

    `wait_ns` and `wire_ns` (n, k) add up to each row's duration.  `late` (n) is the column that came last, at
    `last_ns`; `skew_ns` (n) lies between the first and the last; `lateness_ns` (n) between the median of the others and
    the last.  `link_ns` (n) is the median rank's time after the last came.
    """

    group: Matched
    has: NDArray[np.bool_]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    wait_ns: NDArray[np.int64]
    wire_ns: NDArray[np.int64]
    late: NDArray[np.int64]
    last_ns: NDArray[np.int64]
    skew_ns: NDArray[np.int64]
    lateness_ns: NDArray[np.int64]
    link_ns: NDArray[np.int64]


def arrivals_of(group: Matched, clocks: Clocks) -> Arrivals:
    """Return when each rank arrived at each collective of `group`."""
    has = group.has
    start, end = (np.where(has, times, 0) for times in on_common_clock(group, clocks))
    late = np.where(has, start, np.iinfo(np.int64).min).argmax(axis=1)
    each = np.arange(len(start))
    last, first = start[each, late], np.where(has, start, np.iinfo(np.int64).max).min(axis=1)
    wait = np.where(has, np.clip(last[:, None] - start, 0, end - start), 0)
    others = has.copy()
    others[each, late] = False
    return Arrivals(
        group=group,
        has=has,
        start_ns=start,
        end_ns=end,
        wait_ns=wait,
        wire_ns=end - start - wait,
        late=late,
        last_ns=last,
        skew_ns=last - first,
        lateness_ns=last - _median(start, others),
        link_ns=np.maximum(_median(end, has) - last, 0),
    )


def by_trace(arrivals: Sequence[Arrivals], traces: int) -> list[list[tuple[Arrivals, int]]]:
    """Return the groups of each of so many `traces`, with its column there."""
    found: list[list[tuple[Arrivals, int]]] = [[] for _ in range(traces)]
    for mine in arrivals:
        for column, place in enumerate(mine.group.traces):
            found[place].append((mine, column))
    return found


def _median(times: NDArray[np.int64], has: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the median of each line's present values, the upper of two: without rounding or overflow."""
    ordered = np.sort(np.where(has, times, np.iinfo(np.int64).max), axis=1)
    middle: NDArray[np.int64] = ordered[np.arange(len(times)), has.sum(axis=1) // 2]
    return middle


@dataclass(frozen=True, slots=True)
class Lateness:
    """By place in the list of traces: how long others waited for it, and in how many of its collectives."""

    caused_wait_ns: NDArray[np.int64]
    late_count: NDArray[np.int64]
    collectives: NDArray[np.int64]


def lateness_of(groups: Sequence[Arrivals], clocks: Clocks, traces: int) -> Lateness:
    """Return how long ranks waited for each other."""
    caused, late_count, collectives = (np.zeros(traces, dtype=np.int64) for _ in range(3))
    for group in groups:
        places = np.array(group.group.traces, dtype=np.int64)
        collectives[places] += group.has.sum(axis=0)
        doubt = doubts_of(group.group, clocks)
        late = np.flatnonzero(group.lateness_ns > np.maximum(LATE_NS_MIN, doubt[group.late]))
        culprits = places[group.late[late]]
        np.add.at(late_count, culprits, 1)
        np.add.at(caused, culprits, group.wait_ns[late].sum(axis=1))
    return Lateness(caused, late_count, collectives)
