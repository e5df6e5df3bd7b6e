"""Defines `Pacer`, the object that `attach` returns to the script, active or inert.

An inert one measures and tunes nothing, and trains the script to the same numbers.  It must exist even if nothing else
of pacecar can be imported, not even torch.  So this module imports the standard library only, and gets the parts of an
active pacer from `attach` and `wiring`.
"""

from __future__ import annotations

import atexit
import os
import sys
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

T = TypeVar("T")


class Pacer:
    """What `attach` returns: the script's handle on the hook and the tuner.  Also a context manager.

    Not thread-safe: call it from the training thread.
    """

    def __init__(
        self,
        trials: OomSafeTrial | None,
        run: JobRun | None = None,
        *,
        inert_because: str | None = None,
        scaler: Any = None,  # noqa: ANN401
    ) -> None:
        """Make an active pacer of `run`, or an inert one without it.  Without `trials`, batches are not cut.

        `scaler` scales losses if there is no `trials` to do it.
        """
        self._batcher: MicroBatcher | None = None if trials is None else trials.batcher
        self._trials = trials
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
        """Whether there is a `batcher`; False if pacecar could not be loaded."""
        return self._batcher is not None

    @property
    def batcher(self) -> MicroBatcher:
        """The micro-batch in force; for adapters whose library runs forward and backward itself.

        Raises:
            RuntimeError: pacecar could not be loaded, so nothing cuts batches; `inert_because` says why.
        """
        if self._batcher is None:
            raise RuntimeError(f"pacecar could not be loaded: {self.inert_because}")
        return self._batcher

    @property
    def knobs(self) -> Knobs:
        """The knobs in force and their epoch; without values if nothing is tuned."""
        return self._untuned if self._tuner is None else self._tuner.knobs

    @property
    def advice(self) -> tuple[str, ...]:
        """What would be turned if that were allowed, and what only a restart can change; on rank 0, empty elsewhere."""
        return () if self._run is None or self._run.commands is None else self._run.commands.advice()

    def data(self, loader: Iterable[T], *, tune: bool | None = None) -> Iterable[T]:
        """Wrap what the training loop iterates over, so that waiting for data is measured and samples are counted.

        The wrapper iterates like `loader`, any number of times, and has its length.  Samples are the first dimension of
        the first tensor in a batch unless `count` says otherwise.

        The workers of the first loader are tuned if it is torch's; `tune=True` names another, False rules one out.
        """
        if self._knobs is not None:
            loader = self._knobs.loaders.wrap(loader, tune)
        return self._hook.loop.data(loader) if self._hook is not None else loader

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batch of each optimizer update: one of `loader`, or several concatenated along dimension 0.

        Only mode "adaptive" with the knob `batch_samples` combines batches.  To use both, put it around `data`,
        `pacer.batches(pacer.data(loader))`, and cut what it yields with `microbatches` or `train_batch`.

        Raises:
            ValueError: batches to combine differ in more than dimension 0.
        """
        batch = None if self._knobs is None else self._knobs.global_batch
        return iter(loader) if batch is None else batch.grouper.batches(loader)

    def microbatches(
        self, batch: T, *, tokens: Given | None = None, count: Given | None = None, trim: bool = False
    ) -> Iterator[T]:
        """Yield `batch` in slices along dimension 0, as large as the micro-batch knob says.

        Under DistributedDataParallel the gradients are synchronized with the last slice only.  Use `backward` on each
        slice's loss: it weights the slice by its share of the samples, so that the accumulated gradient of a
        mean-reduced loss equals that of the whole batch, except for the order of summation.

        Args:
            batch: tensors in any nest of tuples, lists and mappings.
            tokens: a mask (samples, positions), or each sample's length; with `attach(micro_tokens=...)` a slice takes
                at most that many tokens, padding included.
            count: for a loss that is a mean over tokens: a mask of the tokens that count, such as `labels != -100`, or
                each sample's number; slices without any are left out.
            trim: drop the columns that a whole slice pads, from tensors whose dimension 1 is as wide as the mask.

        Raises:
            ValueError: tensors in the batch disagree about dimension 0, or `tokens` or `count` do not belong to it.
        """
        if self._batcher is None:
            return iter((batch,))
        self._batcher.is_looped = True
        return self._batcher.split(batch, tokens=tokens, count=count, trim=trim)

    def backward(self, loss: torch.Tensor, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Backpropagate the mean-reduced `loss` of the current micro-batch with its weight, or with `weight`.

        A loss that is a sum has weight 1.  Other keywords go to torch unchanged.
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

        Replaces the loop over `microbatches`: `loss_fn(slice)` returns the slice's mean loss; the rest is the same.  A
        micro-batch that does not fit into memory then costs no step: a larger one runs first where it can do no harm,
        and is barred on all ranks if it fails on one.

        Every rank must call it equally often between two optimizer steps, and `loss_fn` must not contain collectives.
        """
        if self._trials is None:
            whole = loss_fn(batch)
            self.backward(whole)
            return whole.detach()
        loss = self._trials.train_batch(batch, loss_fn, tokens=tokens, count=count, trim=trim)
        if self._loss_monitor is not None:
            self._loss_monitor.loss(loss)
        return loss

    def loss(self, value: torch.Tensor | float) -> None:
        """Report a loss of the current step if `backward` is not used; several in one step add up.

        Mode "lossy" watches it: compression of gradients is taken back when the loss leaves its band.  A tensor is read
        some steps later, without waiting for it.
        """
        if self._loss_monitor is not None:
            self._loss_monitor.loss(value)

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Report how many samples or tokens this rank trains on in the current step; adds up until the step ends."""
        if self._hook is not None:
            self._hook.loop.count(samples=samples, tokens=tokens)

    def resume(self, step: int) -> None:
        """Report that the training has had `step` optimizer updates so far, over all its restarts.

        Only needed if the optimizer does not count them in its state (SGD), or its state was not restored: then
        `pacecar report` cannot know which steps a restart trains again.

        Raises:
            ValueError: `step` is negative.
        """
        if step < 0:
            raise ValueError(f"resume: step {step} is negative")
        if self._hook is not None:
            self._hook.resume(step)

    def checkpoint(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `checkpoint`: save checkpoints inside it.

        It may stand anywhere in the loop, before the first step and after the last.  For an asynchronous save, put the
        part that the loop waits for into it.
        """
        return self._hook.loop.checkpoint() if self._hook is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context whose time is charged to `data_wait`, for loops whose loader cannot go through `data`."""
        return self._hook.loop.waiting() if self._hook is not None else nullcontext()

    def close(self, reason: str = "closed") -> None:
        """Detach: remove every hook, deliver what is queued (for at most two seconds).  May be called again.

        Close on all ranks after the same step: then a setting that is only being tried is taken back.  If one rank
        closes alone, the setting stays on all ranks, and the log says so.
        """
        self._end(reason, is_exit=False)

    def _end_at_exit(self) -> None:
        kind = getattr(sys, "last_type", None)  # set when an uncaught exception was printed
        self._end("closed" if kind is None else f"failed: {kind.__name__}", is_exit=True)

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
    """Return empty knobs; imported once, since pacecar's files may be gone when a script asks."""
    try:
        from pacecar.records import Knobs

        return Knobs()
    except Exception:  # noqa: BLE001  the pacer is inert for that reason
        return cast("Knobs", SimpleNamespace(epoch=0, values={}))


def inert(
    reason: str,
    trials: OomSafeTrial | None = None,
    *,
    is_wanted: bool = False,
    scaler: Any = None,  # noqa: ANN401  a GradScaler
) -> Pacer:
    """Return a pacer that does nothing, and log `reason` once, as a warning unless the user wants it so."""
    import logging  # here, because importing it takes ten times as long as `import pacecar` without it

    level = logging.INFO if is_wanted else logging.WARNING
    logging.getLogger("pacecar").log(level, "pacecar does not measure this job: %s", reason)
    return Pacer(trials, inert_because=reason, scaler=scaler)


def _copied() -> Pacer:
    return Pacer(None, inert_because="it is a copy or a pickle of a pacer")


def inert_attach(error: Exception) -> Callable[..., Pacer]:
    """Return an `attach` that returns inert pacers, because importing the real one raised `error`."""
    reason = f"could not be loaded: {type(error).__name__}: {error}"

    def attach(model: object, optimizer: object, *, scaler: Any = None, **options: Any) -> Pacer:  # noqa: ANN401
        return inert(reason, scaler=scaler)

    return attach
