"""Measures and tunes transformers' Trainer by one callback: `Trainer(..., callbacks=[PacecarCallback()])`.

A callback receives model and optimizer but not the Trainer, and neither of them is the right one: the model is the one
inside DistributedDataParallel, the optimizer the one around torch's.  When training begins all is built, so the calling
Trainer is found on the stack.  From then on, during one `train()`, some of its methods are replaced
(`method_descriptors`): `get_batch_samples` to time the wait for data, `_save_checkpoint` to time checkpoints, and
`training_step` to compute other micro-batches.

Trainer calls `training_step` once for each loader batch and counts everything by these calls: steps, logs, checkpoints,
what a resumed run skips.  So the calls stay and what they compute changes (`regroup`), through Trainer's own
`training_step`: autocast, scaling and hooks are its own.  The loss is exact in both of Trainer's ways:

    divided by the items of the update (num_items_in_batch)    pieces add up as they are
    a mean, divided by current_gradient_accumulation_steps     that divisor is set to what the piece is a share of

Whether the model's loss really adds up is computed once, before the first step (`loss_additivity`).

What cannot be cut or needs its own loop (FSDP, DeepSpeed, context parallel) is measured, and buckets are tuned under
DDP. A subclass that overrides `training_step` keeps it, and its micro-batch.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from .guarded_imports import MethodReplacement, Regrouper, attach_for, checked, differs, replace_method, say

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError("pacecar.adapters.transformers needs transformers: pip install 'transformers>=5.23'") from error

if TYPE_CHECKING:
    from pacecar.job.handle import Pacer

__all__ = ["PacecarCallback"]

logger = logging.getLogger("pacecar")

FRAMES_MAX = 16
"""Calls between Trainer and a callback: two in every version we know."""

STEPPING = ("training_step", "get_batch_samples", "_run_epoch", "_inner_training_loop")
"""What must be Trainer's own if micro-batches are changed."""


class PacecarCallback(TrainerCallback):  # type: ignore[misc]  # transformers is not there when types are checked
    """Measures and tunes each `train()` of the Trainer that has this callback.

    Args:
        tune: "off", "advise" or "exact"; default as configured.
        micro_batch: whether another micro-batch may be computed.  None: if the loss is the model's own.  True: also
            if `compute_loss` is the script's; it declares that its loss is a mean over samples, or is divided by
            num_items_in_batch.  False: never.
        options: any other keyword of `pacecar.attach`: `run_dir`, `job`, `config`, keys of [hook] and [tune].

    Raises:
        TypeError: an option does not exist.
        ConfigError: an option or `tune` has a value that is not allowed.
    """

    def __init__(self, tune: str | None = None, *, micro_batch: bool | None = None, **options: Any) -> None:  # noqa: ANN401
        self._tune = tune
        self._may_regroup = micro_batch
        self._options = checked(tune, options)
        self._steps: _Steps | None = None
        self.pacer: Pacer | None = None
        """The pacer of the present training, or of the last one; None before."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ANN401
        """Attach: model and optimizer are built and wrapped now."""
        self._detach("another training began")
        try:
            self._attach(given.get("model"), given.get("optimizer"))
        except Exception:
            logger.warning("pacecar does not measure this training", exc_info=True)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:  # noqa: ANN401
        """Detach."""
        self._detach("finished")

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: what is attached belongs to this process."""
        return self.__dict__ | {"_steps": None, "pacer": None}

    def __deepcopy__(self, memo: object) -> PacecarCallback:
        return PacecarCallback(self._tune, micro_batch=self._may_regroup, **self._options)

    def _attach(self, model: Any, optimizer: Any) -> None:  # noqa: ANN401  transformers gives no types
        trainer = _trainer_of(self)
        if trainer is None:
            why = "the Trainer that calls this callback cannot be found"
            self.pacer = attach_for(
                "transformers", model, optimizer, tune=self._tune, options=self._options, untuned_because=why
            )
            return
        self.pacer = attach_for(
            "transformers", trainer.model_wrapped, trainer.optimizer, tune=self._tune, options=self._options
        )
        if not self.pacer.has_batcher:  # it logged why
            return
        steps = _Steps(trainer, self.pacer, is_vouched_for=self._may_regroup is True)
        refused = "micro_batch=False" if self._may_regroup is False else _refusal(trainer, self._may_regroup is True)
        if refused is not None:
            self.pacer.batcher.refused = refused
            if self.pacer.is_active and self._tune not in ("off", "advise") and self._may_regroup is not False:
                say(f"the micro-batch is not tuned: {refused}")
        steps.install(regroups=refused is None)
        self._steps = steps

    def _detach(self, reason: str) -> None:
        try:
            if self._steps is not None:
                self._steps.remove()
            if self.pacer is not None:
                self.pacer.close(reason)
        except Exception:
            logger.warning("pacecar could not be detached", exc_info=True)
        self._steps = None


class _Steps:
    """Replaces up to three methods of one Trainer during one `train()`."""

    def __init__(self, trainer: Any, pacer: Pacer, *, is_vouched_for: bool) -> None:  # noqa: ANN401  no types
        self._is_vouched_for = is_vouched_for
        self._trainer = trainer
        self._pacer = pacer
        self._regrouper = Regrouper(pacer.batcher)
        self._fetch: Callable[..., Any] = trainer.get_batch_samples
        self._step: Callable[..., torch.Tensor] = trainer.training_step
        self._save: Callable[..., Any] | None = getattr(trainer, "_save_checkpoint", None)
        self._timed: tuple[Any, Iterator[Any]] | None = None
        self._replacements: list[MethodReplacement] = []
        self._batches: list[Any] = []
        self._at = 0
        self._is_proven = False

    def install(self, *, regroups: bool) -> None:
        self._replace("get_batch_samples", self.fetch)
        if self._save is not None:
            self._replace("_save_checkpoint", self.save)
        if regroups:  # then none of them is set on the Trainer
            self._replace("training_step", self.step)

    def _replace(self, name: str, method: Callable[..., Any]) -> None:
        replacement = replace_method(self._trainer, name, method)
        if replacement is not None:
            self._replacements.append(replacement)

    def remove(self) -> None:
        for replacement in self._replacements:
            replacement.remove()
        self._replacements = []
        self._timed, self._batches = None, []

    def save(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as Trainer's
        """Save as Trainer does; charge the time to the checkpoint."""
        assert self._save is not None, "installed only where there is one"
        with self._pacer.checkpoint():
            return self._save(*args, **kwargs)

    def fetch(self, epoch_iterator: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  as Trainer's
        """Fetch the batches of one update as Trainer does, timed."""
        if self._timed is None or self._timed[0] is not epoch_iterator:
            self._timed = (epoch_iterator, iter(self._pacer.data(epoch_iterator)))
        fetched = self._fetch(self._timed[1], *args, **kwargs)
        self._batches, self._at = list(fetched[0]), 0
        self._regrouper.reset()
        return fetched

    def step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:  # noqa: ANN401
        """Compute what is due at this loader batch; return its part of the update's loss."""
        batches, self._at = self._batches, self._at + 1
        batcher, trainer = self._pacer.batcher, self._trainer
        if not self._is_proven:
            self._is_proven = True
            batcher.refused = batcher.refused or differs(
                trainer, batches, num_items_in_batch, is_vouched_for=self._is_vouched_for
            )
        if batcher.refused is not None or self._at > len(batches):
            return self._step(model, inputs, num_items_in_batch)
        total: torch.Tensor | None = None
        whole = trainer.current_gradient_accumulation_steps
        try:
            for micro, share in self._regrouper.micros(inputs, is_last=self._at == len(batches)):
                # Trainer divides a mean by this, but not a loss that was already divided by its items.
                trainer.current_gradient_accumulation_steps = whole if share == 1.0 else whole / share
                loss = self._step(model, micro, num_items_in_batch)
                total = loss if total is None else total + loss
        finally:
            trainer.current_gradient_accumulation_steps = whole
        return total if total is not None else torch.zeros((), device=trainer.args.device)


def _trainer_of(callback: TrainerCallback) -> Any:  # noqa: ANN401  a Trainer, or None
    """Return the Trainer that is calling `callback`: the one further up the stack that has it among its callbacks."""
    frame = sys._getframe(1)
    for _ in range(FRAMES_MAX):
        candidate = frame.f_locals.get("self")
        if isinstance(candidate, Trainer) and callback in candidate.callback_handler.callbacks:
            return candidate
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _refusal(trainer: Any, is_vouched_for: bool) -> str | None:  # noqa: ANN401  transformers gives no types
    """Return why this Trainer's micro-batch must stay, or None; its loss is tested later."""
    kind = type(trainer).__name__
    for name in STEPPING:
        if name in trainer.__dict__ or getattr(type(trainer), name, None) is not getattr(Trainer, name, None):
            return f"{kind} has a {name} of its own"
    if not is_vouched_for:
        if "compute_loss" in trainer.__dict__ or type(trainer).compute_loss is not Trainer.compute_loss:
            return f"{kind} has a compute_loss of its own; pass micro_batch=True if its loss is a mean over samples"
        if trainer.compute_loss_func is not None:
            return "compute_loss_func is given; pass micro_batch=True if its loss is divided by num_items_in_batch"
    accelerator, args = trainer.accelerator, trainer.args
    kind_of_run = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if kind_of_run not in ("NO", "MULTI_GPU", "MULTI_CPU"):
        return f"the run is of type {kind_of_run}"
    if args.n_gpu > 1:
        return "DataParallel splits batches itself"
    if getattr(accelerator, "parallelism_config", None) is not None:
        return "the Accelerator has a parallelism_config"
    if accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False):
        return "sync_each_batch synchronizes gradients with every batch"
    if getattr(getattr(trainer.model, "config", None), "output_router_logits", False):
        return "the router's auxiliary loss depends on which samples go through together"
    return None if isinstance(trainer.optimizer, Optimizer) else "there is no torch optimizer"
