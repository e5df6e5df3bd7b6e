"""Implements the knob "batch_samples" (adaptive): combines several of the loader's batches into one update.

A data loader's batch size cannot change while it runs, and need not: one update may take several of its batches.

    loader           [0][1][2][3][4][5][6][7]             batch_samples = 4 ranks x 8 = 32, later 64
    pacer.batches    [0][1][2][3][4 5][6 7]               each piece is one optimizer update

`batches` concatenates them along dim 0, so the loop stays as it was.  A result too large for one pass is cut into
micro-batches, by default of the loader's batch size.  No sample is lost or repeated, the loader's order is kept, and
what is left at the end of an epoch is an update of its own size.

The learning rate follows the update's true size by the user's rule, inside `optimizer.step` only: afterwards the value
that a scheduler or the script wrote is back.  Fewer updates per epoch stretch a schedule that counts updates, so an
optimizer with a torch scheduler is refused unless the script steps it by samples or epochs (`scheduler_by_samples`).

Not supported: batches smaller than the loader's; batches that differ in shape beyond dim 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from pacecar.config import TuneConfig
from pacecar.knobs import allows
from pacecar.profiler.hook import step_hooks
from pacecar.profiler.hook.step_hooks import after_step, before_step, weakly
from pacecar.torch_internals import lacking

from ..actuator import Actuator, ActuatorError, StartGather
from .batch_slicing import map_tensors, samples_in
from .gradient_noise_meter import GradientNoiseMeter
from .gradient_noise_scale import learning_rate_factor
from .micro_batch import MicroBatcher

__all__ = ["BatchGrouper", "GlobalBatchActuator", "LearningRate", "open_global_batch", "put_together"]

T = TypeVar("T")

MULTIPLIERS = tuple(2**i for i in range(11))
"""Numbers of loader batches in one update that may be tried."""


def put_together(batches: list[Any]) -> Any:  # noqa: ANN401  any nest in, the same nest out
    """Concatenate batches along dim 0; anything that is not a tensor comes from the first.

    Raises:
        ValueError: tensors differ beyond dim 0; names both shapes.
    """
    return batches[0] if len(batches) == 1 else map_tensors(batches, _concatenate)


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    first = tensors[0]
    if first.dim() == 0:
        return first
    odd = next((tensor for tensor in tensors if tensor.shape[1:] != first.shape[1:]), None)
    if odd is not None:
        raise ValueError(
            f"batches of shapes {tuple(first.shape)} and {tuple(odd.shape)} cannot be combined: pad all batches to "
            'one width, or leave "batch_samples" out of knobs'
        )
    return torch.cat(tuple(tensors))


class BatchGrouper:
    """Combines `multiplier` batches of a loader.  `loader_samples` is the largest batch seen, None before the first."""

    def __init__(self, batcher: MicroBatcher) -> None:
        self._batcher = batcher
        self.multiplier = 1
        self.loader_samples: int | None = None
        self.present_samples: int | None = None
        """Samples in the current update."""

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batch of each update; the multiplier is read when an update begins."""
        waiting: list[T] = []
        wanted = self.multiplier
        for batch in loader:
            if not waiting:
                wanted = self.multiplier
            waiting.append(batch)
            if len(waiting) >= wanted:
                yield self._update(waiting)
                waiting = []
        if waiting:
            yield self._update(waiting)

    def _update(self, waiting: list[T]) -> T:
        samples = [samples_in(batch) for batch in waiting]
        self.loader_samples = max(*samples, self.loader_samples or 1)
        self.present_samples = sum(samples)
        self._batcher.whole_samples = self.loader_samples
        update: T = put_together(waiting)
        return update


class LearningRate:
    """Multiplies the learning rates of `optimizer` by `factor()` during its `step`.

    A subclass's `step` may run the hooks twice: torch puts them around the `step` of every optimizer class in use, and
    so around the `super().step()` inside.  The inner call belongs to the current step; its frame distinguishes it from
    the next step after one that raised.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._before: list[Any] = []
        self._step: FrameType | None = None
        self._handles = [
            before_step(optimizer, self._scale),
            after_step(optimizer, self._restore),
        ]

    def _scale(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401  torch's signature
        caller = _step_frame()
        if self._step is not None and _is_inside(caller, self._step):
            return
        self._put_back(optimizer)  # left by a step that raised
        factor = self._factor()
        if factor == 1.0:
            return
        self._step = caller
        for group in optimizer.param_groups:
            rate = group["lr"]
            self._before.append(rate.clone() if isinstance(rate, Tensor) else rate)
            if isinstance(rate, Tensor):
                rate.mul_(factor)  # in place, since a captured graph reads this tensor
            else:
                group["lr"] = rate * factor

    def _restore(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ANN401  torch's signature
        if _step_frame() is self._step:
            self._put_back(optimizer)

    def _put_back(self, optimizer: Optimizer) -> None:
        self._step = None
        before, self._before = self._before, []
        for group, rate in zip(optimizer.param_groups, before, strict=False):
            if isinstance(group["lr"], Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate

    def remove(self) -> None:
        """Restore the optimizer."""
        for handle in self._handles:
            handle.remove()


def _step_frame() -> FrameType | None:
    """Return the frame of the step whose hooks run."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == step_hooks.__file__:
        frame = frame.f_back
    return frame


def _is_inside(frame: FrameType | None, outer: FrameType) -> bool:
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None


class GlobalBatchActuator(Actuator):
    """The knob "batch_samples": samples of one update over all ranks, in multiples of the loader's batch.

    `start_gather` sends numbers to all ranks to measure the noise scale, which `noise_scale` returns.
    """

    knob = "batch_samples"

    def __init__(
        self,
        optimizer: Optimizer,
        grouper: BatchGrouper,
        batcher: MicroBatcher,
        config: TuneConfig,
        world_size: int,
        *,
        start_gather: StartGather,
        noise_scale: Callable[[], float | None],
    ) -> None:
        self.noise_scale = noise_scale
        self._start_gather = start_gather
        self._rate: LearningRate | None = None
        self.grouper = grouper
        self.follow(optimizer)
        self._batcher = batcher
        self._config = config
        self._world_size = world_size

    def follow(self, optimizer: Optimizer) -> None:
        """Set the learning rate of `optimizer` from its next step on: the script now trains its model with it."""
        if self._rate is not None:
            self._rate.remove()
        self._optimizer = weakly(optimizer)
        self._rate = LearningRate(optimizer, self.factor)

    @property
    def base(self) -> int:
        """Samples of one update of one loader batch.

        Raises:
            ActuatorError: no batch was seen yet.
        """
        if self.grouper.loader_samples is None:
            raise ActuatorError("the loop does not iterate over pacer.batches(loader)")
        return self.grouper.loader_samples * self._world_size

    def factor(self) -> float:
        """Return the learning-rate factor for the true size of the current update."""
        present = self.grouper.present_samples
        if present is None or self.grouper.loader_samples is None:
            return 1.0
        batches = present / self.grouper.loader_samples
        if batches <= 1:  # the script decides about the smaller rest of an epoch
            return 1.0
        return learning_rate_factor(self._config.learning_rate_rule, self.noise_scale(), self.base, batches * self.base)

    def value(self) -> int:
        """Return the samples of one update."""
        return self.grouper.multiplier * self.base

    def domain(self) -> tuple[int, ...]:
        """Return the loader's batch times powers of two within the user's bounds, and the present value."""
        low, high = self._config.batch_samples_min, self._config.batch_samples_max
        return tuple(sorted({k * self.base for k in MULTIPLIERS if low <= k * self.base <= high} | {self.value()}))

    def refusal(self) -> str | None:
        """Return why the batch must stay as it is, or None."""
        ddp = self._batcher.ddp
        if self.grouper.loader_samples is None:
            return "the loop does not iterate over pacer.batches(loader)"
        if self._batcher.batch_samples is None:
            return "micro-batches are not used: a larger batch would go through the model at once"
        if ddp is None or self._world_size < 2:
            return "the noise scale needs DistributedDataParallel on at least two ranks"
        if ddp.static_graph:
            return "DDP has static_graph=True, which breaks when gradients are accumulated (pytorch#143580)"
        if not self._config.scheduler_by_samples:
            lacks = lacking("batch_samples", {"scheduled step": _scheduled_step()})
            if lacks is not None:
                return lacks
        step = getattr(self._optimizer(), "step", None)
        if getattr(step, "_wrapped_by_lr_sched", False) and not self._config.scheduler_by_samples:
            return (
                "a learning rate scheduler counts this optimizer's steps, and there would be fewer; "
                "set scheduler_by_samples=True if the script steps it by samples or epochs"
            )
        return None

    def layout(self) -> str:
        """Return the loader's batch, which must be the same on all ranks."""
        return str(self.grouper.loader_samples)

    def apply(self, value: int) -> None:
        """Combine as many of the loader's batches from the next update on, and start to measure noise.

        Measuring takes collectives, so it begins here: all ranks apply at one boundary, first in the rehearsal, while
        attaching may have failed on some of them.

        Raises:
            ActuatorError: `value` is not a multiple of the loader's batch.
        """
        ddp = self._batcher.ddp
        if self._batcher.meter is None and ddp is not None and self._world_size > 1:
            self._batcher.meter = GradientNoiseMeter(ddp, self._start_gather)
        if value < self.base or value % self.base:
            raise ActuatorError(f"{value} samples are not a multiple of the loader's batch over all ranks, {self.base}")
        self.grouper.multiplier = value // self.base

    def close(self) -> None:
        """Leave the learning rate to the script if every batch of the loader is an update.

        Otherwise the ranks could not go back together: one alone would make other updates than the rest, and soon wait
        for them forever.  So the updates stay, and the rate that goes with them.
        """
        if self.grouper.multiplier != 1:
            return
        self._batcher.meter = None
        if self._rate is not None:
            self._rate.remove()


def open_global_batch(
    optimizer: Optimizer, batcher: MicroBatcher, config: TuneConfig, world_size: int, start_gather: StartGather
) -> GlobalBatchActuator | None:
    """Return the knob; None if the user did not ask for it."""
    if not (allows(config.mode, "batch_samples") and "batch_samples" in config.knobs):
        return None

    def noise_scale() -> float | None:
        return None if batcher.meter is None else batcher.meter.noise_scale

    grouper = BatchGrouper(batcher)
    return GlobalBatchActuator(
        optimizer, grouper, batcher, config, world_size, start_gather=start_gather, noise_scale=noise_scale
    )


def _scheduled_step() -> object:
    """Return the `step` of an optimizer with a scheduler, to see whether this torch still marks it as counted."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    return optimizer.step
