"""Sums up how evenly the job's all-to-alls are spread over its ranks.

If experts, tables or sequences are spread unevenly, an all-to-all moves different amounts on each rank, and all wait
for the rank with the most.  Durations alone mislead: the rank with the least to move waits inside the all-to-all.

Pure: arrivals in, a row for each rank out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..document.report_tables import AllToAllRank
from ..trace.columns import NONE, HostKind, Trace
from .collective_arrivals import Arrivals, by_trace

__all__ = ["all_to_all_ranks"]

OPERATION = "all_to_all"


def all_to_all_ranks(traces: Sequence[Trace], arrivals: Sequence[Arrivals]) -> list[AllToAllRank]:
    """Return the all-to-alls of each of `traces`, with the waits of matched ones; empty without any."""
    counts, sizes, durations = zip(*(_of_trace(trace) for trace in traces), strict=True) if traces else ((), (), ())
    if not any(counts):
        return []
    known = [size for size in sizes if size is not None]
    mean_size = sum(known) / len(known) if len(known) == len(traces) else None
    mean_duration = sum(durations) / len(durations)
    groups = by_trace(arrivals, len(traces))
    rows = []
    for place, trace in enumerate(traces):
        assert trace.rank is not None
        size, split = sizes[place], _split(groups[place])
        rows.append(
            AllToAllRank(
                rank=trace.rank,
                count=counts[place],
                bytes=size,
                bytes_ratio=size / mean_size if size is not None and mean_size else None,
                duration_ns=durations[place],
                duration_ratio=durations[place] / mean_duration if mean_duration else None,
                wait_ns=None if split is None else split[0],
                wire_ns=None if split is None else split[1],
            )
        )
    return rows


def _of_trace(trace: Trace) -> tuple[int, int | None, int]:
    """Return count, bytes and duration of a trace's all-to-alls; no bytes if the size of any is unknown."""
    is_wanted = np.array([each.operation == OPERATION for each in trace.collectives] or [False], dtype=np.bool_)
    device, host = trace.device, trace.host_rows
    work = host.kind == HostKind.COLLECTIVE_WORK
    number = np.concatenate((device.collective, host.collective[work]))
    duration = np.concatenate((device.end_ns - device.start_ns, (host.end_ns - host.start_ns)[work]))
    mine = np.flatnonzero((number != NONE) & is_wanted[number])
    sizes = [trace.collectives[each].bytes for each in number[mine].tolist()]
    known = [size for size in sizes if size is not None]
    return len(mine), sum(known) if len(known) == len(sizes) else None, sum(duration[mine].tolist())


def _split(groups: Sequence[tuple[Arrivals, int]]) -> tuple[int, int] | None:
    """Return waiting and wire time of a rank's matched all-to-alls; None without any."""
    wait = wire = found = 0
    for mine, column in groups:
        at = [number for number, meta in enumerate(mine.group.collectives) if meta.operation == OPERATION]
        there = np.array([number for number in at if mine.has[number, column]], dtype=np.int64)
        found += len(there)
        wait += int(mine.wait_ns[there, column].sum())
        wire += int(mine.wire_ns[there, column].sum())
    return (wait, wire) if found else None
