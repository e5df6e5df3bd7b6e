"""Reads the device memory of this job from torch's caching allocator: allocated, reserved, peak and fragmentation.

The driver (nvidia-smi, the daemon) reports what the allocator has *reserved*: a job that shows 79 of 80 GiB there may
need only 50.  So both are reported, and their relation:

    fragmentation ratio = (reserved - allocated) / reserved

This is the share of reserved memory that no tensor is using.  Not all of it is lost: part of it is whole free blocks
for the next allocations.  The part inside blocks in use, which cannot be returned to the driver, is `inactive_split`.
Retries (the allocator had to free its cache to serve a request) show that fragmentation already costs time.  The ratio
is read at a step's end, when activations are gone and it is at its highest, so its trend means more than its value.

The peak is the allocator's own.  It is never reset here, because the script may read and reset it itself.  The peak of
the interval since the last reading follows from two readings: a peak that rose, or fell because it was reset, belongs
to this interval.  An unchanged peak only shows that this interval was not higher; the interval then has no peak.

Memory from elsewhere (NCCL's buffers, the context, cuBLAS workspaces of old torch) is not included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from pacecar.records import DeviceMemory

__all__ = ["MemoryMeter", "cuda_stats"]

Stats = Callable[[], Mapping[str, Any]]
"""What `torch.cuda.memory_stats_as_nested_dict` returns for one device."""


def cuda_stats(device: torch.device) -> Stats | None:
    """Return the reader of `device`'s allocator; None for a device without one."""
    if device.type != "cuda":
        return None
    return lambda: torch.cuda.memory_stats_as_nested_dict(device)


class MemoryMeter:
    """Reads one allocator; it does not query the device, so it never waits."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._last_peak: int | None = None

    def read(self) -> DeviceMemory | None:
        """Return the allocator's figures; None before its first allocation."""
        stats = self._stats()
        allocated, reserved = _bytes(stats, "allocated_bytes"), _bytes(stats, "reserved_bytes")
        if allocated is None or reserved is None:
            return None
        peak = _bytes(stats, "allocated_bytes", "peak")
        reading = DeviceMemory(
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            allocated_peak_bytes=peak,
            interval_peak_bytes=None if peak == self._last_peak else peak,
            inactive_split_bytes=_bytes(stats, "inactive_split_bytes"),
            total_allocation_retries=stats.get("num_alloc_retries"),
            total_out_of_memory=stats.get("num_ooms"),
        )
        self._last_peak = peak
        return reading


def _bytes(stats: Mapping[str, Any], name: str, which: str = "current") -> int | None:
    value = stats.get(name, {}).get("all", {}).get(which)
    return None if value is None else int(value)
