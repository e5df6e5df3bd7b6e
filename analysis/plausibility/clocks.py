"""Checks the device's clock against the host's: nothing begins before its launch, no synchronization ends too early.

The profiler converts the device's times to the host's clock.  If that fails, all work is shifted by a constant: sums of
device time are right, but steps and causes of idle time, which the host marks, belong to other work.  So if the clocks
disagree, only the device's rows are kept.  If they span a much longer or shorter time than their launches, the times
have another unit, and the trace is refused.

    host      launch |----| synchronize       kernel before launch: the device's clock is behind
    device    ####                            kernel after the return of a synchronization: it is ahead
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.quantities import duration, plural
from pacecar.ledger.attribution import SKEW_NS_MAX

from ..trace.columns import NONE, HostKind, Trace, TraceWarning
from .selection import without_host

__all__ = ["check_clocks"]

EARLY_ROWS_MAX, EARLY_RATIO_MAX = 2, 0.01
"""Up to this number of the launched rows, or this share, single rows are wrong; beyond both, the clock is."""

LATE_RATIO_MAX = 0.5
"""Beyond this share of early synchronizations the clock is wrong.  No trace recorded elsewhere had any."""

UNIT_RATIO_MIN = 10
"""Two units of time differ by a factor of 1000; long queues stretch the span much less."""

DETACHED_NS = 10**9
"""If the device begins this long after the host's last row, it did not run what that host launched."""


def check_clocks(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without its host rows if the clocks disagree, and without launches after their kernels."""
    device = trace.device
    launched = np.flatnonzero(device.launch_ns != NONE)
    if len(launched) == 0:
        return trace, []
    lag = device.start_ns[launched] - device.launch_ns[launched]
    early = launched[lag < 0]
    skew = -int(lag.min())
    late = _latest_past_synchronizations(trace, launched)
    wrong = None
    if (lag < -SKEW_NS_MAX).sum() > max(EARLY_ROWS_MAX, EARLY_RATIO_MAX * len(launched)):
        wrong = f"{len(early)} of {len(launched)} kernels and copies begin before their launch, up to {duration(skew)}"
    elif (late > SKEW_NS_MAX).sum() > LATE_RATIO_MAX * len(late):
        wrong = f"{plural(int((late > 0).sum()), 'synchronization')} returned up to {duration(int(late.max()))} early"
    elif lag.min() > DETACHED_NS and device.start_ns[0] > trace.host_rows.end_ns.max():
        wrong = f"all work of the device begins {duration(int(lag.min()))} or more after its launch"
    if wrong is not None and len(launched) > 1:
        spans = [int(np.ptp(times[launched])) for times in (device.start_ns, device.launch_ns)]
        if max(spans) > UNIT_RATIO_MIN * min(spans):
            message = f"{wrong}, and kernels span {duration(spans[0])}, their launches {duration(spans[1])}"
            message += ": the host's times and the device's are not in the same unit"
            return trace, [TraceWarning("clocks_differ", message, effect="refused")]
    if wrong is not None:
        message = f"the device's clock and the host's disagree ({wrong}): steps and causes of idle time are unknown"
        return without_host(trace), [TraceWarning("clocks_disagree", message, len(early) or 1, "unknown")]
    if not len(early):
        return trace, []
    message = f"{plural(len(early), 'kernel')} or copies begin before their launch, up to {duration(skew)}"
    if skew <= SKEW_NS_MAX:
        return trace, [TraceWarning("early_kernels", f"{message}: causes of idle time are off by as much", len(early))]
    launch = device.launch_ns.copy()
    launch[early] = NONE
    trace = replace(trace, device=replace(device, launch_ns=launch))
    return trace, [TraceWarning("early_kernels", f"{message}: those launches are not used", len(early), "unknown")]


def _latest_past_synchronizations(trace: Trace, launched: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each synchronization of a device, return how long after its return the work launched before it ended.

    Empty for several devices: the trace does not say which one was waited for.
    """
    device, host = trace.device, trace.host_rows
    waits = [number for number, name in enumerate(trace.names) if name.endswith("DeviceSynchronize")]
    rows = np.flatnonzero((host.kind == HostKind.SYNC) & np.isin(host.name, waits))
    if len(rows) == 0 or (device.device != device.device[0]).any():
        return np.empty(0, dtype=np.int64)
    order = launched[np.argsort(device.launch_ns[launched], kind="stable")]
    before = np.searchsorted(device.launch_ns[order], host.start_ns[rows]) - 1
    busy_until = np.maximum.accumulate(device.end_ns[order])
    late: NDArray[np.int64] = (busy_until[np.maximum(before, 0)] - host.end_ns[rows])[before >= 0]
    return late
