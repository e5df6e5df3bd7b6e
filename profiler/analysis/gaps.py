"""Classifies the idle gaps of the device by what ended them: a late launch, launch latency or a synchronization.

The ledger says what the host was doing in a gap.  This says what the device was waiting for, which is a different
question.  A device that idles because the host is slow needs fewer or larger kernels (or a graph).  One that idles
because the host waited for it to finish first needs that synchronization removed.  One whose next kernel was launched
in time but began late waits for another stream or for the hardware.

    host      sync.....|  launch            launch
    device    ####......................    ####..........####
                  ^ sync                        ^ launch_late (launched after the device ran dry)

Which launch ended the gap follows from the correlation of the first row to begin there.  Left out: what made the host
late.
"""

from __future__ import annotations

import numpy as np

from ..ledger.intervals import Intervals, covers, union
from ..trace.columns import NONE, HostKind, Trace
from .report import Gap

__all__ = ["device_gaps"]

_CAUSES = ("launch_late", "launch_latency", "sync", "unknown")


def device_gaps(trace: Trace, busy: Intervals) -> list[Gap]:
    """Return the gaps between the rows of the union `busy` of device work by cause, the longest first.

    Before the first work and after the last nothing is known about the cause, so those do not count as gaps.
    """
    if len(busy) < 2:
        return []
    start, end = busy[:-1, 1], busy[1:, 0]
    # Rows are sorted by start, so the first row at or after the gap's end is one that ends it.
    device = trace.device
    ending = np.minimum(np.searchsorted(device.start_ns, end), len(device.start_ns) - 1)
    launch = np.where(device.start_ns[ending] == end, device.launch_ns[ending], NONE)
    waited = covers(_waits(trace), start)
    cause = np.where(launch >= start, np.where(waited, 2, 0), 1)
    cause[launch == NONE] = 3
    durations = end - start
    gaps = [
        Gap(cause=name, count=int((cause == index).sum()), duration_ns=int(durations[cause == index].sum()))
        for index, name in enumerate(_CAUSES)
    ]
    return sorted((gap for gap in gaps if gap.count), key=lambda gap: -gap.duration_ns)


def _waits(trace: Trace) -> Intervals:
    """Return when a thread that launches work was waiting for the device."""
    host = trace.host_rows
    launching = np.unique(host.thread[host.kind == HostKind.LAUNCH])
    waiting = (host.kind == HostKind.SYNC) & np.isin(host.thread, launching)
    # One nanosecond more: a wait that ends at the instant at which the device runs dry was a wait for the device.
    return union(np.stack((host.start_ns[waiting], host.end_ns[waiting] + 1), axis=1))
