"""A policy that may be held, fed with steady steps."""

from __future__ import annotations

from pacecar.config import TuneConfig
from pacecar.controller.guards.tuning_pause import PausedPolicy, TuningPause
from pacecar.controller.observation import JobFacts, KnobSpace, Observation
from pacecar.controller.policy.tuning_policy import TuningPolicy
from pacecar.records import TunerStatus

__all__ = ["HeldRun"]


class HeldRun:
    """Our policy under `holds`; `said` is what it said of itself."""

    def __init__(self, holds: TuningPause) -> None:
        self.policy = PausedPolicy(TuningPolicy(TuneConfig()), holds)
        self.policy.begin(JobFacts(job="job", world_size=2), [KnobSpace("bucket_bytes", 2, (1, 2, 4))], mode="exact")
        self.said: list[TunerStatus] = []

    def steps(self, first: int, last: int) -> None:
        """Let it see these steps, each of a tenth of a millisecond and a little."""
        for step in range(first, last):
            _, records = self.policy.advance([Observation(step, step, {"bucket_bytes": 2}, 100_000 + step % 7)])
            self.said.extend(record for record in records if isinstance(record, TunerStatus))
