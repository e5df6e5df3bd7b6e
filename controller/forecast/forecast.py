"""Defines a gain forecast with its uncertainty, and decides whether it is worth a trial (expected improvement).

A tuner that tries the best expected gain tries everything uncertain, forever, even if the default is best.  A trial
costs something, pays only if the candidate wins, and pays for as long as the job then runs:

    E[gain; gain > dead band] * steps to come   >   steps lost to switching + E[loss] * steps under the candidate

with a Gaussian gain about the forecast (expected improvement: Mockus 1975).  The best guess for the steps to come is as
many as the job has run already (Gott 1993).  So what is likely to gain much is tried at once, and what may gain little
once the job has turned out to be long.

A gain must also be provable in that time.  Pairs of noise s prove a gain g when n (g / s)^2 is about 2 log(evidence) +
log(n * prior variance), some 11: at 10 % step noise 2 % take two thousand steps.

Pure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = [
    "HORIZON_STEPS_MIN",
    "Forecast",
    "expected_gain",
    "expected_loss",
    "horizon_steps",
    "proof_pairs",
]

HORIZON_STEPS_MIN = 250
"""Every job is assumed to go on for this many steps: in fewer, a trial of 40 steps could not pay anyway."""

PROOF_EVIDENCE = 11.0
"""2 log(1.3 / 0.05) + log(4 n) at n of 20 to 40 pairs; see `sequential_test`."""

LOSS_RATIO_MAX = 0.2
"""A slower candidate is dropped within two judged steps, so more is not lost for long."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Expected fraction of step time saved, and its uncertainty.  `is_floor`: the gain may be larger.

    A gain and an uncertainty of 0 mean that there is nothing to gain; `basis` says why.
    """

    gain_ratio: float
    spread_ratio: float
    basis: str
    is_floor: bool = False

    @property
    def sure_ratio(self) -> float:
        """The gain less one standard error, which is fair to far-away settings."""
        return self.gain_ratio - self.spread_ratio


def expected_gain(gain: float, spread: float, threshold: float) -> float:
    """Return the mean gain; a gain up to the threshold counts as 0, because it is taken back."""
    if spread <= 0:
        return gain if gain > threshold else 0.0
    z = (gain - threshold) / spread
    return gain * _above(-z) + spread * _density(z)


def expected_loss(gain: float, spread: float) -> float:
    """Return the mean loss of a step under the candidate; a better candidate counts as 0."""
    if spread <= 0:
        return min(LOSS_RATIO_MAX, max(0.0, -gain))
    z = gain / spread
    return min(LOSS_RATIO_MAX, spread * _density(z) - gain * _above(z))


def horizon_steps(steps_so_far: int) -> int:
    """Return how many more steps the job is assumed to run."""
    return max(HORIZON_STEPS_MIN, steps_so_far)


def proof_pairs(gain: float, pair_noise: float) -> float:
    """Return how many pairs prove the gain; infinity without one."""
    return PROOF_EVIDENCE * (pair_noise / gain) ** 2 if gain > 0 else math.inf


def _above(z: float) -> float:
    """Return the probability of a Gaussian above `z`."""
    return 0.5 * math.erfc(z / math.sqrt(2))


def _density(z: float) -> float:
    return math.exp(-z * z / 2) / math.sqrt(2 * math.pi)
