"""Measures and tunes Lightning's Trainer by one callback: `Trainer(..., callbacks=[PacecarCallback()])`.

It attaches when training starts, because by then the strategy has wrapped the model and made the optimizers.  Lightning
runs forward and backward of a batch inside one *closure*, which it calls itself while it accumulates and passes to the
optimizer's step when an update is complete.  It counts batches by these calls: progress, checkpoints, logging and
validation intervals.  So the calls stay, and what one computes changes (`regroup`): another closure does what
Lightning's does, once for each micro-batch, through Lightning's own `training_step` and `backward`.

    batch 1    closure                      nothing, or the first pieces        zero_grad first, as always
    batch 2    optimizer.step(closure)      all that is left; the last piece synchronizes

What `training_step` logs is logged once for each micro-batch.  What it returns is that of the last one, with the loss
of all.  A LightningModule's loss cannot be tested beforehand, because `training_step` does more than compute.  So other
micro-batches need the caller's word: `micro_batch=True` declares that the loss is a mean over samples.

Manual optimization, several optimizers, and strategies other than DDP and one device are measured only, or tuned
without the micro-batch; one line says so.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import LBFGS

from .guarded_imports import MethodReplacement, Regrouper, attach_for, checked, replace_method, say

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.loops.optimization.automatic import Closure, ClosureResult
    from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
except ImportError as error:
    raise ImportError("pacecar.adapters.lightning needs lightning: pip install 'lightning>=2.6'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer

__all__ = ["PacecarCallback"]

logger = logging.getLogger("pacecar")

UNCONFIRMED = "pass micro_batch=True if the loss of training_step is a mean over samples"


class PacecarCallback(Callback):  # type: ignore[misc]  # lightning is not there when types are checked
    """Measures and tunes each `fit()` of the Trainer that has this callback.

    Args:
        tune: "off", "advise" or "exact"; default as configured.
        micro_batch: True declares that `training_step` returns a mean over the samples of its batch and calls no
            collective, so that other micro-batches train the same; otherwise it keeps the loader's.
        options: any other keyword of `pacecar.attach`: `run_dir`, `job`, `config`, keys of [hook] and [tune].

    Raises:
        TypeError: an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """

    def __init__(self, tune: str | None = None, *, micro_batch: bool = False, **options: Any) -> None:  # noqa: ANN401
        self._tune = tune
        self._is_vouched_for = micro_batch
        self._options = checked(tune, options)
        self._fit: _Fit | None = None
        self.pacer: Pacer | None = None
        """The pacer of the present fit, or of the last one; None before."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  lightning gives no types
        """Attach: the strategy has wrapped the model and made the optimizers."""
        self._detach("another training began")
        try:
            self._attach(trainer, pl_module)
        except Exception:
            logger.warning("pacecar does not measure this training", exc_info=True)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401  lightning gives no types
        """Detach."""
        self._detach("finished")

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:  # noqa: ANN401
        """Detach, with the reason."""
        self._detach(f"failed: {type(exception).__name__}")

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: what is attached belongs to this process."""
        return self.__dict__ | {"_fit": None, "pacer": None}

    def _attach(self, trainer: Any, module: Any) -> None:  # noqa: ANN401  lightning gives no types
        optimizers = trainer.optimizers
        if not optimizers:
            say("this training is not measured: it has no optimizer")
            return
        untuned = None
        if len(optimizers) > 1:
            untuned = f"{len(optimizers)} optimizers: a step is one of the first's"
        elif not isinstance(trainer.strategy, (DDPStrategy, SingleDeviceStrategy)):
            untuned = f"the strategy is {type(trainer.strategy).__name__}"
        self.pacer = attach_for(
            "lightning",
            trainer.strategy.model,
            optimizers[0],
            tune=self._tune,
            options=self._options,
            untuned_because=untuned,
        )
        if not self.pacer.has_batcher:  # it logged why
            return
        refused = _refusal(trainer, module) or (None if self._is_vouched_for else UNCONFIRMED)
        if refused is not None:
            self.pacer.batcher.refused = refused
            if untuned is None and self.pacer.is_active and self._is_vouched_for and self._tune != "off":
                say(f"the micro-batch is not tuned: {refused}")
        self._fit = _Fit(trainer, self.pacer)
        self._fit.install(regroups=refused is None)

    def _detach(self, reason: str) -> None:
        try:
            if self._fit is not None:
                self._fit.remove()
            if self.pacer is not None:
                self.pacer.close(reason)
        except Exception:
            logger.warning("pacecar could not be detached", exc_info=True)
        self._fit = None


class _Fit:
    """Replaces a few methods of one Trainer and its loops, for the time of one `fit()`."""

    def __init__(self, trainer: Any, pacer: Pacer) -> None:  # noqa: ANN401  lightning gives no types
        self._trainer = trainer
        self._pacer = pacer
        self._regrouper = Regrouper(pacer.batcher)
        self._loop = trainer.fit_loop.epoch_loop
        self._optimization = self._loop.automatic_optimization
        self._wait: AbstractContextManager[None] | None = None
        self._ours: list[MethodReplacement] = []
        self._make: Callable[..., Any] = self._optimization._make_closure
        self._save: Callable[..., Any] = trainer.save_checkpoint
        self._before: Callable[[], None] | None = getattr(self._loop, "_on_before_fetch", None)
        self._after: Callable[[], None] | None = getattr(self._loop, "_on_after_fetch", None)

    def install(self, *, regroups: bool) -> None:
        self._put(self._trainer, "save_checkpoint", self.save)
        if self._before is not None and self._after is not None:
            for name, ours in (("_on_before_fetch", self.before_fetch), ("_on_after_fetch", self.after_fetch)):
                self._put(self._loop, name, ours)
        if regroups and not self._put(self._optimization, "_make_closure", self.make_closure):
            self._pacer.batcher.refused = "the script has set a _make_closure of its own"

    def _put(self, owner: object, name: str, method: Callable[..., Any]) -> bool:
        replacement = replace_method(owner, name, method)
        if replacement is not None:
            self._ours.append(replacement)
        return replacement is not None

    def remove(self) -> None:
        for replacement in self._ours:
            replacement.remove()
        self._ours.clear()

    def save(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as Trainer's
        """Save as Trainer does; charge the time to the checkpoint."""
        with self._pacer.checkpoint():
            return self._save(*args, **kwargs)

    def before_fetch(self) -> None:
        """Begin to wait for data."""
        assert self._before is not None, "installed only where there is one"
        self._before()
        self._wait = self._pacer.waiting()
        self._wait.__enter__()

    def after_fetch(self) -> None:
        """End the wait for data: a batch is there, or there is no more."""
        assert self._after is not None, "installed only where there is one"
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.__exit__(None, None, None)
        self._after()

    def make_closure(self, kwargs: Any, *args: Any, **others: Any) -> Any:  # noqa: ANN401  as Lightning's
        """Return Lightning's closure, or one that computes what is due at this batch."""
        stock = self._make(kwargs, *args, **others)
        batcher = self._pacer.batcher
        if "batch" not in kwargs or stock._backward_fn is None:
            batcher.refused = batcher.refused or "training_step takes the loader's iterator, or backward is skipped"
        if batcher.refused is not None:
            return stock
        return _MicroClosure(self, stock, kwargs)

    def run(self, stock: Closure, kwargs: Any) -> ClosureResult:  # noqa: ANN401
        """Run forward and backward of what is due."""
        zero_grad = stock._zero_grad_fn
        if zero_grad is not None:
            self._regrouper.reset()  # the first batch of an update
        total: torch.Tensor | None = None
        extra: dict[str, Any] = {}
        is_last = not self._trainer.fit_loop._should_accumulate()
        for micro, share in self._regrouper.micros(kwargs["batch"], is_last=is_last):
            self._count_samples_of(micro)
            result = self._optimization._training_step(type(kwargs)(kwargs, batch=micro))
            if zero_grad is not None:
                zero_grad()
                zero_grad = None
            extra = result.extra
            if result.closure_loss is None:
                continue
            loss = result.closure_loss if share == 1.0 else result.closure_loss * share
            total = loss.detach().clone() if total is None else total + loss.detach()  # scalers work in place
            stock._backward_fn(loss)
        if zero_grad is not None:
            zero_grad()
        if total is None:
            total = torch.zeros((), device=self._trainer.strategy.root_device)
        return ClosureResult(total, extra=extra)

    def _count_samples_of(self, micro: Any) -> None:  # noqa: ANN401  any nest of tensors
        """Weight what `training_step` logs now by the samples of `micro` in the mean over an epoch."""
        results = getattr(self._trainer, "_results", None)
        if results is not None:
            results.batch, results.batch_size = micro, None


class _MicroClosure(Closure):  # type: ignore[misc]  # lightning is not there when types are checked
    """Lightning's closure of one batch, computed in other pieces."""

    def __init__(self, fit: _Fit, stock: Closure, kwargs: Any) -> None:  # noqa: ANN401
        super().__init__(stock._step_fn, stock._backward_fn, stock._zero_grad_fn)
        self._fit, self._stock, self._kwargs = fit, stock, kwargs

    @torch.enable_grad()
    def closure(self, *args: Any, **kwargs: Any) -> ClosureResult:  # noqa: ANN401
        """Run forward and backward of what is due."""
        return self._fit.run(self._stock, self._kwargs)


def _refusal(trainer: Any, module: Any) -> str | None:  # noqa: ANN401  lightning gives no types
    """Return why this Trainer's micro-batch must stay, or None."""
    if not module.automatic_optimization:
        return "the LightningModule optimizes manually"
    if type(trainer.strategy) not in (DDPStrategy, SingleDeviceStrategy):
        return f"the strategy is {type(trainer.strategy).__name__}"
    if isinstance(trainer.optimizers[0], LBFGS):
        return "LBFGS calls the closure several times in a step"
    optimization = trainer.fit_loop.epoch_loop.automatic_optimization
    missing = [name for name in ("_make_closure", "_training_step") if not hasattr(type(optimization), name)]
    if missing:
        return f"this Lightning has no {missing[0]}"
    return None
