"""What may be claimed?  Of a difference between stretches, and of what the kept changes save together.

A difference is claimed when its interval leaves zero out and it is larger than what either stretch differs from itself
between its halves: an interval sees the noise inside a stretch, and a machine that wandered by 40 % proves no 18 %.

What trials proved is told by its lower bound.  The kept changes were picked because they measured well, so the product
of what they measured flatters; the product of their lower bounds does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from pacecar.report.document import Change
from pacecar.report.figures import Interval, drift_ratio
from pacecar.wording import percent

__all__ = ["Proven", "judge", "noise_of", "proven"]


class Proven(NamedTuple):
    """Share of step time that the changes in force save together; None where no trial measured it."""

    ratio: float | None
    low: float | None
    high: float | None


def proven(changes: Sequence[Change]) -> Proven:
    """Return what the changes in force save together, each as its own interleaved trial measured it.

    Each bound is wrong at most at the tuner's rate of false accepts, so those of k changes together at k times that.
    """
    kept = [change for change in changes if change.is_in_force]
    gains = ([one.measured_gain_ratio for one in kept], [one.gain_low for one in kept], [one.gain_high for one in kept])
    return Proven(*map(_together, gains))


def _together(gains: Sequence[float | None]) -> float | None:
    known = [gain for gain in gains if gain is not None]
    return 1 - math.prod(1 - gain for gain in known) if known and len(known) == len(gains) else None


def noise_of(*stretches: Sequence[float]) -> float | None:
    """Return the largest drift inside any of the stretches; None where none is long enough."""
    return max((abs(drift) for rates in stretches if (drift := drift_ratio(rates)) is not None), default=None)


def judge(change: Interval | None, noise: float | None, what: str = "run") -> tuple[str, str]:
    """Return what may be said, and why no more; `what` is compared with another of its kind."""
    if change is None:
        return "not comparable", "one of them has no steps to compare"
    if change.low is None or change.high is None or noise is None:
        return "not decided", "too few windows to know the noise"
    if change.low <= 0 <= change.high:
        return "no difference shown", "the interval holds zero"
    if abs(change.change_ratio) <= noise:
        return "no difference shown", f"a {what} differs from itself by {percent(noise)} between its halves"
    word = "faster" if change.change_ratio > 0 else "slower"
    return word, f"the interval leaves zero out, and no {what} differs from itself by more than {percent(noise)}"
