"""Assigns the steps at which each rank may open a window, round robin, so that ranks never profile all at once.

A fixed offset per rank is not enough: windows that the budget delays lose the offset one by one, until those of two
ranks coincide.  A step in which all ranks are profiled costs the job twice: all ranks are slow, and what the ranks see
of each other is the profiler.  So the steps are assigned for the whole run, round after round, and a window that cannot
be afforded in its turn waits for the next.

    step    | 3 4 5 | 6 7 8 | 9 10 11 | 12 13 14 | 15 ...       warm-up 3, three ranks
    rank    |   0   |   1   |    2    |    0     |  1 ...

A turn is as long as a window disturbs its rank, TURN_STEPS.  Beyond TURNS_MAX ranks some share a turn, never all.

A window that was requested on all ranks (`trace_request`) ignores turns.  Pure.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TURNS_MAX", "WindowTurn", "turn_of"]

TURNS_MAX = 8
"""The most turns in a round: a round must end soon, or the last rank has no calibration; a node has eight devices and
shares its processors."""

TURN_STEPS = 3
"""The profiled step and the one in which it is read.  On a device also the step before, in which the device drains; on
gloo also one between them, in which its threads finish what was profiled."""

TRIES = 10
"""A window that could not be afforded is tried again after a tenth of the interval."""


class WindowTurn(NamedTuple):
    """The steps `first`, `first + every`, `first + 2 * every`, and so on."""

    first: int
    every: int

    def is_now(self, step: int) -> bool:
        """Return whether `step` is one of them."""
        return step >= self.first and (step - self.first) % self.every == 0

    def next_from(self, step: int) -> int:
        """Return the first of them from `step` on."""
        return self.first if step <= self.first else step + (self.first - step) % self.every


def turn_of(rank: int, world_size: int, *, warmup_steps: int, interval_steps: int) -> WindowTurn:
    """Return the turn of `rank`; the same arguments but for `rank` must be given on all ranks."""
    turns = min(world_size, TURNS_MAX)
    retry = max(1, interval_steps // TRIES)
    if turns < 2:
        return WindowTurn(warmup_steps, retry)
    round_steps = TURN_STEPS * turns
    return WindowTurn(warmup_steps + TURN_STEPS * (rank % turns), -(-retry // round_steps) * round_steps)
