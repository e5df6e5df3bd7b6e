"""A tuner whose policy may be held, in a job with steady steps."""

from __future__ import annotations

from pacecar.config import TuneConfig
from pacecar.controller.guards.tuning_pause import TuningPause
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.records import StepRecord, TunerStatus
from tests.controller.test_tuner import Bench
from tests.kit.records import step_record

__all__ = ["HeldRun"]


class HeldRun(Bench):
    """Our policy under `holds`, with steps of a tenth of a millisecond and a little."""

    def __init__(self, holds: TuningPause) -> None:
        super().__init__(policy=TuningPolicy(TuneConfig()), guards=[holds])
        self.tuner.start()

    def record(self) -> StepRecord:
        return step_record(step=self.step, wall_ns=100_000 + self.step % 7, knobs=self.in_force)

    @property
    def said(self) -> list[TunerStatus]:
        """What it said of itself."""
        return [record for record in self.emitted if isinstance(record, TunerStatus)]
