"""Measures and tunes a loop under Accelerate: `attach` takes what `accelerator.prepare` returned.

    pacer = attach(accelerator, model, optimizer, tune="exact")
    for batch in pacer.data(loader):
        with accelerator.accumulate(model):
            loss = pacer.train_batch(batch, lambda micro: model(**micro).loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

The rest of the loop stays as it is.  `train_batch` is needed only to tune the micro-batch; DDP's buckets are tuned
without it.  Letting the loader yield other batches would be simpler and wrong: it would change how often the body of
the loop runs, differently on each rank, and bodies gather losses and save every n batches.  So `train_batch` is called
as often as before and computes what is due (`regroup`), with Accelerate's own division by
`gradient_accumulation_steps`, scaler and `no_sync`.

Engines that run the inside of the loop limit tuning: under DeepSpeed and Megatron the job is only measured, under FSDP
its micro-batch stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from .guarded_imports import Regrouper, attach_for, checked, find_ddp

try:
    from accelerate import Accelerator
except ImportError as error:
    raise ImportError("pacecar.adapters.accelerate needs accelerate: pip install 'accelerate>=1.15'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer
    from pacecar.records import Knobs

__all__ = ["AcceleratePacer", "attach"]

logger = logging.getLogger("pacecar")

T = TypeVar("T")

OWN_ENGINES = ("DEEPSPEED", "MEGATRON_LM")
"""Engines that reduce gradients in their own buckets, at their own moments."""

PLAIN_RUNS = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Kinds of run whose gradients accumulate in `.grad` and are synchronized by DistributedDataParallel, or not at all."""

UNUSED = "the loop does not use pacer.train_batch(batch, loss_fn)"


class AcceleratePacer:
    """What `attach` returns: like `pacecar.Pacer`, except for `train_batch`."""

    def __init__(self, accelerator: Accelerator, pacer: Pacer) -> None:
        self.pacer = pacer
        self._accelerator = accelerator
        self._regrouper = Regrouper(pacer.batcher) if pacer.has_batcher else None

    @property
    def is_active(self) -> bool:
        """Whether the job is measured."""
        return self.pacer.is_active

    @property
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch."""
        return self.pacer.knobs

    @property
    def advice(self) -> tuple[str, ...]:
        """What would be turned if that were allowed; on rank 0."""
        return self.pacer.advice

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap the prepared loader, so that waiting for data is measured; see `pacecar.Pacer.data`."""
        return self.pacer.data(loader, tune=tune)

    def train_batch(self, batch: T, loss_fn: Callable[[T], torch.Tensor]) -> torch.Tensor:
        """Run forward and `accelerator.backward` for what is due at this batch; return its loss, detached.

        Replaces both, inside `accelerator.accumulate(model)`.  `loss_fn` returns the mean loss over the samples of its
        argument, has no collectives, and is called once for each micro-batch: not at all while this batch waits to be
        combined with the next ones.  So only the sum of the losses of one update is exact, and some are zero.
        """
        accelerator, regrouper = self._accelerator, self._regrouper
        batcher = None if regrouper is None else self.pacer.batcher
        if batcher is not None and batcher.refused == UNUSED:
            batcher.refused = None
        if regrouper is None or batcher is None or batcher.refused is not None:
            loss = loss_fn(batch)
            accelerator.backward(loss)
            return loss.detach()
        total: torch.Tensor | None = None
        for micro, share in regrouper.micros(batch, is_last=accelerator.sync_gradients):
            loss = loss_fn(micro)
            weighted = loss if share == 1.0 else loss * share
            accelerator.backward(weighted)
            total = weighted.detach() if total is None else total + weighted.detach()
        return total if total is not None else torch.zeros((), device=accelerator.device)

    def loss(self, value: torch.Tensor | float) -> None:
        """Report a loss of the current step; see `pacecar.Pacer.loss`."""
        self.pacer.loss(value)

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Report how many samples or tokens this rank trains on in the current step."""
        self.pacer.count(samples=samples, tokens=tokens)

    def checkpoint(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `checkpoint`: call `accelerator.save_state` inside it."""
        return self.pacer.checkpoint()

    def close(self, reason: str = "closed") -> None:
        """Detach.  May be called again."""
        self.pacer.close(reason)

    def __enter__(self) -> AcceleratePacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pacer.__exit__(kind, error, trace)


def attach(
    accelerator: Accelerator,
    model: nn.Module,
    optimizer: object,
    *,
    tune: str | None = None,
    **options: Any,  # noqa: ANN401
) -> AcceleratePacer:
    """Measure, and unless `tune` is "off" tune, the job that trains `model` under `accelerator`.

    Call it on every rank after `accelerator.prepare` and before the first step.  `options` are those of
    `pacecar.attach`; one log line names what cannot be tuned.

    Raises:
        TypeError: `accelerator` is not an Accelerator, `model` is not what `prepare` returned, or an option does not
            exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"attach(accelerator=...): an Accelerator is needed, not {type(accelerator).__name__}")
    checked(tune, options)
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind in PLAIN_RUNS and accelerator.num_processes > 1 and find_ddp(model) is None:
        raise TypeError("attach(model=...): the model is needed that accelerator.prepare(model) returned")
    untuned = f"{kind} reduces gradients by itself" if kind in OWN_ENGINES else None
    pacer = attach_for("accelerate", model, optimizer, tune=tune, options=options, untuned_because=untuned)
    if pacer.has_batcher:
        pacer.batcher.refused = _refusal(accelerator, kind) or UNUSED
    return AcceleratePacer(accelerator, pacer)


def _refusal(accelerator: Accelerator, kind: str) -> str | None:
    """Return why the micro-batch must stay whatever the loop does, or None."""
    if kind not in PLAIN_RUNS:
        return f"the run is of type {kind}"
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return "sync_each_batch synchronizes gradients with every batch"
    if getattr(accelerator, "parallelism_config", None) is not None:
        return "the Accelerator has a parallelism_config"
    return None
