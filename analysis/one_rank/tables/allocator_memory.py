"""Computes the allocator's bytes over time, the peak and what ran at the peak.

`profile_memory` writes an event at each allocation and each free, with the totals after it.  torch before 1.9 wrote
only the change; then bytes are relative to the trace's beginning, and the absolute level of a peak is unknown.

Pure.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report_tables import MemoryPoint, MemoryTimeline
from pacecar.analysis.trace.columns import NONE
from pacecar.analysis.trace.details.detail_columns import MemoryRows
from pacecar.ledger.intervals import total

from ..origins.calls import Calls

__all__ = ["POINTS_MAX", "memory_timelines"]

POINTS_MAX = 200
"""The most points of a timeline, about the width of a picture; the peak is always kept."""

ALLOCATING = ("aten::empty", "aten::resize_")

DEVICE_TYPES = {0: "cpu", 1: "cuda", 6: "hip", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}
"""c10/core/DeviceType.h; on ROCm torch calls its devices cuda."""

Index = NDArray[np.int64]


def memory_timelines(calls: Calls) -> list[MemoryTimeline]:
    """Return the allocator's bytes of each device over the whole trace, the device with the most first."""
    details = calls.trace.details
    if details is None:
        return []
    memory = details.memory
    found = [_timeline(calls, memory, number) for number in range(len(memory.devices))]
    return sorted(found, key=lambda one: (-one.peak_bytes, one.device))


def _timeline(calls: Calls, memory: MemoryRows, number: int) -> MemoryTimeline:
    rows = np.flatnonzero(memory.device == number)
    change = memory.bytes[rows]
    is_relative = bool((memory.allocated[rows] == NONE).any())
    level = np.cumsum(change) if is_relative else memory.allocated[rows]
    reserved = memory.reserved[rows]
    has_reserved = not is_relative and bool((reserved > 0).any())
    at = int(level.argmax())
    peak = rows[at]
    inside = calls.nesting.innermost(memory.thread[peak : peak + 1], memory.time_ns[peak : peak + 1])
    operator = int(calls.nesting.nearest(inside, calls.is_operator & ~_allocates(calls))[0])
    module = int(calls.module[operator]) if operator != NONE else NONE
    return MemoryTimeline(
        device=_device(*memory.devices[number]),
        events=len(rows),
        is_relative=is_relative,
        first_bytes=int(level[0]),
        last_bytes=int(level[-1]),
        peak_bytes=int(level[at]),
        peak_ns=int(memory.time_ns[peak]),
        peak_operator=calls.name(operator) if operator != NONE else None,
        peak_module=calls.modules[module] if module != NONE else None,
        reserved_peak_bytes=int(reserved.max()) if has_reserved else None,
        allocated_bytes=total(change[change > 0]),
        freed_bytes=total(-change[change < 0]),
        points=_points(memory.time_ns[rows], level, reserved if has_reserved else None),
    )


def _allocates(calls: Calls) -> NDArray[np.bool_]:
    """Return which host rows only allocate: the operator around them needs the memory."""
    names = calls.trace.names
    found = np.array([name.startswith(ALLOCATING) for name in names] or [False], dtype=np.bool_)
    allocates: NDArray[np.bool_] = found[calls.trace.host_rows.name]
    return allocates


def _points(time_ns: Index, level: Index, reserved: Index | None) -> list[MemoryPoint]:
    """Return the maximum of each of at most POINTS_MAX equal parts of time; a part without events has no point."""
    first, last = int(time_ns[0]), int(time_ns[-1])
    width = max((last - first) // POINTS_MAX + 1, 1)
    part = (time_ns - first) // width
    begins = np.flatnonzero(np.concatenate(([True], part[1:] != part[:-1])))
    most = np.maximum.reduceat(level, begins).tolist()
    held = np.maximum.reduceat(reserved, begins).tolist() if reserved is not None else [None] * len(begins)
    return [
        MemoryPoint(start_ns=first + number * width, allocated_bytes=allocated, reserved_bytes=kept)
        for number, allocated, kept in zip(part[begins].tolist(), most, held, strict=True)
    ]


def _device(kind: int, number: int) -> str:
    word = DEVICE_TYPES.get(kind, f"device type {kind}")
    return word if kind == 0 or number < 0 else f"{word}:{number}"
