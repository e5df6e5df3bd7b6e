"""A policy that may be held, fed with steady steps."""

from __future__ import annotations

from pacecar.config import TuneConfig
from pacecar.controller.guards.tuning_pause import HeldPolicy, Holds
from pacecar.controller.observation import Facts, KnobSpace, Observation
from pacecar.controller.policy.tuning_policy import PacecarPolicy
from pacecar.records import TunerStatus

__all__ = ["HeldRun"]


class HeldRun:
    """Our policy under `holds`; `said` is what it said of itself."""

    def __init__(self, holds: Holds) -> None:
        self.policy = HeldPolicy(PacecarPolicy(TuneConfig()), holds)
        self.policy.begin(Facts(job="job", world_size=2), [KnobSpace("bucket_bytes", 2, (1, 2, 4))], mode="exact")
        self.said: list[TunerStatus] = []

    def steps(self, first: int, last: int) -> None:
        """Let it see these steps, each of a tenth of a millisecond and a little."""
        for step in range(first, last):
            _, records = self.policy.advance([Observation(step, step, {"bucket_bytes": 2}, 100_000 + step % 7)])
            self.said.extend(record for record in records if isinstance(record, TunerStatus))
