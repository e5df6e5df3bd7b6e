"""Sums a stretch of steps in windows of a few steps each, and computes their rates.

There are at most WINDOWS_MAX windows: beyond that, neighbours are merged and all become twice as long.  A window takes
as long as its slowest rank.  Summing the slowest rank of each step would overcount: ranks take turns being last, and a
rank that begins a step late also finished the previous one late.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from itertools import zip_longest

from pacecar.run_statistics import WINDOW_STEPS

__all__ = ["WindowSums", "added"]

WINDOWS_MAX = 4096


class WindowSums:
    """Wall time, samples and tokens of consecutive windows; the counts are None if any step lacks them."""

    def __init__(self) -> None:
        self.steps_each = WINDOW_STEPS
        self.steps = 0
        self.rank_walls: list[int] = []
        self.samples: int | None = 0
        self.tokens: int | None = 0
        self._walls: list[int] = []
        self._samples: list[int] = []
        self._tokens: list[int] = []
        self._open, self._open_walls = [0, 0, 0], [0]

    @property
    def wall_ns(self) -> int:
        """Wall time of all steps on the slowest rank."""
        return max(self.rank_walls, default=0)

    def add(self, walls: Sequence[int], samples: int | None, tokens: int | None) -> None:
        """Add one step of the job: its wall time on each rank, in order, and its samples and tokens."""
        self.steps += 1
        self.rank_walls = added(self.rank_walls, walls)
        self.samples = None if self.samples is None or samples is None else self.samples + samples
        self.tokens = None if self.tokens is None or tokens is None else self.tokens + tokens
        current = self._open
        current[0] += 1
        current[1] += samples or 0
        current[2] += tokens or 0
        self._open_walls = added(self._open_walls, walls)
        if current[0] == self.steps_each:
            self._close()

    def _close(self) -> None:
        self._walls.append(max(self._open_walls))
        self._samples.append(self._open[1])
        self._tokens.append(self._open[2])
        self._open, self._open_walls = [0, 0, 0], [0]
        if len(self._walls) == WINDOWS_MAX:
            self.steps_each *= 2
            self._walls, self._samples, self._tokens = (
                [column[i] + column[i + 1] for i in range(0, WINDOWS_MAX, 2)]
                for column in (self._walls, self._samples, self._tokens)
            )

    def rates(self, unit: str) -> list[float]:
        """Return samples, tokens or steps per second for each window; empty if the unit was not counted.

        An incomplete window counts only if there is no complete one.
        """
        walls: Sequence[int] = self._walls
        counts: Sequence[int] = {"samples": self._samples, "tokens": self._tokens}.get(unit, self._walls)
        if (unit == "samples" and self.samples is None) or (unit == "tokens" and self.tokens is None):
            return []
        if not walls and self._open[0]:
            walls, counts = [max(self._open_walls)], [self._open[{"samples": 1, "tokens": 2}.get(unit, 0)]]
            each = self._open[0]
        else:
            each = self.steps_each
        if unit == "steps":
            return [each * 1e9 / wall for wall in walls if wall > 0]
        return [count * 1e9 / wall for count, wall in zip(counts, walls, strict=True) if wall > 0]


def added(sums: Sequence[int], values: Sequence[int]) -> list[int]:
    """Add `values` to `sums` element by element; the shorter list is padded with zeros."""
    if len(sums) == len(values):
        return list(map(operator.add, sums, values))
    return [a + b for a, b in zip_longest(sums, values, fillvalue=0)]
