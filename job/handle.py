"""Defines `Pacer`, the object that `attach` returns to the script, active or inert.

An inert one measures and tunes nothing, and trains the script to the same numbers.  It must be there when nothing else
of pacecar can be imported, not even torch.  So this module imports the standard library alone, and gets the parts of an
active one from outside.  Left out: how these are made (`attach`, `wiring`).
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    import torch

    from pacecar.controller.knobs.batch.batch_slicing import Given
    from pacecar.controller.knobs.batch.micro_batch import MicroBatcher
    from pacecar.controller.knobs.batch.oom_safe_trial import OomSafeTrial
    from pacecar.records import Knobs

    from .wiring import JobRun

__all__ = ["Pacer", "inert", "inert_attach"]

logger = logging.getLogger("pacecar")

T = TypeVar("T")


class Pacer:
    """What `attach` returns: the script's handle on the hook and the tuner.  Also a context manager.

    Not thread-safe: call it from the thread that trains.
    """

    def __init__(
        self,
        rescue: OomSafeTrial | None,
        run: JobRun | None = None,
        *,
        inert_because: str | None = None,
        scaler: Any = None,  # noqa: ANN401
    ) -> None:
        """Make an active pacer of `run`, or an inert one without it; without `rescue` batches are not cut.

        `scaler` scales losses where there is no `rescue` to do it.
        """
        self._batcher: MicroBatcher | None = None if rescue is None else rescue.batcher
        self._rescue = rescue
        self._scaler = scaler
        self._run = run
        self._hook = None if run is None else run.hook
        self._tuner = None if run is None else run.tuner
        self._knobs = None if run is None else run.knobs
        self._loss_monitor = None if self._knobs is None else self._knobs.loss_monitor
        self.inert_because = inert_because
        self._untuned = _no_knobs()
        self._pid = os.getpid()

    @property
    def is_active(self) -> bool:
        """Whether the hook measures; False for an inert pacer, after `close` and after the hook gave up."""
        return self._hook is not None and self._hook.is_alive

    @property
    def has_batcher(self) -> bool:
        """Whether there is a `batcher`; False where pacecar could not be loaded."""
        return self._batcher is not None

    @property
    def batcher(self) -> MicroBatcher:
        """What holds the micro-batch in force; for adapters, whose library runs forward and backward itself.

        Raises:
            RuntimeError: pacecar could not be loaded, so nothing cuts batches; `inert_because` says why.
        """
        if self._batcher is None:
            raise RuntimeError(f"pacecar could not be loaded: {self.inert_because}")
        return self._batcher

    @property
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch; empty values when nothing is tuned."""
        return self._untuned if self._tuner is None else self._tuner.knobs

    @property
    def advice(self) -> tuple[str, ...]:
        """What would be turned if it might be, and what only a restart can change; on rank 0, empty elsewhere."""
        return () if self._run is None or self._run.commands is None else self._run.commands.advice()

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap what the training loop iterates over, so that waiting for data is measured and samples are counted.

        The wrapper iterates like `loader`, as often as wanted, and has its length.  Samples are the first dimension of
        the first tensor in a batch unless `count` says otherwise.

        The workers of the first loader are tuned, if it is torch's; `tune=True` names another, False rules one out.
        """
        if self._knobs is not None:
            loader = self._knobs.loaders.take(loader, tune)
        return self._hook.data(loader) if self._hook is not None else loader

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield what makes one optimizer update: a batch of `loader`, or several put together along dimension 0.

        Only mode "adaptive" with the knob `batch_samples` puts any together.  Use it around `data` where both are
        wanted, `pacer.batches(pacer.data(loader))`, and cut what it yields by `microbatches` or `train_batch`.

        Raises:
            ValueError: batches that are to be put together differ in more than dimension 0.
        """
        batch = None if self._knobs is None else self._knobs.global_batch
        return iter(loader) if batch is None else batch.grouper.batches(loader)

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
        if self._batcher is None:
            return iter((batch,))
        return self._batcher.split(batch, tokens=tokens, count=count, trim=trim)

    def backward(self, loss: torch.Tensor, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Backpropagate the mean-reduced `loss` of the current micro-batch with its weight, or with `weight`.

        A loss that is a sum has the weight 1.  Other keywords go to torch unchanged.
        """
        if self._batcher is None:
            weighted = loss if weight is None or weight == 1.0 else loss * weight
            (weighted if self._scaler is None else self._scaler.scale(weighted)).backward(**kwargs)
            return
        if self._loss_monitor is not None:
            self._loss_monitor.loss(loss, weight=self._batcher.weight if weight is None else weight)
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
        if self._rescue is None:
            whole = loss_fn(batch)
            self.backward(whole)
            return whole.detach()
        loss = self._rescue.train_batch(batch, loss_fn, tokens=tokens, count=count, trim=trim)
        if self._loss_monitor is not None:
            self._loss_monitor.loss(loss)
        return loss

    def loss(self, value: torch.Tensor | float) -> None:
        """Say a loss of the current step, where `backward` is not used; several in one step add up.

        Mode "lossy" watches it: compression of gradients is taken back when the loss leaves its band.  A tensor is read
        some steps later and never waited for.
        """
        if self._loss_monitor is not None:
            self._loss_monitor.loss(value)

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
        """Detach: remove every hook, deliver what is queued (for at most two seconds).  Harmless when repeated.

        Close on all ranks after the same step: then a setting that is only being tried is taken back.  Where a rank
        closes alone it stays, on all ranks, and the log says so.
        """
        self._end(reason, is_exit=False)

    def _end_at_exit(self) -> None:
        self._end("closed", is_exit=True)

    def _end(self, reason: str, *, is_exit: bool) -> None:
        if os.getpid() != self._pid:  # a forked child: whatever there is belongs to the parent
            return
        if self._run is not None:
            self._run.close(reason, is_exit=is_exit)
        atexit.unregister(self._end_at_exit)

    # A script may copy or pickle an object of its own that holds a pacer: what is attached belongs to this process.
    def __reduce__(self) -> tuple[Any, ...]:
        return _copied, ()

    def __enter__(self) -> Pacer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("finished" if kind is None else f"failed: {kind.__name__}")


def _no_knobs() -> Knobs:
    """Return empty knobs; imported once, as pacecar's files may be gone when a script asks."""
    try:
        from pacecar.records import Knobs

        return Knobs()
    except Exception:  # noqa: BLE001  the pacer is inert for that reason
        return cast("Knobs", SimpleNamespace(epoch=0, values={}))


def inert(
    reason: str,
    rescue: OomSafeTrial | None = None,
    *,
    level: int = logging.WARNING,
    scaler: Any = None,  # noqa: ANN401  a GradScaler
) -> Pacer:
    """Return a pacer that does nothing, for `reason`, which is logged once."""
    logger.log(level, "pacecar does not measure this job: %s", reason)
    return Pacer(rescue, inert_because=reason, scaler=scaler)


def _copied() -> Pacer:
    return Pacer(None, inert_because="it is a copy or a pickle of a pacer")


def inert_attach(error: Exception) -> Callable[..., Pacer]:
    """Return an `attach` that returns inert pacers, because what the real one needs raised `error` when imported."""
    reason = f"could not be loaded: {type(error).__name__}: {error}"

    def attach(model: object, optimizer: object, *, scaler: Any = None, **options: Any) -> Pacer:  # noqa: ANN401
        return inert(reason, scaler=scaler)

    return attach
