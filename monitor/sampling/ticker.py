"""Yields the daemon's ticks: deadlines that do not drift, have jitter, and never queue up.

`sleep(period)` drifts by the duration of the work.  An exact grid aliases: a training job is periodic too, so a sampler
would always see the same phase of the step.  So each deadline lies on the grid plus a random part of `jitter_ratio` of
the period.  Ticks missed because the work took longer are skipped and counted, never made up for in a burst.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock

__all__ = ["SamplingTick", "sampling_ticks"]


class SamplingTick(NamedTuple):
    """One tick: its number, when it began, how late that was, and how many ticks were missed since the start."""

    number: int
    started_ns: int
    lateness_ns: int
    missed: int


def sampling_ticks(
    clock: Clock,
    wait: Callable[[float], bool],
    *,
    period_ns: int,
    jitter_ratio: float,
    chance: random.Random,
) -> Iterator[SamplingTick]:
    """Yield a tick at each deadline, the first at once, until `wait` ends the loop.

    `wait(seconds)` sleeps and returns True to stop, as threading.Event.wait does.
    """
    assert period_ns > 0, "a tick needs a period"
    assert 0 <= jitter_ratio <= 0.5, "more jitter than half a period would let deadlines overtake each other"
    origin = clock.monotonic_ns()
    slot = number = missed = 0
    while True:
        jitter = int(chance.random() * jitter_ratio * period_ns) if slot else 0
        deadline = origin + slot * period_ns + jitter
        while (remaining := deadline - clock.monotonic_ns()) > 0:
            if wait(remaining / NS_PER_SECOND):
                return
        if wait(0):
            return
        now = clock.monotonic_ns()
        yield SamplingTick(number, now, now - deadline, missed)
        number += 1
        following = max(slot + 1, (clock.monotonic_ns() - origin) // period_ns)
        missed += following - slot - 1
        slot = following
