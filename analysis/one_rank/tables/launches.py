"""Sums up launches: what they cost, how long work waited to begin, and how much was queued.

An empty queue means that the host is late.  The queue of a stream holds the rows that were launched and have not begun:
it grows when a launching call begins and shrinks when a row begins.

    host      launch a  launch b                launch c
    stream 7            [a............][b]             [c]
    queue     1         1               0       1      0

Kernels of a CUDA graph share one call: they are counted separately and are in no queue.

Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report_tables import LaunchStatistics, Percentiles, QueueLength
from pacecar.analysis.trace.columns import NONE, WORKS
from pacecar.ledger.attribution import Work
from pacecar.ledger.intervals import total

from ..origins.calls import Calls
from ..origins.grouping import Groups
from ..origins.window import TableWindow

__all__ = ["launch_statistics"]

Index = NDArray[np.int64]


def launch_statistics(calls: Calls, window: TableWindow) -> LaunchStatistics:
    """Return the launches of the device rows in `window`; times of rows are those of the trace, not cut."""
    host, device, rows = calls.trace.host_rows, calls.trace.device, window.rows
    linked = rows[calls.row_call[rows] != NONE]
    call = calls.row_call[linked]
    made, number, uses = np.unique(call, return_inverse=True, return_counts=True)
    alone = uses[number] == 1
    single, its_call = linked[alone], call[alone]
    took = (host.end_ns - host.start_ns)[its_call]
    delay = np.maximum(device.start_ns[single] - host.end_ns[its_call], 0)
    is_kernel = _kernels(device.work[single])
    ran = (device.end_ns - device.start_ns)[single]
    short = is_kernel & (ran < took)
    return LaunchStatistics(
        calls=len(made),
        rows=len(linked),
        rows_unlinked=len(rows) - len(linked),
        graph_rows=int((~alone).sum()),
        call=_spread((host.end_ns - host.start_ns)[made]),
        delay=_spread(delay),
        short_kernels=int(short.sum()),
        short_kernels_ns=total(ran[short]),
        kernels=int(is_kernel.sum()),
        queues=_queues(calls, single, its_call),
    )


def _kernels(work: NDArray[np.uint8]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = work != WORKS.index(Work.COPY)
    return found


def _spread(values: Index) -> Percentiles | None:
    if len(values) == 0:
        return None
    ordered = np.sort(values)
    last = len(ordered) - 1
    return Percentiles(
        count=len(ordered),
        min_ns=int(ordered[0]),
        median_ns=int(ordered[last // 2]),
        p95_ns=int(ordered[last * 95 // 100]),
        max_ns=int(ordered[-1]),
    )


def _queues(calls: Calls, rows: Index, call: Index) -> list[QueueLength]:
    """Return the queue of each stream, the one with the most launches first."""
    device, host = calls.trace.device, calls.trace.host_rows
    streams = Groups.of(device.device[rows].astype(np.int64), device.stream[rows])
    found = []
    for group in range(streams.count):
        mine = streams.rows(group)
        launched, began = np.sort(host.start_ns[call[mine]]), np.sort(device.start_ns[rows[mine]])
        times = np.concatenate((launched, began))
        order = np.argsort(times, kind="stable")  # work that is launched and begins at one instant was waiting then
        length = np.cumsum(np.where(order < len(launched), 1, -1))
        times = times[order]
        held = np.diff(times)
        span = int(times[-1] - times[0])
        found.append(
            QueueLength(
                device=int(streams.keys[0][group]),
                stream=int(streams.keys[1][group]),
                launches=len(mine),
                mean=sum(a * b for a, b in zip(length[:-1].tolist(), held.tolist(), strict=True)) / span
                if span
                else 0.0,
                max=int(length.max()),
                empty_ns=total(held[length[:-1] <= 0]),
            )
        )
    return sorted(found, key=lambda queue: (-queue.launches, queue.device, queue.stream))
