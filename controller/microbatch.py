"""How many samples go through the model at once?  Split a rank's batch without changing what it learns.

The obvious answer, "as many as fit", is wrong twice: the fastest size is often smaller than the largest, and a size
that the script fixed for another GPU is often far too small.  So the size is a knob, and the rank's batch stays what
the data loader gave: only the number of forward/backward passes in one optimizer update changes.

    batch of 10, micro-batch 4:   0123 4567 89      weights 0.4 0.4 0.2     gradients synchronized with the last only

Exact for a loss that is the mean over the samples of dim 0: each micro-batch's mean is weighted by its share of the
samples, and the sum of the weighted gradients is the gradient of the batch's mean, but for the order of summation.

Left out.  Batch normalization and dropout depend on the micro-batch and are refused.  Not handled yet, and not seen
from here: losses that are a mean over *tokens* when padding differs between samples (the share of samples is then not
the share of the loss), and losses across samples (contrastive).  Memory is guarded by a linear bound only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pacecar.config import TuneConfig
from pacecar.controller.actuator import ActuatorError
from pacecar.controller.ddp_buckets import find_ddp

__all__ = ["MicroBatchActuator", "MicroBatcher"]

T = TypeVar("T")

NEST_DEPTH_MAX = 32
"""No batch nests deeper; a list that contains itself would."""

MEMORY_HEADROOM_RATIO = 0.9
"""A micro-batch is offered only if its predicted peak stays under this share of the device's memory."""


class MicroBatcher:
    """Splits batches and keeps gradient synchronization for the last micro-batch of each.

        for micro in batcher.split(batch):
            loss = criterion(model(micro.x), micro.y)   # a mean over dim 0
            batcher.backward(loss)
        optimizer.step()

    `ddp` is the model's DistributedDataParallel, None where there is none.  `micro_batch` is the largest number of
    samples in one forward/backward; None: the whole batch at once.  `scaler` is a torch.amp.GradScaler or its like.
    `batch_samples` is the largest batch seen, None before the first; `weight` the present micro-batch's share.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None,
        micro_batch: int | None = None,
        *,
        scaler: Any = None,  # noqa: ANN401  anything with scale(loss)
    ) -> None:
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch is {micro_batch}; it must be at least 1")
        self.micro_batch = micro_batch
        self.batch_samples: int | None = None
        self.weight = 1.0
        self._ddp = ddp
        self._scaler = scaler
        self._sync_before: bool | None = None

    @property
    def has_scaler(self) -> bool:
        """Whether losses are scaled by a GradScaler or its like."""
        return self._scaler is not None

    def split(self, batch: T) -> Iterator[T]:
        """Yield `batch` in slices along dim 0 of every tensor in it, the last one possibly smaller.

        Tensors are found in tuples, lists, dicts, namedtuples and other mappings; tensors without dimensions and
        everything else are passed through whole, to every slice.  While a slice that is not the last is out, DDP's
        gradient synchronization is off, as in `no_sync()`; it is restored when the loop ends, breaks or raises.  A
        batch that is not larger than the micro-batch is yielded as it is.

        Raises:
            ValueError: there is no tensor to split, or two tensors differ in dim 0; names the leaf.
        """
        samples = _samples(batch)
        self.batch_samples = max(samples, self.batch_samples or samples)
        size = self.micro_batch or samples
        return self._slices(batch, samples, size)

    def _slices(self, batch: T, samples: int, size: int) -> Iterator[T]:
        self._restore()  # an earlier loop that was left without being closed
        self.weight = 1.0
        if samples <= size:  # an empty batch too: it is the script's to handle
            yield batch
            return
        ddp = self._ddp
        if ddp is not None:
            self._sync_before = ddp.require_backward_grad_sync
        try:
            for low in range(0, samples, size):
                high = min(low + size, samples)
                if ddp is not None:
                    # Inside the user's own no_sync() the last micro-batch must not synchronize either.
                    ddp.require_backward_grad_sync = bool(self._sync_before) and high == samples
                self.weight = (high - low) / samples
                yield _slice(batch, low, high)
        finally:
            self.weight = 1.0
            self._restore()

    def _restore(self) -> None:
        if self._ddp is not None and self._sync_before is not None:
            self._ddp.require_backward_grad_sync = self._sync_before
        self._sync_before = None

    def backward(self, loss: Tensor, **kwargs: Any) -> None:  # noqa: ANN401  what Tensor.backward takes
        """Run `loss.backward(**kwargs)`, weighted by this micro-batch's share and scaled by the scaler, if any.

        `loss` must be the mean over the samples of the micro-batch.  With the whole batch at once nothing is
        multiplied, so the gradients are those of `loss.backward()` to the last bit.
        """
        weighted = loss if self.weight == 1.0 else loss * self.weight
        if self._scaler is not None:
            weighted = self._scaler.scale(weighted)
        weighted.backward(**kwargs)  # type: ignore[no-untyped-call]


class MicroBatchActuator:
    """The knob "micro_batch": samples in one forward/backward of one rank; the batch stays as it is."""

    def __init__(self, model: nn.Module, batcher: MicroBatcher, config: TuneConfig) -> None:
        self._model = model
        self._batcher = batcher
        self._config = config

    @property
    def knob(self) -> str:
        """The knob's name."""
        return "micro_batch"

    def value(self) -> int:
        """Return the size in force; the whole batch where none was set.

        Raises:
            ActuatorError: no size was set and no batch was seen yet.
        """
        value = self._batcher.micro_batch or self._batcher.batch_samples
        if value is None:
            raise ActuatorError("the batch size is not known yet: no batch went through microbatches()")
        return value

    def domain(self) -> tuple[int, ...]:
        """Return the present value times powers of two, and the whole batch, within bounds and memory."""
        batch, value = self._batcher.batch_samples, self.value()
        if batch is None:
            return (value,)
        ceiling = min(batch, self._config.micro_batch_max, self._memory_ceiling(value))
        sizes = {min(value, batch), batch}
        size = value
        while size * 2 <= ceiling:
            size *= 2
            sizes.add(size)
        size = value
        while size // 2 >= max(1, self._config.micro_batch_min):
            size //= 2
            sizes.add(size)
        return tuple(sorted({s for s in sizes if self._config.micro_batch_min <= s <= ceiling} | {value}))

    def refusal(self) -> str | None:
        """Return what makes another micro-batch compute something else, or None."""
        batch = self._batcher.batch_samples
        if batch is None:
            return "the batch size is not known: micro-batches are not used (iterate over pacer.microbatches(batch))"
        if batch <= 1:
            return f"the batch of a rank has {batch} sample: there is nothing to split"
        return _inexact(self._model)

    def layout(self) -> str:
        """Return the empty string: ranks may hold different batches, each splits its own."""
        return ""

    def apply(self, value: int) -> None:
        """Split the next batches by `value`."""
        if value < 1:
            raise ActuatorError(f"micro_batch {value} is below 1")
        self._batcher.micro_batch = value

    def _memory_ceiling(self, value: int) -> int:
        """Return the largest size whose peak fits if all memory at the peak grew with the size (it grows slower)."""
        parameter = next(self._model.parameters(), None)
        if parameter is None or parameter.device.type != "cuda":
            return self._config.micro_batch_max
        peak = torch.cuda.max_memory_reserved(parameter.device)
        total = torch.cuda.get_device_properties(parameter.device).total_memory
        return max(value, int(value * MEMORY_HEADROOM_RATIO * total / peak)) if peak > 0 else value


def _inexact(model: nn.Module) -> str | None:
    """Say which module makes the result depend on the micro-batch, or None."""
    ddp = find_ddp(model)
    if ddp is not None and ddp.static_graph:
        return "DDP has static_graph=True, which breaks when gradients are accumulated (pytorch#143580)"
    if any("FSDP" in c.__name__ or "FullyShardedDataParallel" in c.__name__ for c in type(model).__mro__):
        return f"model is {type(model).__name__}: accumulation is exact there but not yet supported"
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return f"{name or 'model'} is {type(module).__name__}: its statistics depend on the micro-batch"
        chance = _dropout(module)
        if chance is not None:
            return f"{name or 'model'} ({type(module).__name__}) has {chance}: other micro-batches draw other numbers"
    return None


def _dropout(module: nn.Module) -> str | None:
    """Return the attribute by which `module` drops at random (dropout, attention_dropout, drop_prob ...), or None.

    Dropout called as a function leaves its rate in some attribute with "drop" in its name in every model we know.
    """
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return f"p={module.p}" if module.p > 0 else None
    for key, value in vars(module).items():
        if "drop" in key and isinstance(value, float) and value > 0:
            return f"{key}={value}"
    return None


def _leaves(value: object, path: str, depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    if depth > NEST_DEPTH_MAX:
        raise ValueError(f"{path}: nested deeper than {NEST_DEPTH_MAX}")
    if isinstance(value, Tensor):
        if value.dim() > 0:
            yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{path}[{key!r}]", depth + 1)
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}.{names[index]}" if names else f"{path}[{index}]", depth + 1)


def _samples(batch: object) -> int:
    first: tuple[str, int] | None = None
    for path, tensor in _leaves(batch, "batch"):
        if first is None:
            first = (path, tensor.shape[0])
        elif tensor.shape[0] != first[1]:
            raise ValueError(
                f"{path} has {tensor.shape[0]} samples in dim 0, {first[0]} has {first[1]}: "
                "micro-batches need the same number in every tensor"
            )
    if first is None:
        raise ValueError(f"batch ({type(batch).__name__}) has no tensor to split along dim 0")
    return first[1]


def _slice(value: Any, low: int, high: int) -> Any:  # noqa: ANN401  any nest in, the same nest out
    if isinstance(value, Tensor):
        return value[low:high] if value.dim() > 0 else value
    if isinstance(value, Mapping):
        items = {key: _slice(item, low, high) for key, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple):
        parts = [_slice(item, low, high) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, list):
        return [_slice(item, low, high) for item in value]
    return value
