"""Decides which steps count as before tuning and which as after, from the decisions found in the first reading.

Comparing the first half of a run with the second would include warm-up, and trials, which spend half their time at the
setting that loses.  So:

    before   after warm-up, up to the first switch
    after    since the last switch, at the kept settings, without the steps in which a switch settles
    run      everything after warm-up, including trials

If the run ended soon after its last switch, `after` adds the steps at the kept settings since the last kept change, and
then all steps at those settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from pacecar.records import KnobValue, StepRecord
from pacecar.run_statistics import SETTLE_STEPS, WARMUP_STEPS

from .run_index import Key, RunIndex

__all__ = ["BeforeAfterPlan", "SettingStretch"]


class SettingStretch(IntEnum):
    """The stretch of a run that a step belongs to; `after` is made of as many of the last three as it needs."""

    WARMUP = 0
    BEFORE = 1
    TRIALS = 2
    SINCE_LAST_SWITCH = 3
    SINCE_LAST_KEPT = 4
    AT_SETTLED = 5


@dataclass(frozen=True, slots=True)
class BeforeAfterPlan:
    """Maps each step to its stretch."""

    first_switch: Key | None
    last_switch: Key | None
    last_kept: Key | None
    settled: dict[str, KnobValue]
    switches: frozenset[Key]

    @classmethod
    def of(cls, index: RunIndex) -> BeforeAfterPlan:
        """Return the plan for the decisions of a run."""
        switches = frozenset(key for key, _ in index.switches)
        return cls(index.first_switch, index.last_switch, index.last_kept, index.settled(), switches)

    def stretch(self, key: Key, first_step: int, record: StepRecord) -> SettingStretch:
        """Return the stretch of the step at `key`; `first_step` is the first step of its life."""
        life, step = key
        if step < first_step + WARMUP_STEPS:
            return SettingStretch.WARMUP
        if self.first_switch is None or key <= self.first_switch:
            return SettingStretch.BEFORE
        settles = any((life, step - offset) in self.switches for offset in range(1, SETTLE_STEPS + 1))
        if settles or record.knobs.values != self.settled:
            return SettingStretch.TRIALS
        if self.last_switch is None or key > self.last_switch:
            return SettingStretch.SINCE_LAST_SWITCH
        if self.last_kept is not None and key > self.last_kept:
            return SettingStretch.SINCE_LAST_KEPT
        return SettingStretch.AT_SETTLED
