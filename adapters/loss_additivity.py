"""Checks whether a model's loss adds up over pieces of a batch, by computing it once on the job's own first batch.

The caller declares that a loss is a mean over samples, or a sum over items divided by the update's number of them, and
models are wrong about it.  Trainer assumes that a forward that accepts any keyword divides by num_items_in_batch, which
it may ignore; a contrastive loss compares the samples that are there; a router's loss balances them.  Cut differently,
all of these train something else.  So before anything is turned, forward runs over a batch at once and in two pieces,
without gradients, and the two losses must be equal except for rounding.

Random numbers and buffers are restored afterwards.  The model is the one inside DistributedDataParallel, so no
collective is called, and ranks may get different answers: if one refuses, it refuses for all.

Differences that show in other batches only are missed, such as labels that are ignored in some samples of a plain mean.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pacecar.controller.knobs.batch.batch_slicing import BatchSlices, cut, samples_in
from pacecar.controller.knobs.batch.global_batch import put_together
from pacecar.controller.knobs.batch.micro_batch_eligibility import inexact

from .regroup import kind_of

__all__ = ["differs"]

TOLERANCE = 2e-5
"""Relative, in float32: kernels for another batch size differ by some 1e-6, a wrong weight by a half."""

TOLERANCE_LOW = 2e-2
"""The same for bfloat16, float16 or TF32: two to three digits, which hide a small term of a loss. So there the model
must be one of transformers' own, or the caller must declare that its loss adds up."""


def differs(trainer: Any, batches: list[Any], items: Any, *, is_vouched_for: bool = False) -> str | None:  # noqa: ANN401
    """Return why this Trainer's loss depends on how batches are cut, or None; any failure is a reason.

    `is_vouched_for`: the caller declares that it does not, which is believed if the digits are too few to tell.
    """
    is_low = _is_low(trainer)
    try:
        reason = inexact(trainer.model)
        if reason is not None:
            return reason
        if is_low and not is_vouched_for and not _is_well_known(trainer.model):
            return "its loss has too few digits to see whether it adds up; pass micro_batch=True if it does"
        pieces = _pieces(batches)
        if pieces is None:
            return "its first batches can be neither cut nor combined"
        whole, parts = pieces
        is_scaled = _divides_by_items(trainer, items)
        labels = whole.get("labels") if isinstance(whole, dict) else None
        if not is_scaled and isinstance(labels, torch.Tensor) and labels.dim() > 1 and not labels.is_floating_point():
            return "its loss is a mean over tokens and not divided by the update's number of them (num_items_in_batch)"
        with undisturbed(trainer.model), torch.no_grad():
            losses = [_loss(trainer, batch, items) for batch in (whole, *parts)]
    except Exception as error:  # noqa: BLE001  the job comes first: this forward was pacecar's
        return f"its loss could not be computed in pieces ({type(error).__name__}: {str(error)[:120]})"
    samples = samples_in(whole)
    shares = [1.0 if is_scaled else samples_in(part) / samples for part in parts]
    at_once, added = losses[0].item(), sum(s * v.item() for s, v in zip(shares, losses[1:], strict=True))
    if math.isclose(at_once, added, rel_tol=TOLERANCE_LOW if is_low else TOLERANCE, abs_tol=1e-6):
        return None
    return f"its loss depends on how a batch is cut ({at_once:.6g} at once, {added:.6g} in pieces)"


def _is_low(trainer: Any) -> bool:  # noqa: ANN401  transformers gives no types
    """Return whether anything computes with fewer digits than float32 has."""
    if trainer.accelerator.mixed_precision != "no":
        return True
    if any(p.is_floating_point() and p.dtype.itemsize < torch.float32.itemsize for p in trainer.model.parameters()):
        return True
    is_cuda = any(p.is_cuda for p in trainer.model.parameters())
    return is_cuda and (torch.get_float32_matmul_precision() != "highest" or torch.backends.cudnn.allow_tf32)


def _is_well_known(model: nn.Module) -> bool:
    """Return whether forward and loss come from transformers, perhaps inside peft."""
    is_wrapped = type(model).__module__.startswith("peft.")
    inner: Any = model.get_base_model() if is_wrapped else model  # type: ignore[operator]  # peft's own, untyped here
    return type(inner).__module__.startswith("transformers.models.")


def _pieces(batches: list[Any]) -> tuple[Any, list[Any]] | None:
    """Return a batch and two parts of it: halves of the first, or if that is one sample, the first two together."""
    if not batches:
        return None
    first = batches[0]
    samples = samples_in(first)
    if samples > 1:
        half = samples // 2
        return first, [cut(first, BatchSlices(0, half, 0.0)), cut(first, BatchSlices(half, samples, 0.0))]
    alike = next((b for b in batches[1:] if kind_of(b) is not None and kind_of(b) == kind_of(first)), None)
    return None if alike is None else (put_together([first, alike]), [first, alike])


def _divides_by_items(trainer: Any, items: Any) -> bool:  # noqa: ANN401  transformers gives no types
    """Return whether Trainer.training_step assumes that the loss is divided by the items, as in transformers 5."""
    is_scaled: bool | None = getattr(trainer, "loss_is_scaled_for_ga", None)
    if is_scaled is not None:
        return is_scaled
    return bool(trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None


def _loss(trainer: Any, batch: Any, items: Any) -> torch.Tensor:  # noqa: ANN401  transformers gives no types
    inputs = trainer._prepare_inputs(dict(batch))
    with trainer.compute_loss_context_manager():
        loss: torch.Tensor = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=items)
    return loss.detach().float()


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Run what is inside in training mode, and restore random numbers, buffers and the modes afterwards."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]  # frozen parts may be in evaluation mode
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            model.train()
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
