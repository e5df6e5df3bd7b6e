"""Divides each step's time by the step's progress, so that a policy can compare global batch sizes.

A policy compares step times.  A larger global batch makes every step slower, and may still train faster.  So the policy
sees step time over progress (`gradient_noise_scale`): time for the same progress, in steps of the batch that the job
began with.  If the noise scale is not known, progress is 1 and larger batches look as slow as they are.

The noise scale is read again for each step, so a slow drift of it enters the pace.  Trials compare neighbouring steps
and do not see it.  The change detector does, and is right to search again when batches are worth something else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from pacecar.controller.observation import Guard, JobFacts, KnobSpace, Observation

from .gradient_noise_scale import progress

__all__ = ["StatisticalPace"]

KNOB = "batch_samples"


class StatisticalPace(Guard):
    """Makes the policy judge time over progress; `noise_scale` returns the gradient noise scale, None if unknown."""

    def __init__(self, noise_scale: Callable[[], float | None]) -> None:
        self._noise_scale = noise_scale
        self._base: int | None = None

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Measure progress in steps of the batch that the job begins with."""
        self._base = next((space.value for space in spaces if space.knob == KNOB), None)

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` with its pace divided by its progress."""
        batch = step.values.get(KNOB)
        if batch is None or self._base is None or batch == self._base:
            return step
        return replace(step, pace_ns=round(step.pace_ns / progress(self._noise_scale(), self._base, batch)))
