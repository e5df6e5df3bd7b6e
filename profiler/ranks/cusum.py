"""Decides with a CUSUM test whether a rank is late or was late by chance: evidence is added up range by range.

One late range says nothing: garbage collections and other programs on the machine make any rank late now and then.
This is Page's cumulative sum of log likelihood ratios (Biometrika 41, 1954).  A range in which the rank was late adds
log(EXCEEDS_LATE / EXCEEDS_QUIET); a range in which it was not subtracts log((1 - EXCEEDS_QUIET) / (1 - EXCEEDS_LATE)).
The sum does not fall below zero, so that a long quiet time cannot hide a change.

False alarms are bounded by Lorden (Ann. Math. Stat. 42, 1971): as long as quiet ranges exceed the bound independently
at a rate of at most EXCEEDS_QUIET, the mean number of ranges until a false alarm is at least exp(THRESHOLD), here
700000 ranges for each rank and cause.  So among four ranks with five causes in 2000 steps (500 ranges), some rank is
named wrongly in at most 1.4 of 100 runs.  Ranges that depend on each other are not independent evidence: another
program that takes a rank's processor, and a link that is slow for a moment, count for less (`weight`), so that they
must last for seconds.  Simulated with heavy tails, bursts and pauses, 0 of 300 runs of 500 steps named any rank
(tests/profiler/ranks/simulation.py), which bounds the rate at 1 of 100 with 95 % confidence.

Three late ranges in a row suffice to name a rank, and three quiet ones to clear it.
"""

from __future__ import annotations

from math import log
from typing import Literal

__all__ = ["THRESHOLD", "Cusum"]

EXCEEDS_QUIET = 0.01
"""Rate at which a rank that is not late exceeds its bound; the bound is designed for it, and tests measure it."""

EXCEEDS_LATE = 0.9
"""Rate at which a late rank exceeds its bound."""

_FOR = log(EXCEEDS_LATE / EXCEEDS_QUIET)
_AGAINST = log((1 - EXCEEDS_QUIET) / (1 - EXCEEDS_LATE))

THRESHOLD = 3 * _FOR - 1e-9
"""13.5: what three late ranges in a row add up to."""

_AGAINST_NAMED = THRESHOLD / 3
"""What a quiet range subtracts once the rank is named: three in a row clear it.  A late one between undoes one."""


class Cusum:
    """The cumulative sum for one rank and one cause."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._is_raised = False

    @property
    def is_clear(self) -> bool:
        """Whether there is no evidence against the rank."""
        return self._sum <= 0.0 and not self._is_raised

    def add(self, is_late: bool, *, weight: float = 1.0) -> Literal["raised", "lowered"] | None:
        """Add one range; return whether it raised or lowered the alarm.  `weight` (0..1) is that of a late range."""
        against = _AGAINST_NAMED if self._is_raised else _AGAINST
        self._sum = min(THRESHOLD, max(0.0, self._sum + (_FOR * weight if is_late else -against)))
        if not self._is_raised and self._sum >= THRESHOLD:
            self._is_raised = True
            return "raised"
        if self._is_raised and self._sum <= 1e-6:
            self._is_raised, self._sum = False, 0.0
            return "lowered"
        return None
