"""How much of the device's memory does the job use, and how well?  Read from torch's caching allocator.

What the driver reports (nvidia-smi, the daemon) is what the allocator has *reserved*: a job that shows 79 of 80 GiB
there may need 50.  So both are given, and between them:

    fragmentation ratio = (reserved - allocated) / reserved

It says which share of the reserved memory no tensor is using at this instant.  That is not all lost: part of it is
whole free blocks that the next allocation takes.  The part in the middle of blocks that are in use, which cannot be
given back to the driver, is `inactive_split`; retries (the allocator had to free its cache to serve a request) are the
sign that fragmentation already costs time.  At a step's end, when it is read, activations are gone, so the ratio is at
its highest there: follow it over time rather than its height.

The peak is the allocator's own, and never reset from here, because the script may reset and read it itself.  What it
was since the last reading follows from two of them: a peak that has risen, or was reset meanwhile (it fell), is of this
interval; one that stands still says only that this interval was not higher, and then the interval has no peak.

Left out: memory that does not come from this allocator (NCCL's buffers, the context, cuBLAS workspaces of old torch).
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
    """Reads one allocator; asks no question of the device and so waits for nothing."""

    def __init__(self, stats: Stats) -> None:
        self._stats = stats
        self._last_peak: int | None = None

    def read(self) -> DeviceMemory | None:
        """Return what the allocator says; None before it gave out the first byte."""
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
