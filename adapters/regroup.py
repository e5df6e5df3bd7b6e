"""Forms other micro-batches from the loader batches that a library's loop hands out one at a time.

The obvious way to another micro-batch is another batch size of the loader and another number of accumulation steps.  In
a running trainer that is wrong: its progress, its schedules, its checkpoints and what a resumed run skips all count
loader batches.  So the loop makes the same calls, one for each loader batch, and only what a call computes changes:

    loader batches of 4, update of 4     [0123][4567][89ab][cdef]
    micro_batch 4   (as it came)          0123  4567  89ab  cdef
    micro_batch 2   (cut)                01 23 45 67 89 ab cd ef
    micro_batch 8   (combined)            .     0..7  .     8..f       nothing is computed at the first call

Every update sees the same samples, and the last piece is computed in the call in which the loop synchronizes.  A piece
has a `share`: its weight in units of loader batches, for a loss that is a mean over samples.  Only batches with the
same number of samples and the same shapes are combined, so that a mean of means is the mean; what differs (another
padding, the rest of an epoch) goes through by itself.  Ranks may group differently: only the last piece of an update
synchronizes.

The memory of the first updates shows how large a micro-batch may be (`controller.knobs.batch.micro_batch_knobs`), and a
failed step of a trainer cannot be redone.  So a combined batch has at most as many elements as that many of the largest
batches of those updates: if later texts are longer, fewer of them go through together.

Samples are not reordered; the tuner decides the size; the loss must be a mean over samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pacecar.controller.consensus.protocol import PERIOD
from pacecar.controller.knobs.batch.batch_slicing import samples_in
from pacecar.controller.knobs.batch.global_batch import put_together
from pacecar.controller.knobs.batch.micro_batch import MicroBatcher

__all__ = ["Regrouper"]

UPDATE_BATCHES_MAX = 4096
"""Loader batches that may wait to be combined; no accumulation is longer."""

SIZING_UPDATES = PERIOD
"""Updates until the sizes that may be tried are offered: the memory at that time is that of their batches."""

PLAIN = (int, float, str, bool, type(None))
"""What may stand beside tensors in batches that are combined, if it is equal in all of them."""


class Regrouper:
    """Forms the micro-batches of an update from the loader batches that come one by one.

    `batcher` holds the size in force.  The first batch gives the one that the job began with, in which all batches go
    through as they come, larger ones too.
    """

    def __init__(self, batcher: MicroBatcher) -> None:
        self._batcher = batcher
        self._waiting: list[Any] = []
        self._kind: Hashable | None = None
        self._update_samples = 0
        self._updates = 0
        self._largest = (0, 1)  # elements and samples of the batch with most elements a sample

    def reset(self) -> None:
        """Drop what waits: the loop gave up the current update."""
        self._waiting, self._kind, self._update_samples = [], None, 0

    def micros(self, batch: Any, *, is_last: bool) -> Iterator[tuple[Any, float]]:  # noqa: ANN401  any nest of tensors
        """Yield what to compute now that `batch` came: each micro-batch with its share; perhaps nothing.

        `is_last`: this batch completes the update, so everything that waits is computed.  DDP synchronizes with the
        last piece only.
        """
        groups = self._groups(batch, is_last=is_last)
        for number, group in enumerate(groups, start=1):
            whole = group[0] if len(group) == 1 else put_together(group)
            with _unsynchronized(self._batcher.ddp if number < len(groups) else None):
                if _samples(whole) is None:
                    yield whole, 1.0
                    continue
                for micro in self._batcher.split(whole):
                    yield micro, len(group) * self._batcher.weight

    def _groups(self, batch: Any, *, is_last: bool) -> list[list[Any]]:  # noqa: ANN401  any nest of tensors
        samples = _samples(batch)
        self._record_sizes(batch, samples, is_last=is_last)
        kind = None if samples is None else kind_of(batch)
        groups: list[list[Any]] = []
        if self._waiting and (kind is None or kind != self._kind):
            groups.append(self._pop_waiting())
        self._waiting.append(batch)
        self._kind = kind
        size = self._batcher.samples.value
        wanted = 1
        if samples and kind is not None and size is not None:
            most, among = self._largest
            wanted = min(size // samples, size * most // (among * elements_in(batch)), UPDATE_BATCHES_MAX)
        if is_last or len(self._waiting) >= wanted:
            groups.append(self._pop_waiting())
        return groups

    def _pop_waiting(self) -> list[Any]:
        taken, self._waiting, self._kind = self._waiting, [], None
        return taken

    def _record_sizes(self, batch: Any, samples: int | None, *, is_last: bool) -> None:  # noqa: ANN401  any nest of tensors
        """Record in the batcher which sizes there are to choose from: up to all samples of an update at once."""
        batcher = self._batcher
        if samples is None:
            batcher.refused = batcher.refused or "a batch has no tensors with one number of samples in dim 0"
            return
        if batcher.micro_batch is None and samples:
            batcher.samples.whole = samples
        if self._updates < SIZING_UPDATES and samples:
            self._largest = max(self._largest, (elements_in(batch), samples), key=lambda pair: pair[0] / pair[1])
            self._updates += is_last
        self._update_samples += samples
        batcher.batch_samples = max(self._update_samples, batcher.batch_samples or 1)
        if is_last:
            self._update_samples = 0


def _samples(batch: Any) -> int | None:  # noqa: ANN401  any nest of tensors
    try:
        return samples_in(batch)
    except ValueError:
        return None


def elements_in(value: Any) -> int:  # noqa: ANN401  any nest of tensors
    """Return how many elements the tensors of a batch have; 1 without any."""
    if isinstance(value, Tensor):
        return max(1, value.numel())
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return max(1, sum(elements_in(part) for part in parts))


def kind_of(value: Any) -> Hashable | None:  # noqa: ANN401  any nest of tensors
    """Return what two batches must have in common to be combined; None if this one is like no other."""
    if isinstance(value, Tensor):
        return (tuple(value.shape), value.dtype, value.device) if value.dim() else None
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, Mapping):
        parts = [(key, kind_of(part)) for key, part in value.items()]
        return None if any(kind is None for _, kind in parts) else (type(value), *parts)
    if isinstance(value, (list, tuple)):
        kinds = [kind_of(part) for part in value]
        return None if None in kinds else (type(value), *kinds)
    return None


@contextmanager
def _unsynchronized(ddp: DistributedDataParallel | None) -> Iterator[None]:
    """As DDP's `no_sync`, and also around what other libraries wrap around it."""
    if ddp is None:
        yield
        return
    before = getattr(ddp, "require_backward_grad_sync", True)
    ddp.require_backward_grad_sync = False
    try:
        yield
    finally:
        ddp.require_backward_grad_sync = before
