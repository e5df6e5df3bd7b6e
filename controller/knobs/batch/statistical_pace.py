"""Divides each step's time by how far the step moves the training, so that a policy can compare global batch sizes.

A policy compares step times.  A larger global batch makes every step slower, and may still train faster.  So what the
policy sees is the step time over the step's progress (`gradient_noise_scale`): time for the same progress, in steps of
the batch that the job began with.  Where the noise scale is not known progress is 1, and larger batches look as slow as
they are.

The noise scale is taken anew for each step, which lets a slow drift of it into the pace.  Trials compare neighbours,
so they do not see it.  The change detector does, and is right to search again when batches are worth something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from pacecar.records import Decision, TunerStatus, Verdict

from ...observation import JobFacts, KnobSpace, Observation, Policy, PolicyLayer, TuningTurn
from .gradient_noise_scale import progress

__all__ = ["StatisticalPace"]

KNOB = "batch_samples"


class StatisticalPace(PolicyLayer):
    """A policy around another, which it lets judge by time over progress."""

    def __init__(self, policy: Policy, noise_scale: Callable[[], float | None]) -> None:
        super().__init__(policy)
        self._noise_scale = noise_scale
        self._base: int | None = None

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, mode: Literal["advise", "exact"]) -> None:
        """Pass on; progress is measured in steps of the batch that the job begins with."""
        self._base = next((space.value for space in spaces if space.knob == KNOB), None)
        self._policy.begin(facts, spaces, mode=mode)

    def advance(
        self, observations: Sequence[Observation]
    ) -> tuple[TuningTurn | None, list[Decision | Verdict | TunerStatus]]:
        """Pass on the steps, the pace of each divided by its progress."""
        return self._policy.advance([self._weighed(step) for step in observations])

    def _weighed(self, step: Observation) -> Observation:
        batch = step.values.get(KNOB)
        if batch is None or self._base is None or batch == self._base:
            return step
        return replace(step, pace_ns=round(step.pace_ns / progress(self._noise_scale(), self._base, batch)))
