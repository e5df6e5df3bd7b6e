"""Measures and tunes a loop under Accelerate: `attach` takes what `accelerator.prepare` returned.

    pacer = attach(accelerator, model, optimizer, tune="exact")
    for batch in pacer.data(loader):
        with accelerator.accumulate(model):
            loss = pacer.train_batch(batch, lambda micro: model(**micro).loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()

The rest of the loop stays as it is.  Without `train_batch` all of it does: DDP's buckets are tuned without it, and only
another micro-batch needs it.  To let the loader yield other batches would be simpler and wrong: how often the body of
the loop runs would change, on one rank otherwise than on another, and bodies gather losses and save every n batches.
So `train_batch` is called as often as before, and computes what is due (`regroup`), with the division by
`gradient_accumulation_steps`, the scaler and the `no_sync` that are Accelerate's own.

Left out: engines that run the inside of the loop.  Under DeepSpeed and Megatron the job is measured and not tuned,
under FSDP its micro-batch stays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from pacecar import inert_attach

_unloaded: Exception | None = None
try:
    from pacecar.profiler.ranks.data_parallel import find_ddp

    from .regroup import Regrouper
    from .shared_attach import attach_for, checked
except Exception as error:  # noqa: BLE001  a broken install: the script trains on, with an inert pacer
    _unloaded = error

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
"""Engines that reduce gradients in buckets of their own, at moments of their own."""

PLAIN_RUNS = ("NO", "MULTI_GPU", "MULTI_CPU")
"""Kinds of run whose gradients accumulate in `.grad` and are synchronized by DistributedDataParallel, or not at all."""

UNUSED = "the loop does not use pacer.train_batch(batch, loss_fn)"


class AcceleratePacer:
    """What `attach` returns; as `pacecar.Pacer`, but for `train_batch`."""

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
        """What would be turned if it might be; on rank 0."""
        return self.pacer.advice

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap the prepared loader, so that waiting for data is measured; see `pacecar.Pacer.data`."""
        return self.pacer.data(loader, tune=tune)

    def train_batch(self, batch: T, loss_fn: Callable[[T], torch.Tensor]) -> torch.Tensor:
        """Run forward and `accelerator.backward` for what is due at this batch; return its loss, detached.

        In place of both, inside `accelerator.accumulate(model)`.  `loss_fn` returns the mean loss over the samples of
        what it is given, has no collectives, and is called once a micro-batch: not at all where this batch waits to be
        put together with the next ones.  So losses of one update are exact in their sum, and zero in between.
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
        """Say a loss of the current step; see `pacecar.Pacer.loss`."""
        self.pacer.loss(value)

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Say how many samples or tokens this rank trains on in the current step."""
        self.pacer.count(samples=samples, tokens=tokens)

    def checkpoint(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `checkpoint`: put `accelerator.save_state` into it."""
        return self.pacer.checkpoint()

    def close(self, reason: str = "closed") -> None:
        """Detach.  Harmless when repeated."""
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
    `pacecar.attach`; what cannot be tuned is said in one line.

    Raises:
        TypeError: `accelerator` is none, `model` is not what `prepare` returned, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(f"attach(accelerator=...): an Accelerator is needed, not {type(accelerator).__name__}")
    if _unloaded is not None:
        return AcceleratePacer(accelerator, inert_attach(_unloaded)(model, optimizer))
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
