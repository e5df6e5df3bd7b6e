"""Forecasts whether a larger micro-batch fits into memory, from the peaks of the sizes that ran.

    peak(m) = fixed + m * slope        weights, gradients and optimizer state; activations of m samples or tokens

One size gives a bound (as if all of it grew, which is too pessimistic because of the fixed part), two give the line.
Peaks (`max_memory_allocated`; on a CPU the most that the process held, getrusage(2)) only ever grow and belong to the
script, so they are read before and after a larger size ran and never reset.  If the peak did not move, something else
(an evaluation, say) is higher, and there is nothing to learn.

The limit is what this process holds plus what it could still take (`room`, from the node's daemon), since a neighbour
on the device leaves less than its size.  A device reports that it runs out of memory, so a harmless first run can find
out what a guess cannot.  A host kills the process, so there the pessimistic bound counts as well.

Ignored: fragmentation (the allocator's retries show when it begins to cost); a container's own limit, whose page cache
cannot be told from what is held; a neighbour that grows later.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from pathlib import Path

import torch

from pacecar.kernel_files.reader import KernelFiles

__all__ = ["MemoryForecast", "predict", "unused_bytes"]

SIZES_MAX = 16
"""Most sizes whose peaks are kept: each is larger than the one before, so there are only a few doublings."""

FULL_RATIO = 0.95
"""A predicted peak over this share of the memory is not even tried: an allocator that runs out flushes its cache, and
fragments of it remain."""


def predict(peaks: Mapping[int, int], size: int) -> int | None:
    """Return the peak in bytes expected at `size`, by the line through the two largest sizes; None with fewer."""
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = (peaks[large] - peaks[small]) / (large - small)
    return round(peaks[large] + slope * (size - large))


def unused_bytes(device: torch.device) -> int:
    """Return the memory of a CUDA `device` that this process holds and never had in tensors."""
    return max(0, int(torch.cuda.memory_reserved(device)) - int(torch.cuda.max_memory_allocated(device)))


class MemoryForecast:
    """Forecasts for the memory of `device`; none unless it is CUDA or a CPU."""

    def __init__(self, device: torch.device, *, statm: Path = Path("/proc/self/statm")) -> None:
        self._device = device
        self._statm = statm
        self._peaks: dict[int, int] = {}
        self._retries = 0

    def refuse(self, present: int, size: int, room: int | None = None) -> str | None:
        """Learn the peak of the `present` size; return why `size` should not even be tried, or None.

        `room` is what this process could still take beyond what it holds and uses; None: unknown.
        """
        if self._device.type == "cpu":
            return None if room is None else self._refuse_on_host(present, size, room)
        if self._device.type != "cuda":
            return None
        self._learn(present, int(torch.cuda.max_memory_allocated(self._device)))
        self._retries = self._read_retries()
        peak = predict(self._peaks, size)
        total = int(torch.cuda.get_device_properties(self._device).total_memory)
        if room is not None:  # it counts what this process holds and never used
            total = min(total, int(torch.cuda.max_memory_allocated(self._device)) + room)
        if peak is None or peak <= FULL_RATIO * total:
            return None
        return f"it would take {peak / 2**30:.1f} GiB of the device's {total / 2**30:.1f}"

    def is_strained(self, size: int) -> bool:
        """Learn the peak of `size`, which just ran; return whether the allocator had to flush its cache for it."""
        if self._device.type == "cpu":
            self._learn(size, _host_peak_bytes())
        if self._device.type != "cuda":
            return False
        self._learn(size, int(torch.cuda.max_memory_allocated(self._device)))
        return self._read_retries() > self._retries

    def _refuse_on_host(self, present: int, size: int, room: int) -> str | None:
        held = self._held_bytes()
        if held is None:
            return None
        most = _host_peak_bytes()
        self._learn(present, most)
        peak = predict(self._peaks, size)
        if peak is None:
            peak = most * size // max(1, present)
        if peak <= FULL_RATIO * (held + room):
            return None
        return f"it may take {peak / 2**30:.1f} GiB where {(held + room) / 2**30:.1f} are to be had"

    def _held_bytes(self) -> int | None:
        """Return what this process holds in memory (proc(5), /proc/PID/statm, the second number)."""
        pages = (KernelFiles().text(self._statm) or "").split()[1:2]
        return int(pages[0]) * resource.getpagesize() if pages and pages[0].isdigit() else None

    def _learn(self, size: int, peak: int) -> None:
        if peak > max(self._peaks.values(), default=-1) and (size in self._peaks or len(self._peaks) < SIZES_MAX):
            self._peaks[size] = peak

    def _read_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))


def _host_peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
