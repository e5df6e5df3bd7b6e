"""Is it luck?  Evidence for and against "this rank is late", added up range by range.

One late range says nothing: collections of garbage and neighbours on the machine make any rank late now and then.  This
is Page's cumulative sum of log likelihood ratios (Biometrika 41, 1954): a range in which the rank was late speaks for
lateness by log(EXCEEDS_LATE / EXCEEDS_QUIET), one in which it was not against it by the log of the complements, and the
sum does not fall under zero, so that a long quiet time cannot hide a change.  Lorden (Ann. Math. Stat. 42, 1971): as
long as quiet ranges exceed the bound independently at a rate of at most EXCEEDS_QUIET, the mean number of ranges until
a false alarm is at least exp(THRESHOLD), here 700 000 ranges for each rank and cause.  So among four ranks with five
causes in 2000 steps (500 ranges) somebody is named wrongly in at most 1.4 of 100 runs.  Ranges that depend on each
other are not luck: that another program takes a rank's processor, and a link that is slow for a moment, count for less
(`weight`) so that they must last for seconds.  Simulated with heavy tails, bursts and pauses, 0 of 300 runs of 500
steps named anybody (tests/profiler/ranks/simulation.py), which bounds the rate at 1 of 100 with 95 % confidence.

Three late ranges in a row suffice, and three quiet ones end it.
"""

from __future__ import annotations

from math import log
from typing import Literal

__all__ = ["THRESHOLD", "Cusum"]

EXCEEDS_QUIET = 0.01
"""Rate at which a rank that is not late exceeds its bound; the bound is made for it, tests measure it."""

EXCEEDS_LATE = 0.9
"""Rate at which a late rank does."""

_FOR = log(EXCEEDS_LATE / EXCEEDS_QUIET)
_AGAINST = log((1 - EXCEEDS_QUIET) / (1 - EXCEEDS_LATE))

THRESHOLD = 3 * _FOR - 1e-9
"""13.5: what three late ranges in a row add up to."""

_AGAINST_NAMED = THRESHOLD / 3
"""Once named, three quiet ranges in a row take it back, and a late one between them counts as much."""


class Cusum:
    """The cumulative sum for one rank and one cause."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._is_raised = False

    @property
    def is_clear(self) -> bool:
        """Nothing is held against it."""
        return self._sum <= 0.0 and not self._is_raised

    def add(self, is_late: bool, *, weight: float = 1.0) -> Literal["raised", "lowered"] | None:
        """Take one range; return whether it was named, or cleared, just now.  `weight` (0..1) of a late one."""
        against = _AGAINST_NAMED if self._is_raised else _AGAINST
        self._sum = min(THRESHOLD, max(0.0, self._sum + (_FOR * weight if is_late else -against)))
        if not self._is_raised and self._sum >= THRESHOLD:
            self._is_raised = True
            return "raised"
        if self._is_raised and self._sum <= 1e-6:
            self._is_raised, self._sum = False, 0.0
            return "lowered"
        return None
