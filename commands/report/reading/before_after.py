"""Decides which steps count as before tuning and which as after, from what the first reading of the records found.

To compare the first half with the second would be wrong three times: it counts warm-up, it counts trials (which are
half spent in the setting that lost), and it counts steps that a profiled window slowed down.  So

    before   after warm-up, up to the first switch
    after    since the last switch at the settings that were kept, without steps in which a switch still settles
    run      all of them after warm-up, trials with them

Where the run ended soon after its last switch, `after` takes the steps at the kept settings since the last change that
was kept, then all at those settings.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from pacecar.records import KnobValue, StepRecord
from pacecar.run_statistics import SETTLE_STEPS, WARMUP_STEPS

from .run_index import Key, RunIndex

__all__ = ["BeforeAfterPlan", "SettingStretch"]


class SettingStretch(IntEnum):
    """The stretch of a run that a step is in.  Of the last three, `after` is the first, or as many as it takes."""

    WARMUP = 0
    BEFORE = 1
    TRIALS = 2
    SINCE_LAST_SWITCH = 3
    SINCE_LAST_KEPT = 4
    AT_SETTLED = 5


@dataclass(frozen=True, slots=True)
class BeforeAfterPlan:
    """Says of each step in which stretch it is."""

    first_switch: Key | None
    last_switch: Key | None
    last_kept: Key | None
    settled: dict[str, KnobValue]
    switches: frozenset[Key]

    @classmethod
    def of(cls, story: RunIndex) -> BeforeAfterPlan:
        """Return the plan that follows from what was decided."""
        switches = frozenset(key for key, _ in story.switches)
        return cls(story.first_switch, story.last_switch, story.last_kept, story.settled(), switches)

    def stretch(self, key: Key, first_step: int, record: StepRecord) -> SettingStretch:
        """Return where the step at `key` belongs; `first_step` is the first one of its life."""
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
