"""Implements the knobs of a DeepSpeed engine: the two sizes that ZeRO reads again in each step.

All settings look alike in DeepSpeed's configuration, but most are read only once.  runtime/zero (0.19) reads these
where the work is done, so they can change between two steps:

    reduce_bucket_size     ZeRO 1 and 2 allocate the bucket at the first gradient after a reduction, and compare each
                           with the size; ZeRO 3 does too, but allocates once: there it only shrinks
    prefetch_bucket_size   ZeRO 3's coordinator, at each module that it gathers, within max_live_parameters

Both only group what is communicated: sums are the same except for their order, gathered parameters to the last bit.
There is no public setter, so attributes are set, and an engine that looks unfamiliar is refused.

allgather_bucket_size looks like a third, but is read only if torch has no all_gather_into_tensor.  The micro-batch
belongs to the loop that calls the engine; overlap_comm decides about streams when the engine is made
(`restart_advice`).

Refused: ZenFlow, DeepCompile, experts and unmanaged accumulation, which reduce in other ways.
"""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn

from pacecar.config import TuneConfig

from .actuator import Actuator, ActuatorError, powers_of_two
from .memory_limit import MEMORY_RATIO_MAX, peak_ratio

__all__ = ["ZeroBucketActuator", "ZeroPrefetchActuator", "zero_knobs"]

PIECES_MAX = 64
"""The smallest size offered is this fraction of all parameters: more collectives cost latency and win no overlap."""

BUFFERS = 2
"""Buckets that ZeRO 1 and 2 hold at one time with overlap_comm; without it one."""

_PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
"""The attribute of ZeRO 3's coordinator, as Python mangles a name that begins with two underscores."""

_STAGES = {"DeepSpeedZeroOptimizer": "ZeRO 1 or 2", "DeepSpeedZeroOptimizer_Stage3": "ZeRO 3"}


def zero_knobs(model: nn.Module, config: TuneConfig) -> list[Actuator]:
    """Return the knobs of a model that is a DeepSpeed engine, including refused ones; none for any other."""
    if not any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__):
        return []
    kinds: list[type[_ZeroActuator]] = [ZeroBucketActuator, ZeroPrefetchActuator]
    return [kind(model, config) for kind in kinds if kind.knob in config.knobs]


class _ZeroActuator(Actuator):
    """What both knobs have in common: a size in elements that DeepSpeed keeps in one attribute of one object."""

    def __init__(self, engine: nn.Module, config: TuneConfig) -> None:
        self._engine: Any = engine  # DeepSpeed has no types
        self._config = config
        self._optimizer: Any = getattr(engine, "optimizer", None)
        self._home: int | None = None

    @property
    def _is_stage3(self) -> bool:
        return type(self._optimizer).__name__ == "DeepSpeedZeroOptimizer_Stage3"

    def _holder(self) -> tuple[Any, str]:
        """Return the object and the attribute that hold the size in elements."""
        raise NotImplementedError

    def _item_bytes(self) -> int:
        return max((p.element_size() for p in self._engine.module.parameters()), default=4)

    def _sizes(self) -> list[int]:
        """Return the bytes of each whole parameter; ZeRO 3 keeps shards and records the size of the whole."""
        item = self._item_bytes()
        return [int(getattr(p, "ds_numel", p.numel())) * item for p in self._engine.module.parameters()]

    def value(self) -> int:
        """Return the size in force, in bytes.

        Raises:
            ActuatorError: it cannot be read.
        """
        try:
            holder, name = self._holder()
            elements = getattr(holder, name)
        except AttributeError as error:
            raise ActuatorError(f"this DeepSpeed's ZeRO is not understood ({error})") from error
        if type(elements) is not int or elements <= 0:
            raise ActuatorError(f"this DeepSpeed's {name} is {elements!r}")
        if self._home is None:
            self._home = elements * self._item_bytes()
        return elements * self._item_bytes()

    def domain(self) -> tuple[int, ...]:
        """Return powers of two up to all parameters at once, within bounds, and the present value."""
        sizes, value = self._sizes(), self.value()
        total, largest = sum(sizes), max(sizes, default=0)
        low = max(self._config.bucket_bytes_min, total // PIECES_MAX, largest, 1)
        high = min(self._config.bucket_bytes_max, 1 << max(0, total - 1).bit_length())
        return tuple(size for size in powers_of_two(low, high, value) if size == value or self._fits(size))

    def _fits(self, size: int) -> bool:
        raise NotImplementedError

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        if type(self._engine).__name__ != "DeepSpeedEngine":
            return f"the engine is a {type(self._engine).__name__}"
        if type(self._optimizer).__name__ not in _STAGES:
            return f"there is no ZeRO 1 to 3 at work (the optimizer is {type(self._optimizer).__name__})"
        other = _refused_kind(self._engine)
        if other is not None:
            return other
        try:
            self.value()
        except ActuatorError as error:
            return str(error)
        if len(self.domain()) == 1:
            return f"all parameters ({sum(self._sizes())} bytes) fit in the smallest size: nothing to choose"
        return None

    def layout(self) -> str:
        """Return a hash of the kind of ZeRO and of the parameters' sizes."""
        text = repr((type(self._optimizer).__name__, self._sizes(), self._item_bytes()))
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def apply(self, value: int) -> None:
        """Have ZeRO use `value` bytes from the next gradient or module on.

        Raises:
            ActuatorError: it cannot be set now; the old value stays in force.
        """
        item = self._item_bytes()
        if value < item or (self._home is not None and value != self._home and not self._fits(value)):
            raise ActuatorError(f"{self.knob} {value} is outside what this engine has room for")
        self._check_idle()
        try:
            holder, name = self._holder()
            if not hasattr(holder, name):
                raise AttributeError(name)
            setattr(holder, name, value // item)
        except AttributeError as error:
            raise ActuatorError(f"this DeepSpeed's ZeRO is not understood ({error})") from error

    def _check_idle(self) -> None:
        """Raise ActuatorError while ZeRO is still using the size in force."""


class ZeroBucketActuator(_ZeroActuator):
    """The knob "zero_bucket_bytes": the size to which ZeRO fills its bucket of gradients before it is reduced.

    No size below the largest gradient is offered, which ZeRO would reduce by itself, without a bucket.
    """

    knob = "zero_bucket_bytes"

    def _holder(self) -> tuple[Any, str]:
        return self._optimizer, "reduce_bucket_size"

    def _fits(self, size: int) -> bool:
        home = self._home if self._home is not None else self.value()
        if size <= home:
            return True
        return not self._is_stage3 and not _is_beyond_memory(self._engine, BUFFERS * (size - home))

    def _check_idle(self) -> None:
        try:
            buckets = self._optimizer.ipg_buckets.values()
            is_filled = any(bucket.elements for bucket in buckets)
            is_open = not self._is_stage3 and self._optimizer.ready_for_gradients
        except AttributeError as error:
            raise ActuatorError(f"this DeepSpeed's ZeRO is not understood ({error})") from error
        if is_filled or is_open:
            raise ActuatorError("a bucket of gradients is being filled")


class ZeroPrefetchActuator(_ZeroActuator):
    """The knob "zero_prefetch_bytes": how much ZeRO 3 gathers ahead of the module that runs."""

    knob = "zero_prefetch_bytes"

    def _holder(self) -> tuple[Any, str]:
        return self._optimizer.parameter_offload.get_param_coordinator(), _PREFETCH

    def _fits(self, size: int) -> bool:
        return True  # max_live_parameters bounds what is gathered, whatever is asked for

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        reason = super().refusal()
        if reason is None or self._is_stage3:
            return reason
        if type(self._optimizer).__name__ in _STAGES:
            return "ZeRO 1 and 2 gather no parameters ahead"
        return reason


def _refused_kind(engine: Any) -> str | None:  # noqa: ANN401  DeepSpeed has no types
    """Return which part of DeepSpeed reduces gradients in its own way here, or None."""
    if getattr(engine, "zenflow", False):
        return "ZenFlow reduces gradients in a way of its own"
    if getattr(engine, "has_moe_layers", False):
        return "experts' gradients are reduced in groups of their own"
    for name, what, expected in (
        ("is_deepcompile_active", "DeepCompile plans the reductions when it compiles", False),
        ("managed_gradient_accumulation", "the script manages gradient accumulation itself", True),
    ):
        asked = getattr(engine, name, None)
        if callable(asked) and bool(asked()) is not expected:
            return what
    return None


def _is_beyond_memory(engine: Any, extra_bytes: int) -> bool:  # noqa: ANN401  DeepSpeed has no types
    """Return whether that many more bytes do not fit on this device; False on devices other than CUDA's."""
    parameter = next(engine.module.parameters(), None)
    ratio = peak_ratio(None if parameter is None else parameter.device, extra_bytes)
    return ratio is not None and ratio > MEMORY_RATIO_MAX
