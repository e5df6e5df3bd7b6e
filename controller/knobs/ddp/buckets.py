"""Implements the knobs of DDP's gradient buckets: the size of all of them, and that of the first one.

"As large as possible" (fewer collectives) and "as small as possible" (early communication) are both wrong somewhere.
Small buckets shorten the tail, the communication still to do when backward ends; they cost the fixed price of a
collective, times their number.  Which effect wins depends on the link and on the model, so both are tried.

`DdpKnobs` creates the knobs of a model under DDP together, because all of them share its one Reducer.

Not supported: a size for every bucket (torch's bucket_cap_mb_list; docs/decisions/0004-buckets-in-place.md has what
model and measurements show).  `reducer` replaces the Reducer.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from pacecar.config import TuneConfig
from pacecar.knobs import allows

from ..actuator import Actuator, powers_of_two
from .compression import CompressionActuator
from .gradient_check import GradientCheck
from .reducer import DdpReducer, ReducerActuator

__all__ = ["BucketActuator", "DdpKnobs", "FirstBucketActuator"]

BUCKETS_MAX = 64
"""The smallest bucket offered is this fraction of all gradients: more buckets cost latency and win no overlap."""


class BucketActuator(ReducerActuator):
    """The knob "bucket_bytes": the size to which DDP fills a gradient bucket before it is reduced.

    Without the knob of the first bucket, DDP's initial value brings its own first bucket back (1 MiB by default in
    torch), and any other value is the size of the first bucket too, as with an explicit `bucket_cap_mb`.
    """

    knob = "bucket_bytes"

    def value(self) -> int:
        """Return the bucket size in force.

        Raises:
            ActuatorError: the model is not under DistributedDataParallel.
        """
        return self._reducer.plan.bucket_bytes

    def domain(self) -> tuple[int, ...]:
        """Return powers of two from 1/64 of all gradients to all gradients, within bounds, and the present value."""
        total = sum(self._reducer.gradient_bytes())
        low = max(self._config.bucket_bytes_min, total // BUCKETS_MAX, 1)
        high = min(self._config.bucket_bytes_max, 1 << max(0, total - 1).bit_length())
        return powers_of_two(low, high, self.value())

    def refusal(self) -> str | None:
        """Return why the buckets must not be changed here, or None; also decides how they would be."""
        reason = self._reducer.refusal()
        if reason is not None:
            return reason
        if len(self.domain()) == 1:
            total = sum(self._reducer.gradient_bytes())
            return f"all gradients ({total} bytes) fit in the smallest bucket: nothing to choose"
        return self._reducer.prepare()

    def apply(self, value: int) -> None:
        """Replace DDP's Reducer by one with buckets of `value` bytes, even if that is the present size.

        Raises:
            ActuatorError: see `DdpReducer.request`.
        """
        self._reducer.request(bucket_bytes=value)


class FirstBucketActuator(ReducerActuator):
    """The knob "first_bucket_bytes": the size of the bucket that is reduced first, in effect at most the others'.

    While this knob exists, the first bucket keeps its size when the others change theirs.
    """

    knob = "first_bucket_bytes"

    def __init__(self, config: TuneConfig, reducer: DdpReducer) -> None:
        super().__init__(config, reducer)
        reducer.pin_first()

    def value(self) -> int:
        """Return the size in force.

        Raises:
            ActuatorError: the model is not under DistributedDataParallel.
        """
        return self._reducer.first_bytes

    def domain(self) -> tuple[int, ...]:
        """Return powers of two within bounds, below the present buckets and all gradients, and the present value."""
        total = sum(self._reducer.gradient_bytes())
        low = max(self._config.first_bucket_bytes_min, min(self._reducer.gradient_bytes(), default=1))
        high = min(self._config.first_bucket_bytes_max, self._reducer.plan.bucket_bytes, max(1, total - 1))
        return powers_of_two(low, high, self.value())

    def refusal(self) -> str | None:
        """Return why the first bucket must not be changed here, or None."""
        reason = self._reducer.refusal()
        if reason is not None:
            return reason
        if sum(self._reducer.gradient_bytes()) <= self._config.first_bucket_bytes_min or len(self.domain()) == 1:
            return "all gradients fit in the smallest first bucket: nothing to choose"
        reason = self._reducer.prepare()
        if reason is None and not self._reducer.can_size_first:
            return f"torch {torch.__version__}: DDP's own helper takes no size for the first bucket"
        return reason

    def apply(self, value: int) -> None:
        """Replace DDP's Reducer by one whose first bucket has `value` bytes.

        Raises:
            ActuatorError: see `DdpReducer.request`.
        """
        self._reducer.request(first_bytes=value)


class DdpKnobs:
    """The knobs of `model`'s DDP that `config` allows; `has_scaler` as in CompressionActuator."""

    def __init__(self, model: nn.Module, config: TuneConfig, *, has_scaler: bool) -> None:
        self.reducer = DdpReducer(model)
        self.actuators: list[Actuator] = []
        names = [name for name in config.knobs if allows(config.mode, name)]
        if "bucket_bytes" in names:
            self.actuators.append(BucketActuator(config, self.reducer))
        if "first_bucket_bytes" in names:
            self.actuators.append(FirstBucketActuator(config, self.reducer))
        if "compression" in names:
            self.actuators.append(CompressionActuator(config, self.reducer, has_scaler=has_scaler))

    def choice(self) -> str:
        """Return the compression in force on this rank."""
        hook = self.reducer.plan.hook
        return "none" if hook is None else hook.choice

    def gradient_check(self) -> GradientCheck | None:
        """Return the comparison of the ranks' gradients; None if DDP does not reduce over all ranks of the job.

        With several groups of ranks, one could find a difference that the others do not see at the same boundary.
        """
        ddp = self.reducer.ddp
        if ddp is None or not dist.is_initialized():
            return None
        ranks = dist.get_world_size(ddp.process_group)
        return GradientCheck(ddp) if 1 < ranks == dist.get_world_size() else None
