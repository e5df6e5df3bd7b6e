"""Implements the knobs "micro_batch" (samples) and "micro_tokens" (padded tokens): which sizes may be tried.

A job has one of them.  If the loop gives its samples' tokens and `attach` began with a budget of tokens, memory and
time follow tokens; otherwise samples.

How large a size is offered depends on the loop.  `pacer.train_batch` controls forward and backward and finds out
whether a size fits without losing the step, so it may try all sizes.  In a plain loop only the script can catch what
its forward raises.  There only sizes are offered that fit even if all memory at the peak grew with the size (it grows
slower), with a fifth of the device's memory to spare.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import nn

from pacecar.config import TuneConfig

from ..actuator import NOTHING_BESIDE, Actuator, ActuatorError
from .micro_batch import MicroBatcher, MicroBatchLimit
from .micro_batch_eligibility import inexact
from .oom_safe_trial import OomSafeTrial

__all__ = ["MicroBatchActuator", "MicroTokensActuator"]

UNGUARDED_RATIO = 0.8
"""In a plain loop the predicted peak stays under this share of the device's memory: a mistake there ends the job."""

DOUBLINGS_MAX = 24
"""Most powers of two that are offered in either direction."""


class _SizeActuator(Actuator):
    """What both knobs have in common; `trials` knows whether the loop uses `train_batch`."""

    def __init__(
        self, model: nn.Module, batcher: MicroBatcher, config: TuneConfig, trials: OomSafeTrial | None = None
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._config = config
        self._trials = trials

    @abstractmethod
    def _limit(self) -> MicroBatchLimit: ...

    def _refusal(self) -> str | None:
        """Return why no size but the present one computes the same, or None."""
        batcher = self._batcher
        if batcher.is_looped and not (batcher.has_weighted or batcher.has_own_weights):
            return "losses are not weighted: use pacer.backward(loss) instead of loss.backward()"
        return inexact(self._model) or batcher.draws

    def is_barred(self, value: int, beside: Mapping[str, int] = NOTHING_BESIDE) -> bool:
        """Return whether `value` did not fit into memory on some rank."""
        limit = self._limit()
        return limit.is_barred(value, beside.get("checkpointed_blocks", limit.checkpointed()))

    def apply(self, value: int) -> None:
        """Split the next batches by `value`.

        Raises:
            ActuatorError: it is below 1, or did not fit before.
        """
        self._limit().turn(value, self.value())
        self._batcher.samples_cap = None

    def _sizes(self, value: int, low: int, high: int) -> set[int]:
        """Return `value` times powers of two from `low` to `high`, and `value`."""
        high = min(high, self._memory_ceiling(value))
        sizes = {value << i for i in range(DOUBLINGS_MAX)} | {value >> i for i in range(DOUBLINGS_MAX)}
        return {size for size in sizes if max(1, low) <= size <= high} | {value}

    def _memory_ceiling(self, value: int) -> int:
        """Return the largest size that fits if all memory at the peak grew with it; DOUBLINGS_MAX more where safe."""
        parameter = next(self._model.parameters(), None)
        is_guarded = self._trials is not None and self._trials.is_used
        if parameter is None or parameter.device.type != "cuda" or is_guarded:
            return value << DOUBLINGS_MAX
        peak = torch.cuda.max_memory_reserved(parameter.device)
        total = torch.cuda.get_device_properties(parameter.device).total_memory
        return max(value, int(value * UNGUARDED_RATIO * total / peak)) if peak > 0 else value


class MicroBatchActuator(_SizeActuator):
    """The knob "micro_batch": samples in one forward/backward of one rank; the batch stays as it is."""

    knob = "micro_batch"

    def _limit(self) -> MicroBatchLimit:
        return self._batcher.samples

    def value(self) -> int:
        """Return the size in force; the whole batch where none was set.

        Raises:
            ActuatorError: no size was set and no batch was seen yet.
        """
        value = self._batcher.micro_batch or self._batcher.batch_samples
        if value is None:
            raise ActuatorError("the batch size is not known yet: no batch went through microbatches()")
        return value

    def domain(self) -> tuple[int, ...]:
        """Return the present value times powers of two, and the whole batch, within bounds and memory."""
        batch, value = self._batcher.batch_samples, self.value()
        if batch is None:
            return (value,)
        low, high = self._config.micro_batch_min, min(batch, self._config.micro_batch_max)
        sizes = self._sizes(value, low, high)
        if low <= batch <= min(high, self._memory_ceiling(value)):
            sizes.add(batch)
        return tuple(sorted(sizes))

    def refusal(self) -> str | None:
        """Return what makes another micro-batch compute something else, or None."""
        batch = self._batcher.batch_samples
        if self._batcher.refused is not None:
            return self._batcher.refused
        if self._batcher.tokens.value is not None:
            return "micro-batches are cut by tokens (micro_tokens)"
        if batch is None:
            return "the batch size is not known: micro-batches are not used (iterate over pacer.microbatches(batch))"
        if batch <= 1:
            return f"the batch of a rank has {batch} sample: there is nothing to split"
        return self._refusal()


class MicroTokensActuator(_SizeActuator):
    """The knob "micro_tokens": padded tokens in one forward/backward of one rank; the batch stays as it is."""

    knob = "micro_tokens"

    def _limit(self) -> MicroBatchLimit:
        return self._batcher.tokens

    def value(self) -> int:
        """Return the budget in force.

        Raises:
            ActuatorError: none was given.
        """
        value = self._batcher.tokens.value
        if value is None:
            raise ActuatorError("no budget of tokens was given: pass attach(micro_tokens=...)")
        return value

    def domain(self) -> tuple[int, ...]:
        """Return the present value times powers of two, from one sample to the first that takes the whole batch.

        Based on what this rank has seen.  Ranks see different lengths, and only what all of them offer is tried.
        """
        value, whole, longest = self.value(), self._batcher.batch_tokens, self._batcher.sample_tokens
        if whole is None or longest is None:
            return (value,)
        low, high = self._config.micro_tokens_min, self._config.micro_tokens_max
        return tuple(sorted(self._sizes(value, max(low, longest), min(high, max(value, 2 * whole - 1)))))

    def refusal(self) -> str | None:
        """Return what makes another micro-batch compute something else, or None."""
        if self._batcher.tokens.value is None:
            return "no budget of tokens was given (attach(micro_tokens=...))"
        if self._batcher.batch_tokens is None:
            return "sample lengths are not known: pass them (pacer.microbatches(batch, tokens=mask))"
        return self._batcher.refused or self._refusal()
