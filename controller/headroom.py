"""Does a larger micro-batch fit into the device's memory?  What its peaks so far say.

    peak(m) = fixed + m * slope        weights, gradients and optimizer state; activations of m samples or tokens

One size seen gives a bound (all of it might grow: the fixed part is what makes a guess from one size too pessimistic),
two give the line.  `max_memory_allocated` only ever grows and belongs to the script, so it is read before and after a
larger size ran and never reset; where the peak did not move, something else (an evaluation, say) is higher, and nothing
is learnt.

Left out: fragmentation (the allocator's retries say when it begins to cost), other processes on the device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

__all__ = ["Headroom", "predict"]

SIZES_MAX = 16
"""Sizes whose peaks are kept: each is larger than the one before, so a few doublings are all there are."""

FULL_RATIO = 0.95
"""A predicted peak over this share of the device's memory is not even tried: an allocator at its end flushes its cache
and pieces of it stay behind."""


def predict(peaks: Mapping[int, int], size: int) -> int | None:
    """Return the peak in bytes expected at `size` by the line through the two largest sizes seen; None before that."""
    if len(peaks) < 2:
        return None
    small, large = sorted(peaks)[-2:]
    slope = (peaks[large] - peaks[small]) / (large - small)
    return round(peaks[large] + slope * (size - large))


class Headroom:
    """What the allocator of `device` says about sizes; on a device without one, nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._peaks: dict[int, int] = {}
        self._retries = 0

    def refuse(self, present: int, size: int) -> str | None:
        """Learn the peak of the `present` size; return why `size` should not even be tried, or None."""
        if self._device.type != "cuda":
            return None
        self._learn(present)
        self._retries = self._read_retries()
        peak = predict(self._peaks, size)
        total = torch.cuda.get_device_properties(self._device).total_memory
        if peak is None or peak <= FULL_RATIO * total:
            return None
        return f"it would take {peak / 2**30:.1f} GiB of the device's {total / 2**30:.1f}"

    def is_strained(self, size: int) -> bool:
        """Learn the peak of `size`, which just ran; return whether the allocator had to flush its cache for it."""
        if self._device.type != "cuda":
            return False
        self._learn(size)
        return self._read_retries() > self._retries

    def _learn(self, size: int) -> None:
        peak = int(torch.cuda.max_memory_allocated(self._device))
        if peak > max(self._peaks.values(), default=-1) and (size in self._peaks or len(self._peaks) < SIZES_MAX):
            self._peaks[size] = peak

    def _read_retries(self) -> int:
        return int(torch.cuda.memory_stats(self._device).get("num_alloc_retries", 0))
