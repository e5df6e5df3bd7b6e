"""Tells faults that last a few steps from the stops of hosts and kernels that happen now and then on any machine.

Chance puts a stop of some milliseconds into every third small job, and it names nobody.  What is told from it: what
the trace itself names; what strikes one rank thrice, or twice if that is longer than any ordinary stop or where chance
seldom strikes; and a single one that is far longer than any stop of another rank, of which several were seen, or else
it must cost as much as a fault.  Two ranks that stop once each, alike long, are how these hosts are.  A single one must
also be longer than a host stops for another's time slice: how long such a stop is does not follow from the length of a
step.  That kernels hardly vary says nothing: on a device that runs like a clock hosts stop all the same.

Pure: arrays in, answers out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..one_rank.causes import OWN_CAUSES, Cause
from .peers import Compared
from .significance import LONG_OUT_RATIO, lasting_ratio, outliers, spread_ratio, steps_out

__all__ = ["ANNOTATED", "LONG_STOP_RATIO", "Stops", "lasting"]

ANNOTATED = (Cause.DATA_WAIT, Cause.CHECKPOINT)
"""Causes that the trace names itself, so that a single step of them can be named."""

STEPS_OUT_MIN = 3
"""Steps that must stand out where hosts and kernels stop now and then: twice the same rank is chance, thrice is not."""

LONG_STEPS_OUT_MIN = 2
"""The same of stops that are longer than `ORDINARY_STOP_NS`, and of causes that are seldom struck."""

SELDOM_RATIO = 0.05
"""A cause is seldom struck if ranks have no more of their pieces and of their time in it, in the median, as in the copy
of a batch.  Where a stop is in 3 % of rank-steps, two of one rank in six steps are both in it in one of 2000 jobs of 16
ranks."""

STOPS_MIN = 3
"""Stops of other ranks that show how long stops are in a job."""

LONG_STOP_RATIO = 0.025
"""What of all recorded steps a single stop must cost to be a fault: below it any job has one now and then."""

SPREAD_RATIO = 0.5
"""What is outside of the longest part of a step that is longer throughout: three quarters where all four are alike."""

ORDINARY_STOP_NS = 8_000_000
"""A thread that shares its core waits for the other's time slice, on Linux some 3 ms that end with a tick of 4 ms.  Two
of them are ordinary on any machine, however short the steps of the job are."""

Excess = NDArray[np.float64]
Index = NDArray[np.int64]


def lasting(cause: Cause, excess: Excess, parts: Excess) -> float:
    """Return the part of an excess that is no single event.

    Hosts and kernels stop now and then, in three steps of six by chance.  So a third of the steps do not count, unless
    the excess is in all parts of its steps.  What the trace names itself stops for no other reason.
    """
    steps = len(excess)
    if cause in ANNOTATED:
        return lasting_ratio(excess, 1)
    return max(lasting_ratio(excess, -(-steps // 3)), spread_ratio(parts.reshape(steps, -1)))


class Stops:
    """The stops seen in a job, and whether a rank's steps that stand out are some of them."""

    def __init__(self, compared: Sequence[Compared], whole_ns: float, *, is_uneven: bool = False) -> None:
        """Take what ranks have over their peers; `is_uneven`: samples are long or short, so steps are, too."""
        self._whole_ns = whole_ns
        self._is_uneven = is_uneven
        self._seen: list[tuple[int, float]] = []
        for cause in OWN_CAUSES:
            table = np.stack([mine.excess_ns[cause] for mine in compared]).astype(np.float64)
            self._seen += [(place, float(table[place, step])) for place, step in outliers(table)]
        self._seldom = [cause for cause in OWN_CAUSES if _share(compared, cause) <= SELDOM_RATIO]

    def steps_out(self, cause: Cause, excess: Excess, row: int) -> Index:
        """Return the steps in which a row of `excess` (rows, steps) stands out.

        What the trace names itself varies by itself, waits for data most: for it to be long is not enough.
        """
        return steps_out(excess, row) if cause in ANNOTATED else steps_out(excess, row, ORDINARY_STOP_NS)

    def fault_ratio(
        self, cause: Cause, excess: Excess, out: Index, places: Collection[int], parts: Excess | None = None
    ) -> float:
        """Return the part of `excess` (by step, in ns) that is more than stops; `out` are the steps that stand out.

        Two of them are enough as far as the excess is in all `parts` of each: a stop is in one.
        What `places` did is no measure for it: the ranks concerned, and those of which a fault is known.
        Where twice the same rank is chance, no more counts than the third longest of them shows; else than the second.
        """
        if len(out) == 0:
            return 0.0
        if cause in ANNOTATED:
            return 1.0
        longest = float(excess[out].max())
        others = [value for place, value in self._seen if place not in places]
        is_known = len(others) >= STOPS_MIN or longest > LONG_STOP_RATIO * self._whole_ns
        by_part = None if parts is None else parts.reshape(len(excess), -1)[out]
        if self._is_uneven and cause is Cause.COMPUTE and by_part is not None and spread_ratio(by_part) > SPREAD_RATIO:
            is_known = False  # a long sample, which is somebody's in every step
        if longest > ORDINARY_STOP_NS and is_known and longest > LONG_OUT_RATIO * max(others, default=0.0):
            return 1.0
        are_long = len(out) > 1 and float(np.sort(excess[out])[-2]) > ORDINARY_STOP_NS
        needed = LONG_STEPS_OUT_MIN if are_long or cause in self._seldom else STEPS_OUT_MIN
        share = lasting_ratio(excess, needed - 1) if len(out) >= needed else 0.0
        if by_part is not None and len(out) >= LONG_STEPS_OUT_MIN:
            share = max(share, spread_ratio(by_part))
        return share


def _share(compared: Sequence[Compared], cause: Cause) -> float:
    """Return the part of their pieces, or of their time if that is more, that ranks have in `cause`, in the median."""
    shares = [
        max(float((mine.atoms.cause == cause).mean()), float(mine.total_ns[cause].sum() / mine.total_ns.sum()))
        for mine in compared
        if mine.atoms.cause.size and mine.total_ns.any()
    ]
    return float(np.median(shares)) if shares else 1.0
