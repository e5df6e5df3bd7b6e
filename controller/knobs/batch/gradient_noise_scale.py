"""Computes the gradient noise scale: what a larger batch is worth, to the learning rate and to a policy.

"Twice the samples a second" is not twice the training: beyond some size, more samples only average away noise that was
small already.  McCandlish et al. 2018 ("An Empirical Model of Large-Batch Training", equation 2.8 and appendix A.1):
with the true gradient G and the covariance Sigma of one sample's gradient, a batch of B has E|g_B|^2 = |G|^2 +
tr(Sigma)/B. Two batch sizes give both without bias:

    |G|^2     = (B_big |g_big|^2 - B_small |g_small|^2) / (B_big - B_small)
    tr(Sigma) = (|g_small|^2 - |g_big|^2) / (1/B_small - 1/B_big)           noise scale = tr(Sigma) / |G|^2

DDP has both for free: a rank's own gradient (small) and the mean over the ranks (big).  Both estimates are noisy, and
their ratio is biased although each is not, so both are averaged first and divided then.

What a batch is worth (Pollux, Qiao et al. 2021, equation 7): efficiency(B) = (phi + B0) / (phi + B) of a sample at B0,
so a step of B is worth B/B0 x efficiency(B) steps of B0.  That is AdaScale's gain (Johnson et al. 2020) with its
variances written as phi: one number is the progress here and the factor of the learning rate there.

A larger batch makes every step slower, and may still train faster.  So the policy sees step time over progress, in
steps of the batch that the job began with.  The scale is read again for each step, so a slow drift of it enters the
pace: trials compare neighbouring steps and do not see it; the change detector does, and is right to search again.

Pure.  Ignores momentum and Adam's preconditioning, under which phi is a rough guide (Pollux uses it all the same).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from pacecar.controller.observation import Guard, JobFacts, KnobSpace, Observation

__all__ = ["GradientNoiseScale", "Rule", "StatisticalPace", "learning_rate_factor", "progress"]

Rule = Literal["none", "linear", "sqrt", "adascale"]

DECAY = 0.95
"""Weight of the past in the averages: about the last 20 measurements count."""

MEASUREMENTS_MIN = 10
"""Fewest measurements before a noise scale is returned: a single one is off by its own size."""


class GradientNoiseScale:
    """Averages |G|^2 and tr(Sigma) over measurements."""

    def __init__(self) -> None:
        self._signal = 0.0
        self._noise = 0.0
        self.measurements = 0

    def observe(self, small_squared: float, small: float, big_squared: float, big: float) -> None:
        """Add the squared norms of a gradient over `small` samples and of one over `big`; ignore non-finite ones."""
        if not (0 < small < big and math.isfinite(small_squared) and math.isfinite(big_squared)):
            return
        signal = (big * big_squared - small * small_squared) / (big - small)
        noise = (small_squared - big_squared) / (1 / small - 1 / big)
        self._signal = DECAY * self._signal + (1 - DECAY) * signal
        self._noise = DECAY * self._noise + (1 - DECAY) * noise
        self.measurements += 1

    @property
    def samples(self) -> float | None:
        """The noise scale in samples; None before enough measurements, and if noise hides the gradient altogether.

        The averages began at zero; what they lack cancels in their ratio.
        """
        if self.measurements < MEASUREMENTS_MIN or self._signal <= 0:
            return None
        return max(0.0, self._noise) / self._signal


def progress(noise_scale: float | None, base: float, batch: float) -> float:
    """Return how many steps of `base` samples a step of `batch` is worth; 1 if the noise scale is not known.

    Unknown counts as no noise at all: a larger batch is then worth nothing, and is not tried.
    """
    if noise_scale is None:
        return 1.0
    return batch / base * (noise_scale + base) / (noise_scale + batch)


def learning_rate_factor(rule: Rule, noise_scale: float | None, base: float, batch: float) -> float:
    """Return the learning-rate factor for going from `base` to `batch` samples."""
    if rule == "none":
        return 1.0
    if rule == "adascale":
        return progress(noise_scale, base, batch)
    return batch / base if rule == "linear" else math.sqrt(batch / base)


class StatisticalPace(Guard):
    """Makes the policy judge time over progress; `noise_scale` returns the gradient noise scale, None if unknown.

    Without a noise scale progress is 1, and larger batches look as slow as they are.
    """

    def __init__(self, noise_scale: Callable[[], float | None]) -> None:
        self._noise_scale = noise_scale
        self._base: int | None = None

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        """Measure progress in steps of the batch that the job begins with."""
        self._base = next((space.value for space in spaces if space.knob == "batch_samples"), None)

    def judgeable(self, step: Observation) -> Observation:
        """Return `step` with its pace divided by its progress."""
        batch = step.values.get("batch_samples")
        if batch is None or self._base is None or batch == self._base:
            return step
        return replace(step, pace_ns=round(step.pace_ns / progress(self._noise_scale(), self._base, batch)))
