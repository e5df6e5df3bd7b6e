"""Computes when the device passed the phases of a profiled step, as the device timer does for other steps.

An estimate splits phase lengths that events measure on the device, so a window must show what filled the phases as the
device ran them, not as the host launched them.  The device passes an event that the host records at time b at

    max(b, end of the last kernel on that stream launched before b)

which follows from the window's rows alone.  The stream is the one with the most kernels, the job's own.

A device that is the bottleneck lags behind its host: when the host ends a step, and with it the window, much of that
step's work has not run yet and has no rows.  So there is a result only for a step with at least as many rows as calls
that launch one, less a tenth (SEEN_RATIO).  Otherwise use the previous step, which warmed the window.

Pure.  Rows without a known launch are ignored; if fewer than LINKED_RATIO of the rows have one, there is no result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.intervals import Intervals

__all__ = ["LINKED_RATIO", "Launch", "passed_stretches"]

LINKED_RATIO = 0.9
"""The least ratio of rows with a known launch: one without may be the last of a phase, but a few make no difference."""

SEEN_RATIO = 0.9
"""The least ratio of rows to calls that launch one; a graph launch has more rows than calls."""

Launch = tuple[int, int, int]
"""When a kernel was launched, when it ended, and its stream."""


def passed_stretches(
    stretches: Mapping[str, Intervals],
    window: tuple[int, int],
    launches: Sequence[Launch],
    device_rows: int,
    calls: Sequence[int] = (),
) -> tuple[dict[str, Intervals], tuple[int, int]] | None:
    """Return a step's `stretches` and `window` as the device passed them; None if the rows do not show it.

    `calls` are the times at which the host began the calls that launch rows.  The device keeps the host's order;
    intervals may become empty.
    """
    if not launches or len(launches) < LINKED_RATIO * device_rows:
        return None
    begin, end = window
    called = sum(begin <= at < end for at in calls)
    if sum(begin <= launch < end for launch, _, _ in launches) < SEEN_RATIO * called:
        return None
    stream = Counter(stream for _, _, stream in launches).most_common(1)[0][0]
    rows = np.array([(launch, end) for launch, end, on in launches if on == stream], dtype=np.int64)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    launched, done = rows[:, 0], np.maximum.accumulate(rows[:, 1])

    def passed(instants: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.searchsorted(launched, instants) - 1
        found: NDArray[np.int64] = np.where(at >= 0, np.maximum(instants, done[np.maximum(at, 0)]), instants)
        return found

    start, end = passed(np.array(window, dtype=np.int64)).tolist()
    return {name: passed(marks) for name, marks in stretches.items()}, (start, end)
