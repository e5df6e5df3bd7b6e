"""Splits each rank's time in a collective into waiting for the last rank and time on the wire.

A collective's row begins on each rank when that rank arrives and spins until the last one has come, so its duration has
two parts that need opposite remedies:

    rank 0   [wait........|wire]      wait = last arrival - own arrival     another rank's delay
    rank 1        [wait...|wire]
    rank 2                [wire]      wire = end - last arrival             the link alone

Bus bandwidth from whole durations mixes the two and is always too low; from the wire part it is the link's.  Where
ranks are missing the last one may be among them, so wait is then a lower bound and wire an upper one.

Pure: matched collectives and clocks in, columns out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .clocks import Clocks, on_common_clock
from .matching.collective_matching import Matched

__all__ = ["Arrivals", "arrivals_of"]


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
    """Return when each rank came to each collective of `group`."""
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


def _median(times: NDArray[np.int64], has: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the median of each line's present values, the upper one of two: no rounding and no overflow."""
    ordered = np.sort(np.where(has, times, np.iinfo(np.int64).max), axis=1)
    middle: NDArray[np.int64] = ordered[np.arange(len(times)), has.sum(axis=1) // 2]
    return middle
