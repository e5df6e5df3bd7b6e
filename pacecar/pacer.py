"""How does a training script use pacecar?  One call and one object.

`attach` ties the rooms together inside the training process: the hook that measures, the sinks that carry records
away, and the tuner that turns knobs.  What the caller typed wrongly is an error at once, where he sees it.  What is
wrong with the world (a bad configuration file, a missing daemon, a second hook, a torch that is not understood) never
is: it is logged once, and the pacer that comes back is *inert* - `data`, `microbatches` and `backward` still do their
arithmetic, so the same script trains to the same numbers.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from pacecar.assembly import Parts, assemble
from pacecar.config import Config, ConfigError, load_config
from pacecar.controller.cuts import Given
from pacecar.controller.ddp_knobs import find_ddp
from pacecar.controller.microbatch import MicroBatcher
from pacecar.controller.rescue import Rescue
from pacecar.options import check_arguments, with_options
from pacecar.profiler.hook import AlreadyAttachedError
from pacecar.profiler.sink import RecordSink
from pacecar.records import Knobs

__all__ = ["Pacer", "attach"]

logger = logging.getLogger("pacecar")

CLOSE_SECONDS_MAX = 2.0
"""How long closing may wait for queued records: the end of a job is on nobody's step path, but it is waited for."""

T = TypeVar("T")


class Pacer:
    """What `attach` returns: the script's handle on the hook and the tuner.  Also a context manager.

    Not thread-safe: call it from the thread that trains.
    """

    def __init__(self, rescue: Rescue, parts: Parts | None = None, *, inert_because: str | None = None) -> None:
        parts = parts or Parts()
        self._batcher = rescue.batcher
        self._rescue = rescue
        self._hook = parts.hook
        self._sinks = parts.sinks
        self._tuner = parts.tuner
        self._desk = parts.desk
        self._boundaries = parts.boundaries
        self._loaders = parts.loaders
        self._global_batch = parts.global_batch
        self._vigil = parts.vigil
        self._crew = parts.crew
        self._orders = parts.orders
        self._tracing = parts.tracing
        self.inert_because = inert_because
        self._pid = os.getpid()

    @property
    def is_active(self) -> bool:
        """Whether the hook measures; False for an inert pacer, after `close` and after the hook gave up."""
        return self._hook is not None and self._hook.is_alive

    @property
    def batcher(self) -> MicroBatcher:
        """What holds the micro-batch in force; for adapters, whose library runs forward and backward itself."""
        return self._batcher

    @property
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch; empty values when nothing is tuned."""
        return self._tuner.knobs if self._tuner is not None else Knobs()

    @property
    def advice(self) -> tuple[str, ...]:
        """What would be turned if it might be, and what only a restart can change; on rank 0, empty elsewhere."""
        return self._desk.advice() if self._desk is not None else ()

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap what the training loop iterates over, so that waiting for data is measured and samples are counted.

        The wrapper iterates like `loader`, as often as wanted, and has its length.  Samples are the first dimension of
        the first tensor in a batch unless `count` says otherwise.

        The workers of the first loader are tuned, if it is torch's; `tune=True` names another, False rules one out.
        """
        if self._loaders is not None:
            loader = self._loaders.take(loader, tune)
        return self._hook.data(loader) if self._hook is not None else loader

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what makes one optimizer update: a batch of `loader`, or several put together along dimension 0.

        Only mode "adaptive" with the knob `batch_samples` puts any together.  Use it around `data` where both are
        wanted, `pacer.batches(pacer.data(loader))`, and cut what it yields by `microbatches` or `train_batch`.

        Raises:
            ValueError: batches that are to be put together differ in more than dimension 0.
        """
        return iter(loader) if self._global_batch is None else self._global_batch.grouper.batches(loader)

    def microbatches(
        self, batch: T, *, tokens: Given | None = None, count: Given | None = None, trim: bool = False
    ) -> Iterator[T]:
        """Yield `batch` in slices along dimension 0, as large as the micro-batch knob says.

        Under DistributedDataParallel the gradients are synchronized with the last slice only.  Use `backward` on each
        slice's loss: it weighs the slice by its share of the samples, so that the accumulated gradient of a
        mean-reduced loss equals that of the whole batch but for the order of summation.

        Args:
            batch: tensors in any nest of tuples, lists and mappings.
            tokens: a mask (samples, positions), or each sample's length; with `attach(micro_tokens=...)` a slice takes
                at most so many tokens, padding included.
            count: for a loss that is a mean over tokens: a mask of what it is a mean over, such as
                `labels != -100`, or each sample's number; slices without any are left out.
            trim: drop the columns that a whole slice pads, from tensors whose dimension 1 is as wide as the mask.

        Raises:
            ValueError: tensors in the batch disagree about dimension 0, or `tokens` or `count` do not belong to it.
        """
        return self._batcher.split(batch, tokens=tokens, count=count, trim=trim)

    def backward(self, loss: torch.Tensor, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Backpropagate the mean-reduced `loss` of the current micro-batch with its weight, or with `weight`.

        A loss that is a sum has the weight 1.  Other keywords go to torch unchanged.
        """
        if self._vigil is not None:
            self._vigil.loss(loss, weight=self._batcher.weight if weight is None else weight)
        self._batcher.backward(loss, weight=weight, **kwargs)

    def train_batch(
        self,
        batch: T,
        loss_fn: Callable[[T], torch.Tensor],
        *,
        tokens: Given | None = None,
        count: Given | None = None,
        trim: bool = False,
    ) -> torch.Tensor:
        """Run forward and backward of `batch` in micro-batches; return the loss of the whole batch, detached.

        In place of the loop over `microbatches`: `loss_fn(slice)` returns the slice's mean loss, everything else is
        as there.  A micro-batch that does not fit into memory then costs no step: a larger one runs first
        where it can do no harm, and is barred on all ranks if it fails on one.

        Every rank calls it equally often between two optimizer steps, and `loss_fn` has no collectives of its own.
        """
        loss = self._rescue.train_batch(batch, loss_fn, tokens=tokens, count=count, trim=trim)
        if self._vigil is not None:
            self._vigil.loss(loss)
        return loss

    def loss(self, value: torch.Tensor | float) -> None:
        """Say a loss of the current step, where `backward` is not used; several in one step add up.

        Mode "lossy" watches it: compression of gradients is taken back when the loss leaves its band.  A tensor is read
        some steps later and never waited for.
        """
        if self._vigil is not None:
            self._vigil.loss(value)

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Say how many samples or tokens this rank trains on in the current step; adds up until the step ends."""
        if self._hook is not None:
            self._hook.count(samples=samples, tokens=tokens)

    def checkpoint(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `checkpoint`: put the saving of a checkpoint into it.

        It may stand anywhere in the loop, before the first step and after the last.  Of an asynchronous save it
        holds what the loop waits for.
        """
        return self._hook.checkpoint() if self._hook is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `data_wait`, for loops whose loader cannot go through `data`."""
        return self._hook.waiting() if self._hook is not None else nullcontext()

    def close(self, reason: str = "closed") -> None:
        """Detach: remove every hook, deliver what is queued (for at most two seconds).  Harmless when repeated."""
        if os.getpid() != self._pid:  # a forked child: whatever there is belongs to the parent
            return
        if self._boundaries is not None:
            self._boundaries.close()
        if self._tuner is not None:
            self._tuner.close()
        if self._global_batch is not None:
            self._global_batch.close()
        if self._loaders is not None:
            self._loaders.close(CLOSE_SECONDS_MAX)
        if self._desk is not None:
            self._desk.close()
        if self._crew is not None:
            self._crew.close()
        if self._tracing is not None:
            self._tracing.close()
        if self._orders is not None:
            self._orders.close()
        if self._hook is not None:
            self._hook.close(reason)
        deadline = time.monotonic() + CLOSE_SECONDS_MAX
        # Their threads must not live into the interpreter's own end.  The file comes first: it needs no deadline, while
        # an absent daemon uses up all of it.
        for sink in reversed(self._sinks):
            sink.close(max(0.0, deadline - time.monotonic()))
        atexit.unregister(self.close)

    def __enter__(self) -> Pacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else f"failed: {kind.__name__}")


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    tune: str | None = None,
    micro_batch: int | None = None,
    micro_tokens: int | None = None,
    scaler: torch.amp.GradScaler | None = None,
    job: str | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    config: Config | None = None,
    loggers: Sequence[RecordSink] = (),
    **options: Any,  # noqa: ANN401  checked against HookConfig and TuneConfig, key by key
) -> Pacer:
    """Measure, and unless `tune` is "off" tune, the job that trains `model` with `optimizer`.

    Call it on every rank, after the process group and DistributedDataParallel are made and before the first step.

    Args:
        model: what the loop calls; DistributedDataParallel or not.
        optimizer: its `step` ends a step.
        tune: "off", "advise", "exact", "lossy" or "adaptive"; default as configured ([tune] mode, "exact").
        micro_batch: samples per forward and backward to begin with.  Giving it lets the controller tune it, and the
            loop must use `pacer.microbatches` and `pacer.backward`, or `pacer.train_batch`.
        micro_tokens: the same in padded tokens, for loops that say `tokens`; it is tuned in place of `micro_batch`.
        scaler: a GradScaler that `pacer.backward` shall use.
        job: name of the job; default from the launcher's environment.
        run_dir: folder for `rank<r>.jsonl`; default none.
        config: all settings; default from file and environment (see `pacecar.config.load_config`).
        loggers: where records go besides, see `pacecar.adapters.loggers`; `close` closes them.
        options: any key of [hook] or [tune], for example `exploration_budget=0.02`.

    Returns:
        A Pacer.  It is inert, with the reason in `inert_because` and in the log, when this process already has one,
        when [hook] enabled is false, or when pacecar could not start.

    Raises:
        TypeError: model, optimizer, micro_batch or micro_tokens is of a wrong type, or an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """
    check_arguments(model, optimizer, {"micro_batch": micro_batch, "micro_tokens": micro_tokens}, options)
    batcher = MicroBatcher(find_ddp(model), micro_batch, micro_tokens=micro_tokens, scaler=scaler)
    rescue = Rescue(model, batcher)
    try:
        base = config if config is not None else load_config()
    except ConfigError as error:
        return _inert(rescue, f"configuration: {error}")
    settings = with_options(
        base, {**options, "mode": tune, "job": job, "run_dir": None if run_dir is None else os.fspath(run_dir)}
    )
    if not settings.hook.enabled:
        return _inert(rescue, "[hook] enabled is false", level=logging.INFO)
    try:
        pacer = Pacer(rescue, assemble(model, optimizer, rescue, settings, loggers))
        atexit.register(pacer.close)
        return pacer
    except AlreadyAttachedError as error:
        return _inert(rescue, f"{error}; close that one first if this one shall measure")
    except Exception as error:  # the job comes first: nothing of ours may end it
        logger.debug("attach failed", exc_info=True)
        return _inert(rescue, f"could not start: {type(error).__name__}: {error}")


def _inert(rescue: Rescue, reason: str, *, level: int = logging.WARNING) -> Pacer:
    logger.log(level, "pacecar does not measure this job: %s", reason)
    return Pacer(rescue, inert_because=reason)
