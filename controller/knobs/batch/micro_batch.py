"""Splits a rank's batch into micro-batches, and weights their losses so that the gradient stays the whole batch's.

"As many samples at once as fit" is wrong in two ways: the fastest size is often smaller than the largest, and a size
that the script fixed for another GPU is often far too small.  So the size is a knob, and the rank's batch stays what
the data loader gave: only the number of forward/backward passes in one optimizer update changes.

    batch of 10, micro-batch 4:   0123 4567 89      weights 0.4 0.4 0.2     gradients synchronized with the last only

Exact for a loss that is a mean: each micro-batch's mean is weighted by its share of the samples, or of the loss terms
that the script counts (`batch_slicing`).  The sum of the weighted gradients is the gradient of the batch's mean, except
for the order of summation.

The knob refuses models with batch normalization or dropout, which depend on the micro-batch; losses across samples
(contrastive) cannot be detected here.  For sizes that do not fit see `oom_safe_trial`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..actuator import ActuatorError
from ..dataloader.randomness_check import fingerprint
from .batch_slicing import BatchSlices, Given, Lengths, cut, measure, plan, samples_in, terms_of, width_of
from .gradient_noise_meter import GradientNoiseMeter

__all__ = ["MicroBatchLimit", "MicroBatcher"]

T = TypeVar("T")

WATCHED_BATCHES = 4
"""The loop must draw no random numbers until this batch, beside the first, which may initialize something: as many as
come before the size is offered."""

DRAWS = "the loop draws random numbers for each micro-batch, and other micro-batches would draw others"


class MicroBatchLimit:
    """A bound on micro-batches that is the same on all ranks: what is in force, what fitted, and what did not.

    Every rank makes the same calls in the same order, so all hold the same sizes for proven.  The script's first size
    counts as proven: whether it fits is the script's own affair.  What did not fit may fit where more blocks are
    checkpointed; `checkpointed` returns how many are.

    Where the script gave no size, `whole` is the batch at the first turn, and stands for the whole batch from then on:
    a script whose batch grows later still trains it at once.
    """

    def __init__(self, value: int | None = None) -> None:
        self.value = value
        self.checkpointed: Callable[[], int] = int  # none, unless they can be turned
        self._barred: list[tuple[int, int]] = []
        """Sizes that did not fit, each with the number of checkpointed blocks then."""
        self.fallback: int | None = None
        """The last proven size that was in force."""
        self.whole: int | None = None
        self._proven: int | None = None

    @property
    def is_unproven(self) -> bool:
        """Whether the size in force is larger than every size that was seen to fit."""
        return self._proven is not None and self.value is not None and self.value > self._proven

    def turn(self, value: int, present: int) -> None:
        """Change it from `present` to `value`.

        Raises:
            ActuatorError: the value makes no sense, or did not fit before.
        """
        if value < 1:
            raise ActuatorError(f"{value} is below 1")
        if self.is_barred(value, self.checkpointed()):
            raise ActuatorError(f"{value} did not fit into memory before")
        if self._proven is None:
            self._proven = present
            self.whole = self.whole or (present if self.value is None else None)
        if present <= self._proven:
            self.fallback = present
        self._set(value)

    def _set(self, value: int) -> None:
        self.value = None if value == self.whole else value

    def is_barred(self, value: int, checkpointed: int) -> bool:
        """Return whether `value` is at least as large as one that did not fit with as many `checkpointed` blocks."""
        return any(value >= size and checkpointed <= blocks for size, blocks in self._barred)

    def prove(self) -> None:
        """Record that the size in force fits, on all ranks."""
        if self.is_unproven:
            self._proven = self.value

    def retreat(self) -> tuple[int, int]:
        """Bar the size in force, which does not fit on some rank, and go back; return the barred and the new size."""
        assert self.value is not None, "the whole batch always counts as proven"
        assert self.fallback is not None, "a size is unproven only after it was turned"
        barred = self.value
        self._set(self.fallback)
        self._barred.append((barred, self.checkpointed()))
        return barred, self.fallback


class MicroBatcher:
    """Splits batches and keeps gradient synchronization for the last micro-batch of each.

        for micro in batcher.split(batch):
            loss = criterion(model(micro.x), micro.y)   # a mean over dim 0
            batcher.backward(loss)
        optimizer.step()

    `ddp` is the model's DistributedDataParallel, if any.  `micro_batch` is the largest number of samples in one
    forward/backward, `micro_tokens` of padded tokens if the loop gives them; None: the whole batch at once.  `scaler`
    is a torch.amp.GradScaler or similar.

    `batch_samples` and `batch_tokens` are the largest batch seen and `sample_tokens` its longest sample, None before
    the first; `weight` and `is_last` describe the present micro-batch.  `samples_cap` bounds this rank alone.
    `whole_samples` is what goes through at once if no `micro_batch` is in force and batches are combined.  `refused` is
    the reason why the size must not be changed under the caller; None if it may.  `draws` is the same if the loop draws
    random numbers while a micro-batch is out.  `is_looped`: the script itself iterates over micro-batches.
    `share_factor` returns what the losses of a batch of so many samples are multiplied by if ranks share work unevenly.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel | None,
        micro_batch: int | None = None,
        *,
        micro_tokens: int | None = None,
        scaler: Any = None,  # noqa: ANN401  anything with scale(loss)
    ) -> None:
        for name, size in (("micro_batch", micro_batch), ("micro_tokens", micro_tokens)):
            if size is not None and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        self.samples = MicroBatchLimit(micro_batch)
        self.tokens = MicroBatchLimit(micro_tokens)
        self.samples_cap: int | None = None
        self.whole_samples: int | None = None
        self.meter: GradientNoiseMeter | None = None
        self.batch_samples: int | None = None
        self.batch_tokens: int | None = None
        self.sample_tokens: int | None = None
        self.weight = 1.0
        self.is_last = True
        self.refused: str | None = None
        self.draws: str | None = None
        self._watched = 0
        self.share_factor: Callable[[int], float] | None = None
        self.has_weighted = self.has_own_weights = self.counts_terms = False
        self.is_looped = False
        self._factor = 1.0
        self.ddp = ddp
        # Without this switch in torch, every micro-batch synchronizes: slower, with the same gradients.
        self._gated = ddp if hasattr(ddp, "require_backward_grad_sync") else None
        self._scaler = scaler
        self._sync_before: bool | None = None
        self._present_samples = 0

    @property
    def has_scaler(self) -> bool:
        """Whether losses are scaled by a GradScaler or similar."""
        return self._scaler is not None

    @property
    def micro_batch(self) -> int | None:
        """Samples in one forward/backward, or the number that stands for whole batches; None until that is known."""
        return self.samples.value or self.samples.whole

    def split(
        self, batch: T, *, tokens: Given | None = None, count: Given | None = None, trim: bool = False
    ) -> Iterator[T]:
        """Yield `batch` in slices along dim 0 of every tensor in it, the last one possibly smaller.

        Tensors are found in tuples, lists, dicts, namedtuples and other mappings; tensors without dimensions and
        everything else are passed through whole, to every slice.  While a slice other than the last is out, DDP's
        gradient synchronization is off, as in `no_sync()`; it is restored when the loop ends, breaks or raises.  A
        batch that is not larger than the micro-batch is yielded as it is.

        `tokens` and `count` are each a mask or one number for each sample (reading them from a device waits for it): a
        sample's length, for the bound on padded tokens, and its terms in the loss, for the weights.  `trim` drops the
        columns that all samples of a slice pad, from every tensor whose dim 1 is as wide as the mask, or, if `tokens`
        are lengths, as the first tensor that has one.

        Raises:
            ValueError: there is no tensor to split, two tensors differ in dim 0 (names the leaf), or `tokens` or
                `count` do not belong to this batch.
        """
        samples = samples_in(batch)
        if self._watched == 0:
            self.refused = self.refused or _uncuttable(batch)
        if trim and tokens is None:
            raise ValueError("trim needs tokens: the mask, or the length of each sample")
        lengths = None if tokens is None else measure(tokens, samples, width_of(batch))
        terms = None if count is None else terms_of(count, samples)
        self._factor = 1.0 if self.share_factor is None else self.share_factor(samples)
        if self._factor == 1.0:
            self.batch_samples = max(samples, self.batch_samples or samples)
        self.counts_terms = self.counts_terms or count is not None
        if lengths is not None:
            self._record_lengths(lengths, samples, trim=trim)
        self._present_samples = samples
        whole = self.whole_samples if self._factor == 1.0 else self.batch_samples  # memory holds no more at once
        bounds = [b for b in (self.samples.value or whole, self.samples_cap) if b is not None]
        cuts = plan(
            samples,
            samples_max=min(bounds, default=None),
            tokens_max=self.tokens.value,
            lengths=lengths,
            terms=terms,
            trim=trim,
        )
        return self._slices(batch, cuts, samples, lengths)

    def _record_lengths(self, lengths: Lengths, samples: int, *, trim: bool) -> None:
        whole = lengths.padded(0, samples, trim=trim)
        self.batch_tokens = max(whole, self.batch_tokens or whole)
        longest = lengths.longest(0, samples) if trim else lengths.width
        self.sample_tokens = max(longest, self.sample_tokens or longest)

    def _slices(self, batch: T, cuts: list[BatchSlices], samples: int, lengths: Lengths | None) -> Iterator[T]:
        self._restore()  # an earlier loop may have been abandoned
        self.weight, self.is_last = 1.0, True
        width = None if lengths is None else lengths.width
        is_watched, self._watched = 0 < self._watched < WATCHED_BATCHES, self._watched + 1
        if len(cuts) == 1 and cuts[0].high - cuts[0].low == samples and cuts[0].keep in (None, width):
            before = _random_state() if is_watched else None
            yield batch  # an empty batch too, which the script must handle
            self._look_for_draws(before)
            return
        ddp = self._gated
        if ddp is not None:
            self._sync_before = ddp.require_backward_grad_sync
        try:
            for piece in cuts:
                self.is_last = piece is cuts[-1]
                if ddp is not None:
                    # Inside the user's own no_sync() the last micro-batch must not synchronize either.
                    ddp.require_backward_grad_sync = bool(self._sync_before) and self.is_last
                self.weight = piece.weight
                before = _random_state() if is_watched else None
                yield cut(batch, piece, width)
                self._look_for_draws(before)
        finally:
            self.weight, self.is_last = 1.0, True
            self._restore()

    def _look_for_draws(self, before: object) -> None:
        if before is not None and before != _random_state():
            self.draws = DRAWS

    def _restore(self) -> None:
        if self._gated is not None and self._sync_before is not None:
            self._gated.require_backward_grad_sync = self._sync_before
        self._sync_before = None

    def backward(self, loss: Tensor, *, weight: float | None = None, **kwargs: Any) -> None:  # noqa: ANN401
        """Run `loss.backward(**kwargs)`, weighted by this micro-batch's share and scaled by the scaler, if any.

        `loss` must be the mean over the samples of the micro-batch, or over the loss terms given to `split`; for
        another loss give the `weight`: 1.0 for a sum.  With the whole batch at once nothing is multiplied, so the
        gradients are those of `loss.backward()` to the last bit.
        """
        self.has_weighted = self.has_weighted or weight is None
        self.has_own_weights = self.has_own_weights or weight is not None
        share = self.weight * self._factor if weight is None else weight
        weighted = loss if share == 1.0 else loss * share
        if self._scaler is not None:
            weighted = self._scaler.scale(weighted)
        meter = self.meter if self.is_last else None
        if meter is None:
            weighted.backward(**kwargs)  # type: ignore[no-untyped-call]
            return
        meter.begin(self._present_samples)
        try:
            weighted.backward(**kwargs)  # type: ignore[no-untyped-call]
        except BaseException:
            meter.abandon()
            raise
        meter.end()


def _uncuttable(batch: object) -> str | None:
    """Return why `batch` cannot be cut, or None: the trial of another size must not be the first to find out."""
    try:
        cut(batch, BatchSlices(0, 1, 1.0))
    except Exception as error:  # noqa: BLE001  sparse and nested tensors, and whatever a script puts into a batch
        return f"a batch cannot be cut ({type(error).__name__}: {str(error)[:120]})"
    return None


def _random_state() -> object:
    """Return what changes when a global generator, or that of the present CUDA device, is drawn from; None: unknown."""
    try:
        is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        is_readable = is_used and not torch.cuda.is_current_stream_capturing()
        return fingerprint(), torch.cuda.get_rng_state().tolist() if is_readable else None
    except Exception:  # noqa: BLE001  called inside the script's loop
        return None
