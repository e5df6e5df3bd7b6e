"""Checks that each stream runs one thing at a time, as streams do.

Real traces overlap a little: times in whole microseconds touch, and with programmatic dependent launch (CUDA 12, Hopper
and later) a kernel may begin while the one before it ends (74 overlaps of at most 4 us in a trace recorded elsewhere).
But no row runs beside many later ones.  Parallel branches of a graph may have one stream; kernels of a graph share the
correlation of its launch, so kernels that share theirs with two or more others are ignored.

Only for CUDA: a stream in a ROCm trace is a hardware queue, which several streams share.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.quantities import percent, plural

from ..trace.columns import NONE, HostKind, Trace, TraceWarning
from .selection import with_device

__all__ = ["check_streams"]

LATER_ROWS_MAX = 2
"""The most later rows of a stream that may begin while a row runs: one is usual, two have been seen."""

LATER_DEPENDENTS_MAX = 8
"""The same if kernels may be dependent launches, in a chain beside a long one; but those do not end before it."""

TOUCH_NS = 1000
"""Rows that overlap by less only touch: times may be whole microseconds."""

OTHER_CALLS, OTHER_GPUS = ("hip", "ur", "ze", "mtia"), ("AMD", "Instinct", "Intel", "MTIA")
"""Prefixes of launch calls, and words in device names, that are not CUDA's."""

LONG_RATIO_MAX = 0.1
"""From this share on, rows that run beside later ones are not a few broken rows: the trace contradicts itself."""

OVERLAP_RATIO_SAID = 0.05
"""From this share of the streams' time on, an overlap is reported.  Dependent launches alone gave 0.6 %."""


def check_streams(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without rows that run beside later ones of their stream; refuse it if there are many."""
    device = trace.device
    rows = np.flatnonzero((device.stream != NONE) & (device.end_ns > device.start_ns) & ~_of_graphs(trace))
    limit = _later_rows_max(trace)
    if limit is None or len(rows) < LATER_ROWS_MAX:
        return trace, []
    stream = device.stream[rows]
    lane = np.searchsorted(np.unique(stream), stream) + (device.device[rows].astype(np.int64) << 32)
    order = np.argsort(lane, kind="stable")
    rows, lane = rows[order], lane[order]
    is_long = np.zeros(len(device.start_ns), dtype=np.bool_)
    overlap = busy = 0
    for lane_rows in np.split(rows, np.flatnonzero(np.diff(lane)) + 1):
        start, end = device.start_ns[lane_rows], device.end_ns[lane_rows]
        place = np.arange(len(start))
        later = np.searchsorted(start, end - TOUCH_NS) - place - 1
        outlasted = np.searchsorted(np.sort(end), end - TOUCH_NS) - place  # later rows that end before this one
        overlong = (later > limit) | (outlasted > LATER_ROWS_MAX)
        is_long[lane_rows] = overlong
        start, end = start[~overlong], end[~overlong]
        busy += int((end - start).sum())
        overlap += int(np.maximum(np.minimum(np.maximum.accumulate(end)[:-1], end[1:]) - start[1:], 0).sum())
    count = int(is_long.sum())
    if count > LONG_RATIO_MAX * len(rows):
        message = (
            f"{count} of {len(rows)} kernels and copies run beside later ones of their own stream, which runs one at a"
            " time: durations in another unit, or the rows of several recordings"
        )
        return trace, [TraceWarning("streams_overlap", message, count, "refused")]
    warnings = []
    if count:
        message = f"{plural(count, 'kernel')} or copies that run beside later ones of their own stream were left out"
        warnings.append(TraceWarning("overlong_rows", message, count, "left_out"))
        trace = with_device(trace, ~is_long)
    if busy and overlap > OVERLAP_RATIO_SAID * busy:
        message = (
            f"for {percent(overlap / busy)} of its time a stream runs two kernels, which only dependent launches do:"
            " these may be the rows of several recordings"
        )
        warnings.append(TraceWarning("streams_overlap", message))
    return trace, warnings


def _later_rows_max(trace: Trace) -> int | None:
    """Return how many later rows may begin while a row runs, None if streams are not serial."""
    host = trace.host_rows
    calls = {trace.names[number] for number in np.unique(host.name[host.kind == HostKind.LAUNCH]).tolist()}
    is_other = any(call.startswith(OTHER_CALLS) for call in calls)
    if is_other or any(word in gpu for gpu in trace.gpus for word in OTHER_GPUS):
        return None
    return LATER_DEPENDENTS_MAX if not calls or any("LaunchKernelEx" in call for call in calls) else LATER_ROWS_MAX


def _of_graphs(trace: Trace) -> NDArray[np.bool_]:
    """Return which device rows share their correlation with two or more others."""
    correlation = trace.device.correlation
    in_order = np.sort(correlation)
    shared = in_order[LATER_ROWS_MAX:][in_order[LATER_ROWS_MAX:] == in_order[:-LATER_ROWS_MAX]]
    found: NDArray[np.bool_] = np.isin(correlation, shared[shared != NONE])
    return found
