"""Holds one collective of the bench: its buffers, its call, and the check of every element of the result.

As in nccl-tests, the size is that of the whole array: a rank contributes one part of it to all-gather, and receives one
part from reduce-scatter.  It is rounded down to a whole number of elements per rank, at least one.

The check is exact: integers below 2^24 add up in float32 without rounding, in any order.  Each element and each rank
has a different value, so swapped, missing or duplicated parts are found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["ELEMENT_BYTES", "BenchOperation"]

ELEMENT_BYTES = 4
"""float32, which DDP reduces unless it compresses."""

PERIOD = 251
"""Period of the pattern in elements: a prime, so that a shift by a power of two is found."""


class BenchOperation:
    """One operation on arrays of up to `size_max` bytes; `resize` sets how much of them is used."""

    def __init__(self, operation: str, size_max: int, device: torch.device) -> None:
        self.operation = operation
        self._ranks, self._rank, self._device = dist.get_world_size(), dist.get_rank(), device
        count = self._whole(size_max)
        self._array = torch.zeros(count, dtype=torch.float32, device=device)
        part = 0 if operation == "all_reduce" else count // self._ranks
        self._part_array = torch.zeros(part, dtype=torch.float32, device=device)
        self._whole_view, self._part_view = self._array, self._part_array
        # Names since torch 2.13, which warns about the old ones.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(self._whole_view),
            "all_gather": lambda: all_gather(self._whole_view, self._part_view),
            "reduce_scatter": lambda: reduce_scatter(self._part_view, self._whole_view),
        }
        self.run = calls[operation]

    @property
    def size(self) -> int:
        """Current bytes of the whole array."""
        return self._whole_view.numel() * ELEMENT_BYTES

    @property
    def count(self) -> int:
        """Current elements as nccl-tests counts them: of one rank's part, or for all-reduce of the whole array."""
        return (self._whole_view if self.operation == "all_reduce" else self._part_view).numel()

    def resize(self, size: int) -> None:
        """Use `size` bytes from now on, filled with zeros, which stay zeros when they are added."""
        count = self._whole(size)
        self._whole_view = self._array[:count]
        self._part_view = self._part_array[: count // self._ranks]
        self._whole_view.zero_()
        self._part_view.zero_()

    def check(self) -> int:
        """Run once on a known pattern; return the number of wrong elements on this rank."""
        whole, part = self._whole_view, self._part_view
        offset = self._rank * part.numel()
        given = part if self.operation == "all_gather" else whole
        given.copy_(self._pattern(given.numel(), offset if self.operation == "all_gather" else 0).add_(self._rank))
        if self.operation == "all_gather":
            whole.fill_(-1.0)
        self.run()
        ranks = self._ranks
        if self.operation == "all_gather":
            expected = self._pattern(whole.numel(), 0)
            expected.view(ranks, -1).add_(torch.arange(ranks, dtype=torch.float32, device=self._device)[:, None])
        else:
            begin = 0 if self.operation == "all_reduce" else offset
            length = whole.numel() if self.operation == "all_reduce" else part.numel()
            expected = self._pattern(length, begin).mul_(ranks).add_(ranks * (ranks - 1) // 2)
        result = part if self.operation == "reduce_scatter" else whole
        wrong = int(result.ne(expected).sum().item())
        self.resize(self.size)
        return wrong

    def _pattern(self, count: int, begin: int) -> torch.Tensor:
        """Return elements `begin` to `begin + count` of the pattern, without extra memory."""
        period = torch.arange(begin, begin + PERIOD, device=self._device).remainder_(PERIOD).to(torch.float32)
        return period.repeat(-(-count // PERIOD))[:count]

    def _whole(self, size: int) -> int:
        parts = max(1, size // ELEMENT_BYTES // self._ranks)
        return parts * self._ranks if self.operation != "all_reduce" else max(1, size // ELEMENT_BYTES)
