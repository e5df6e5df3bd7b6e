"""Decides when to ask again for a number that the driver refuses or cannot read.

A refusal may be permanent (this GPU lacks the number) or temporary (the driver initializes, MIG is being set up), and
the driver answers the same in both cases.  So no number is given up: after a few attempts at its usual rate it is asked
for after RETRY_SECONDS_FIRST, then after twice as long each time, up to RETRY_SECONDS_MAX.
"""

from __future__ import annotations

from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND

__all__ = ["FAILURES_MAX", "REFUSALS_MAX", "RETRY_SECONDS_FIRST", "RETRY_SECONDS_MAX", "Attempts", "RefusedNumbers"]

REFUSALS_MAX = 3
"""Refusals in a row before a number that was answered earlier is asked for less often; others are at once."""

FAILURES_MAX = 10
"""Failures before a number that was never answered is asked for less often; otherwise a driver with one broken number
would look broken for ever."""

RETRY_SECONDS_FIRST = 10

RETRY_SECONDS_MAX = 3600
"""A GPU permanently refuses some three hundred numbers, mostly fields of links, 32 in a call: ten calls an hour."""


class RefusedNumbers(NamedTuple):
    """How many numbers are asked for less often, by whether they were answered since the last probe."""

    never_answered: int = 0
    answered_before: int = 0


class Attempts:
    """How one number was answered since the GPU was probed."""

    __slots__ = ("_failures", "_refusals", "is_backed_off", "was_answered")

    def __init__(self) -> None:
        self.was_answered = False
        self.is_backed_off = False
        """Whether it is asked for less often than its table says."""
        self._refusals = self._failures = 0

    def answered(self) -> None:
        """Note an answer."""
        self.was_answered, self.is_backed_off, self._refusals, self._failures = True, False, 0, 0

    def refused(self) -> int:
        """Record a refusal; return for how many ns not to ask again, at least."""
        self._refusals += 1
        return self._wait_ns(self._refusals - REFUSALS_MAX if self.was_answered else self._refusals - 1)

    def failed(self) -> int:
        """Record another failure; return for how many ns not to ask again, at least."""
        self._failures += 1
        return 0 if self.was_answered else self._wait_ns(self._failures - FAILURES_MAX)

    def _wait_ns(self, doublings: int) -> int:
        if doublings < 0:
            return 0
        self.is_backed_off = True
        seconds = min(RETRY_SECONDS_FIRST << min(doublings, 16), RETRY_SECONDS_MAX)  # the shift is bounded, too
        return seconds * NS_PER_SECOND
