"""Implements the knob "compression" (lossy): DDP sends gradients as they are, rounded, or reduced to fewer values.

Fewer bytes are not always less time: on a fast link rounding costs more than it saves (bf16 is 2 % slower at 7-10
Gbit/s).  So a choice is offered only if it sends fewer bytes than plain DDP at this world size, and then has to prove
itself in a trial like any other knob.  Its gain must not cost accuracy: `divergence_detector` watches loss and gradient
norm, and `compression_rollback` takes compression back when one leaves its band.

With "none" the Reducer has no hook of ours at all, so that job is plain DDP to the last bit, and the residuals are
dropped.  Every change builds a new Reducer, even from one choice to another, so that ranks do the same whatever each of
them had in force before a failed switch.  The arithmetic is in `comm_hook`.
"""

from __future__ import annotations

import importlib.util
from typing import Any, cast

import torch
import torch.distributed as dist

from pacecar.config import TuneConfig
from pacecar.knobs import by_name
from pacecar.torch_internals import lacking

from ..actuator import ActuatorError
from ..memory_limit import MEMORY_RATIO_MAX, peak_ratio
from .comm_hook import Choice, Compressor, sent_by_gather, sent_by_reduce, topk_count
from .reducer import DdpReducer, ReducerActuator

__all__ = ["CHOICES", "CompressionActuator", "choice_of", "sent_ratio"]

CHOICES = by_name["compression"].choices
"""Value i of the knob is CHOICES[i]; 0 is none."""

NONE = 0

SENT_RATIO_MAX = 0.75
"""A choice that sends more than this share of plain DDP's bytes cannot win back what it computes."""


def choice_of(value: int) -> str:
    """Return the choice's name."""
    return CHOICES[value]


def sent_ratio(choice: str, *, element_size: int, ranks: int, topk_ratio: float) -> float | None:
    """Return what a rank sends, as a share of plain DDP's ring all-reduce; None if it depends on shapes.

    top-k: each value is sent as 8 bytes (value and place) to every other rank, so its share grows with the ranks.
    """
    if choice == "none":
        return 1.0
    if choice in ("bf16", "fp16"):
        return 2 / element_size
    if choice == "topk":
        numel = 1_000_000
        sent = sent_by_gather(8 * topk_count(numel, topk_ratio), ranks)
        return sent / sent_by_reduce(numel * element_size, ranks)
    return None


class CompressionActuator(ReducerActuator):
    """The knob "compression".  `has_scaler`: losses are scaled by a factor that changes (torch.amp.GradScaler)."""

    knob = "compression"

    def __init__(self, config: TuneConfig, reducer: DdpReducer, *, has_scaler: bool = False) -> None:
        super().__init__(config, reducer)
        self._has_scaler = has_scaler

    @property
    def compressor(self) -> Compressor | None:
        """The hook's state, with its counters; None without compression."""
        return self._reducer.plan.hook

    def value(self) -> int:
        """Return the choice in force.

        Raises:
            ActuatorError: the model is not under DistributedDataParallel.
        """
        hook = self._reducer.plan.hook
        return NONE if hook is None else CHOICES.index(hook.choice)

    def domain(self) -> tuple[int, ...]:
        """Return the values of "none", of the choices that the user allows and this job can use, and the present."""
        usable = (v for v, choice in enumerate(CHOICES) if v == NONE or self.unusable(choice) is None)
        return tuple(sorted({*usable, self.value()}))

    def refusal(self) -> str | None:
        """Return why nothing can be compressed here, or None."""
        reason = self._reducer.refusal() or lacking("compression")
        if reason is not None:
            return reason
        ddp = self._reducer.ddp
        assert ddp is not None, "the Reducer's refusal names a model that is not DDP"
        if ddp._comm_hooks:
            name = getattr(ddp._comm_hooks[0][0], "__qualname__", "a communication hook")
            return f"DDP has a communication hook of the script's own ({name}), and a Reducer takes one"
        parameters, sparse = ddp._build_params_for_reducer()
        if any(sparse):
            return "the model has sparse gradients, which have a bucket each and no values to round"
        if any(not p.is_floating_point() for p in parameters):
            return "the model has gradients that are not floating point"
        if len(self.domain()) == 1:
            reasons = [f"{c}: {self.unusable(c)}" for c in self._config.compression]
            return "; ".join(reasons) or "[tune] compression names no choice"
        return self._reducer.prepare()

    def unusable(self, choice: str) -> str | None:
        """Return why `choice` is not offered in this job, or None."""
        ddp = self._reducer.ddp
        if choice not in self._config.compression:
            return "[tune] compression does not name it"
        if ddp is None:
            return self._reducer.not_ddp
        size = min((p.element_size() for p in ddp._build_params_for_reducer()[0]), default=4)
        ranks = dist.get_world_size(ddp.process_group)
        share = sent_ratio(choice, element_size=size, ranks=ranks, topk_ratio=self._config.topk_ratio)
        if share is not None and share > SENT_RATIO_MAX:
            return f"it would send {share:.2f} times the bytes of plain DDP on {ranks} ranks"
        if choice == "powersgd" and _backend(ddp.process_group, ddp.device) != "nccl":
            return "PowerSGD needs NCCL: on gloo it deadlocks with more than one bucket"
        if choice == "powersgd" and importlib.util.find_spec("numpy") is None:
            return "torch's PowerSGD needs numpy"
        if choice in ("powersgd", "topk"):
            return self._no_residuals()
        return None

    def _no_residuals(self) -> str | None:
        """Return why a copy of what was not sent cannot be kept, or None."""
        if self._has_scaler:
            return "a GradScaler changes the scale of the gradients that error feedback keeps"
        device = self._reducer.ddp.device if self._reducer.ddp is not None else None
        ratio = peak_ratio(device, sum(self._reducer.gradient_bytes()))
        if ratio is not None and ratio > MEMORY_RATIO_MAX:
            return f"a copy of all gradients would bring the device's memory to {ratio:.0%}"
        return None

    def layout(self) -> str:
        """Return a hash of recipe, parameters and gradient-ready order, and the numbers that the hook uses."""
        return f"{super().layout()} {self._config.topk_ratio} {self._config.powersgd_rank}"

    def apply(self, value: int) -> None:
        """Give DDP a Reducer that compresses by choice `value`, or one without a hook; residuals start again.

        The present choice keeps its residuals when it is applied again.

        Raises:
            ActuatorError: there is no such choice; or see `DdpReducer.request`.
        """
        if not 0 <= value < len(CHOICES):
            raise ActuatorError(f"compression {value}: choices are 0 to {len(CHOICES) - 1}")
        present = self.compressor
        if value == NONE:
            hook: Compressor | None = None
        elif present is not None and value == self.value():
            hook = present
        else:
            ddp = self._reducer.ddp
            assert ddp is not None, "value() raises without DDP"
            hook = Compressor(
                cast(Choice, CHOICES[value]),
                ddp.process_group,
                topk_ratio=self._config.topk_ratio,
                powersgd_rank=self._config.powersgd_rank,
            )
        self._reducer.request(hook=hook)


def _backend(group: Any, device: torch.device) -> str:  # noqa: ANN401  dist.ProcessGroup
    """Return the backend that reduces a gradient on `device`; a group may have one for each kind of device."""
    try:
        return str(group._get_backend(device).name()).lower()
    except Exception:  # noqa: BLE001  private API, and groups of other makes
        return str(dist.get_backend(group)).lower()
