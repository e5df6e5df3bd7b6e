"""Measures how well this rank uses its device: model FLOPs, MFU, memory and checkpoints, in one record every few steps.

A GPU that shows 98 % utilization may do a tenth of what it could: utilization says only that a kernel ran.  MFU says
how much of the arithmetic that the device could have done was spent on the model (PaLM, Chowdhery et al. 2022, appendix
B):

    MFU = model FLOPs of the steps / (their wall time * peak FLOP/s)

Every step's wall time counts, with its waits, its profiled windows and its checkpoints.  A step whose FLOPs are not
known is left out of numerator and denominator.  FLOPs per sample or token, if the user gives them, take precedence over
counting.  The peak is that of the arithmetic in which most of the FLOPs are done.  Where FLOPs are counted, the counter
sees that arithmetic; where they are given, it is the autocast dtype in the forward, else the dtype of the parameters.
Without a peak (a CPU, an unknown board, parameters on several devices) there is no MFU.

A checkpoint is what runs inside `pacer.checkpoint()`.  Checkpoints are not detected: torch.save and
torch.distributed.checkpoint.save have no hooks; replacing them would miss a script that has imported the functions by
name; and the hooks of `state_dict()` say when a checkpoint begins but never when it ends.

Left out: rates of samples and tokens, which are quotients of what the record holds; what the driver says of the device
(the daemon).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from pacecar.config import HookConfig
from pacecar.device_peaks import TF32, has_tf32, peak_flops_per_second
from pacecar.records import DeviceMemory, StepRecord, Vitals
from pacecar.records.measurements.device_utilization import ARITHMETICS
from pacecar.records.ranges import INT64_MAX

from ..timing.sample_counts import plus
from .allocator_memory import MemoryMeter, Stats
from .flop_counter import Arithmetic, runs_in_tf32
from .step_flops import StepFlops

__all__ = ["UtilizationMeter"]

INTERVAL_NS_MIN = 1_000_000_000
"""A record costs about 20 us, on a GPU with the allocator's figures about 100 us: negligible once a second."""

FLOPS_SUM_MAX = INT64_MAX // 2
"""A record is due before its FLOPs overflow 64 bits, as twenty steps of a quarter of an hour at 4e14 a second would."""

FIRST_ASK_STEPS = 3
"""The overhead budget has too few measurements before this step for a refusal to count."""

_log = logging.getLogger(__name__)


class UtilizationMeter:
    """Accumulates steps into records.

    All calls come from the training thread, except `add`, which never runs concurrently with `report`.

    `stats` reads the device's allocator, `device_name` is torch's name of the device; None where there is none.
    """

    def __init__(
        self,
        model: nn.Module,
        config: HookConfig,
        *,
        device: torch.device,
        stats: Stats | None = None,
        device_name: str | None = None,
    ) -> None:
        self._model = model
        self._config = config
        self._device = device
        self._device_name = device_name
        self._memory = MemoryMeter(stats) if stats is not None else None
        self._is_given = config.flops_per_sample is not None or config.flops_per_token is not None
        self._counter = StepFlops(model) if config.count_flops and not self._is_given else None
        self._autocast_dtype: torch.dtype | None = None
        self._count_prices_ns: list[int] = []
        self._total_checkpoints = 0
        self._total_checkpoint_ns = 0
        self._is_on_one_device: bool | None = None
        self._last: StepRecord | None = None
        self._step_flops: int | None = None
        self._reported_checkpoints = 0
        self._steps = self._wall_ns = self._flops_steps = self._flops_wall_ns = 0
        self._samples: int | None = None
        self._tokens: int | None = None
        self._flops: int | None = None
        self.is_due = False
        """A record is to be made."""
        self.wants_count = False
        """The last step had a forward of unknown FLOPs, and counting was not refused since the last record."""
        self._is_refused = False

    @property
    def on_device(self) -> bool:
        """Whether the model is on a GPU."""
        return self._device.type == "cuda"

    @property
    def tells_inputs(self) -> bool:
        """Whether `forward_begins` must be called before each forward of the step that begins."""
        if self._counter is None:
            return self._is_given and self._device_name is not None
        return self._counter.is_armed

    def take_flops(self, inputs: Sequence[tuple[torch.Size, bool]]) -> int | None:
        """Return the FLOPs counted of the step that ends, whose forwards took `inputs`; None when unknown."""
        counter = self._counter
        if counter is None:
            return None
        flops = counter.take_noted(inputs)
        self.wants_count = counter.wants_count and not self._is_refused
        return flops

    @property
    def is_counted(self) -> bool:
        """Whether a forward of the step under way was counted, and so slowed."""
        return self._counter is not None and self._counter.counted > 0

    def forward_begins(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note a forward of the model in training."""
        if self._counter is not None:
            self._counter.forward_begins(args, kwargs)
        elif self._is_given and self._device_name is not None:
            kind = self._device.type
            self._autocast_dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None

    def prepare(self, step: int, may_pay: Callable[[int, int | None], bool]) -> None:
        """Have the forwards of `step`, which begins, counted if any is unknown and `may_pay(step, price_ns)` allows it.

        The price is that of the last counts, None before the first.  After a refusal the next request comes after the
        next record, because a request takes longer than most step boundaries.
        """
        counter = self._counter
        if counter is None or not counter.wants_count:
            return
        if may_pay(step, max(self._count_prices_ns, default=None)):
            counter.arm(step)
        elif step > FIRST_ASK_STEPS:
            self._is_refused, self.wants_count = True, False

    def count_cost(self, price_ns: int) -> None:
        """Note what counting cost in the step that ends."""
        self._count_prices_ns = [*self._count_prices_ns[-1:], price_ns]

    def checkpointed(self, duration_ns: int) -> None:
        """Add a checkpoint, inside a step or not."""
        self._total_checkpoints += 1
        self._total_checkpoint_ns += duration_ns

    def add(self, step: StepRecord, flops: int | None) -> None:
        """Add a finished step and the FLOPs that were counted in it; sets `is_due`."""
        self._last = step
        self._steps += 1
        self._wall_ns += step.wall_ns
        self._samples = plus(self._samples, step.samples)
        self._tokens = plus(self._tokens, step.tokens)
        self._step_flops = flops if self._counter is not None else self._given_flops(step)
        if self._step_flops is not None:
            self._flops = (self._flops or 0) + self._step_flops
            self._flops_steps += 1
            self._flops_wall_ns += step.wall_ns
        is_long = self._steps >= self._config.vitals_interval_steps or (self._flops or 0) > FLOPS_SUM_MAX
        self.is_due = is_long and self._wall_ns >= INTERVAL_NS_MIN

    def report(self) -> Vitals:
        """Return the record of the steps since the last one; on the training thread, and when `is_due`."""
        assert self._last is not None, "due only after a step"
        return self._record(self._last)

    def finish(self) -> Vitals | None:
        """Return the record of what was not reported yet, if there is any, and stop observing the model."""
        self.retire()
        is_news = self._steps or self._total_checkpoints > self._reported_checkpoints
        return self._record(self._last) if self._last is not None and is_news else None

    def retire(self) -> None:
        """Stop observing the model."""
        if self._counter is not None:
            self._counter.disarm()

    def _clear(self) -> None:
        self._steps = self._wall_ns = self._flops_steps = self._flops_wall_ns = 0
        self._samples = self._tokens = self._flops = None
        self.is_due = self._is_refused = False

    def _given_flops(self, step: StepRecord) -> int | None:
        per_sample, per_token = self._config.flops_per_sample, self._config.flops_per_token
        if per_token is not None and step.tokens is not None:
            return round(per_token * step.tokens)
        if per_sample is not None and step.samples is not None:
            return round(per_sample * step.samples)
        return None

    def _record(self, last: StepRecord) -> Vitals:
        counter = self._counter
        if counter is not None:
            counter.check_parameters()
        arithmetic = self._arithmetic()
        record = Vitals(
            job=last.job,
            rank=last.rank,
            step=last.step,
            ended_wall_ns=last.ended_wall_ns,
            steps=self._steps,
            wall_ns=self._wall_ns,
            samples=self._samples,
            tokens=self._tokens,
            flops_source=None if self._flops is None else "counted" if counter is not None else "given",
            flops_reason=None if counter is None else counter.reason,
            step_flops=self._step_flops,
            flops=self._flops,
            flops_steps=self._flops_steps,
            flops_wall_ns=self._flops_wall_ns,
            arithmetic=arithmetic,
            peak_flops_per_second=self._peak(arithmetic),
            memory=self._read_memory(),
            total_checkpoints=self._total_checkpoints,
            total_checkpoint_ns=self._total_checkpoint_ns,
        )
        self._reported_checkpoints = self._total_checkpoints
        self._clear()
        return record

    def _arithmetic(self) -> str | None:
        """Return the arithmetic that most of the FLOPs are done in: a dtype's name or TF32."""
        if self._counter is not None:
            found = self._counter.arithmetic
        else:
            parameter = next(self._model.parameters(), None)
            dtype = self._autocast_dtype or (parameter.dtype if parameter is not None else None)
            found = None if dtype is None or not self._is_given else Arithmetic(dtype)
        if found is None:
            return None
        may_be_tf32 = self._device.type == "cuda" and has_tf32(self._device_name or "")
        name = TF32 if may_be_tf32 and runs_in_tf32(found) else str(found.dtype).removeprefix("torch.")
        return name if name in ARITHMETICS else "other"

    def _peak(self, arithmetic: str | None) -> int | None:
        if self._config.peak_flops_per_second is not None:
            return round(self._config.peak_flops_per_second)
        if self._device_name is None or arithmetic is None or self._flops is None:
            return None
        if self._is_on_one_device is None:  # checked once: walking the module tree is slow, and models seldom move
            self._is_on_one_device = all(parameter.device == self._device for parameter in self._model.parameters())
        if not self._is_on_one_device:
            return None
        return peak_flops_per_second(self._device_name, arithmetic)

    def _read_memory(self) -> DeviceMemory | None:
        try:
            return self._memory.read() if self._memory is not None else None
        except Exception:  # noqa: BLE001  a broken device context: everything else of the record is sound
            _log.warning("pacecar stops reading the device's allocator", exc_info=True)
            self._memory = None
            return None
