"""Separates faults that last a few steps from the random stops of hosts and kernels on any machine.

One small job in three has a random stop of a few milliseconds; no rank is blamed for it.  A fault is

    what the trace itself names;
    what hits one rank three times, or twice if it is longer than any ordinary stop or rarely occurs by chance;
    a single stop that is far longer than those of other ranks, if several were seen, or costs as much as a fault.

If two ranks stop once each for about as long, that is normal for these hosts.  A single stop must also be longer than
the time slice of another process, which does not depend on the length of a step.  Kernels that hardly vary are not
evidence: hosts stop beside a perfectly regular device too.

Pure: arrays in, answers out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from ..graph.causes import OWN_CAUSES, CauseCode
from .peers import Compared
from .significance import LONG_OUT_RATIO, lasting_ratio, outliers, spread_ratio, steps_out

__all__ = ["ANNOTATED", "LONG_STOP_RATIO", "Stops", "lasting"]

ANNOTATED = (CauseCode.DATA_WAIT, CauseCode.CHECKPOINT)
"""Causes that the trace itself names, so a single step of them can be named."""

STEPS_OUT_MIN = 3
"""Steps that must stand out where hosts and kernels stop randomly: the same rank twice is chance, a third time not."""

LONG_STEPS_OUT_MIN = 2
"""The same for stops longer than `ORDINARY_STOP_NS` and for rarely hit causes."""

RARE_RATIO = 0.05
"""A cause is rarely hit if the median rank has at most this share of its pieces and time in it, as for a batch's copy.
If 3 % of rank-steps have a stop, two of one rank in six steps both hit it in one of 2000 jobs of 16 ranks."""

STOPS_MIN = 3
"""Stops of other ranks that are enough to show how long stops in a job are."""

LONG_STOP_RATIO = 0.025
"""The share of all recorded steps that a single stop must cost to be a fault; any job has shorter ones."""

SPREAD_RATIO = 0.5
"""The share outside the longest part, for a step that is longer throughout; three quarters if all four are alike."""

ORDINARY_STOP_NS = 8_000_000
"""A thread that shares its core waits for the other's time slice: on Linux about 3 ms, rounded up to a tick of 4 ms.
Two slices are ordinary on any machine, however short the job's steps are."""

Excess = NDArray[np.float64]
Index = NDArray[np.int64]


def lasting(cause: CauseCode, excess: Excess, parts: Excess) -> float:
    """Return the part of an excess that is not a single event.

    Hosts and kernels stop randomly, by chance in three steps of six.  So a third of the steps do not count, unless the
    excess is in all parts of its steps.  Causes that the trace itself names have no such stops.
    """
    steps = len(excess)
    if cause in ANNOTATED:
        return lasting_ratio(excess, 1)
    return max(lasting_ratio(excess, -(-steps // 3)), spread_ratio(parts.reshape(steps, -1)))


class Stops:
    """The stops seen in a job, and whether a rank's steps that stand out are some of them."""

    def __init__(self, compared: Sequence[Compared], whole_ns: float, *, is_uneven: bool = False) -> None:
        """Store the ranks' excess over their peers; `is_uneven`: samples differ in length, and so do steps."""
        self._whole_ns = whole_ns
        self._is_uneven = is_uneven
        self._seen: list[tuple[int, float]] = []
        for cause in OWN_CAUSES:
            table = np.stack([mine.excess_ns[cause] for mine in compared]).astype(np.float64)
            self._seen += [(place, float(table[place, step])) for place, step in outliers(table)]
        self._rarely_hit = [cause for cause in OWN_CAUSES if _share(compared, cause) <= RARE_RATIO]

    def steps_out(self, cause: CauseCode, excess: Excess, row: int) -> Index:
        """Return the steps in which a row of `excess` (rows, steps) stands out.

        Causes that the trace itself names vary on their own, waits for data most, so length alone is not enough.
        """
        return steps_out(excess, row) if cause in ANNOTATED else steps_out(excess, row, ORDINARY_STOP_NS)

    def fault_ratio(
        self, cause: CauseCode, excess: Excess, out: Index, places: Collection[int], parts: Excess | None = None
    ) -> float:
        """Return the part of `excess` (by step, in ns) that is more than stops; `out` are the steps that stand out.

        Two steps are enough as far as the excess is in all `parts` of each, because a stop is in one part.  `places`
        are the ranks concerned and those with known faults; their stops are not a measure.  Where the same rank twice
        is chance, the third longest step limits what counts, else the second.
        """
        if len(out) == 0:
            return 0.0
        if cause in ANNOTATED:
            return 1.0
        longest = float(excess[out].max())
        others = [value for place, value in self._seen if place not in places]
        is_known = len(others) >= STOPS_MIN or longest > LONG_STOP_RATIO * self._whole_ns
        by_part = None if parts is None else parts.reshape(len(excess), -1)[out]
        if (
            self._is_uneven
            and cause is CauseCode.COMPUTE
            and by_part is not None
            and spread_ratio(by_part) > SPREAD_RATIO
        ):
            is_known = False  # a long sample, which some rank has in every step
        if longest > ORDINARY_STOP_NS and is_known and longest > LONG_OUT_RATIO * max(others, default=0.0):
            return 1.0
        are_long = len(out) > 1 and float(np.sort(excess[out])[-2]) > ORDINARY_STOP_NS
        needed = LONG_STEPS_OUT_MIN if are_long or cause in self._rarely_hit else STEPS_OUT_MIN
        share = lasting_ratio(excess, needed - 1) if len(out) >= needed else 0.0
        if by_part is not None and len(out) >= LONG_STEPS_OUT_MIN:
            share = max(share, spread_ratio(by_part))
        return share


def _share(compared: Sequence[Compared], cause: CauseCode) -> float:
    """Return the median rank's share of pieces or of time in `cause`, whichever is larger."""
    shares = [
        max(float((mine.atoms.cause == cause).mean()), float(mine.total_ns[cause].sum() / mine.total_ns.sum()))
        for mine in compared
        if mine.atoms.cause.size and mine.total_ns.any()
    ]
    return float(np.median(shares)) if shares else 1.0
