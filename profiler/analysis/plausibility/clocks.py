"""Checks the device's clock against the host's: nothing begins before its launch, no synchronization ends too early.

The profiler converts the device's times to the host's clock.  Where that went wrong, all work lies at a constant
distance from where it belongs: sums of device time are right, but steps and the causes of idle time, which the host
marks, are those of other work.  So where the clocks disagree only the device's rows are kept; and not even those where
they span a much longer or shorter time than their launches do, which are times in another unit.

    host      launch |----| synchronize       kernel before launch: the device's clock is behind
    device    ####                            kernel after the return of a synchronization: it is ahead
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pacecar.formatting.quantities import duration, plural

from ...trace.columns import NONE, HostKind, Trace, TraceWarning
from ...windows.trace_spans import SKEW_NS_MAX
from .selection import without_host

__all__ = ["check_clocks"]

EARLY_ROWS_MAX, EARLY_RATIO_MAX = 2, 0.01
"""Up to so many of the launched rows, or this part of them, single rows are wrong; beyond both the clock is."""

LATE_RATIO_MAX = 0.5
"""Beyond this part of the synchronizations the clock is wrong.  In none of the traces that others recorded is any."""

UNIT_RATIO_MIN = 10
"""Two units of time are a factor of 1000 apart; kernels that wait in a queue for long spread them much less."""

DETACHED_NS = 10**9
"""A device that begins its first work later than this after the host's last row did not do what that host launched."""


def check_clocks(trace: Trace) -> tuple[Trace, list[TraceWarning]]:
    """Return the trace without its host rows where the clocks disagree, and without launches after their kernels."""
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
    """Return by how much work that was launched before each synchronization of a device ended after its return.

    With several devices it is not known which of them was waited for: nothing is returned.
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
