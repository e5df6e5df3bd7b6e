"""How many steps can the hook afford to measure?  All of them, every k-th, or none.

Measuring a step costs the same whether it takes 100 ms or 1: of the latter it is more than the user allowed.  So once
the always-on part alone would take more than SHARE of the budget (the rest is for windows), only every k-th step is
measured and the others are counted: they end, their wall time is added, and their ledger is that of the next measured
one, stretched.  k is a power of two, so that ranks that chose differently still have steps in common.  Where even
counting is too much the hook turns itself off.

k grows at once and shrinks with a margin, or it would swing.  A ratio of 0 means no windows and of 1 no limit; then
every step is measured.

Pure: numbers in, k out.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["EVERY_MAX", "REVIEW_STEPS", "Cadence"]

REVIEW_STEPS = 32
"""Measured steps between two looks at k: their median is steady."""

EVERY_MAX = 64
"""With fewer measured steps than that a person would not see a change in time."""

SHARE = 0.5
"""Of the budget that the always-on part may take."""

SHRINK = 0.7
"""k is halved only when that would cost less than this part of its share."""

OUTLIERS = 3
"""Costs of REVIEW_STEPS that are left out."""

PASS_NS = 2_000
"""What a counted step costs before one was seen."""


class Cadence:
    """Takes what measured steps cost; `every` says which steps to measure: those that it divides, none when None."""

    def __init__(self, ratio: float) -> None:
        self._is_limited = 0.0 < ratio < 1.0
        self._share = SHARE * ratio
        self._ratio = ratio
        self._walls: deque[int] = deque(maxlen=REVIEW_STEPS)
        self._costs: deque[int] = deque(maxlen=REVIEW_STEPS)
        self._passes: deque[float] = deque(maxlen=REVIEW_STEPS)
        self._since = 0
        self.every: int | None = 1

    def measured(self, wall_ns: int, cost_ns: int, *, passed: int = 0, passed_cost_ns: int = 0) -> None:
        """Take a measured step, its cost, and the steps that were only counted before it."""
        if not self._is_limited:
            return
        self._walls.append(wall_ns)
        self._costs.append(cost_ns)
        if passed:
            self._passes.append(passed_cost_ns / passed)
        self._since += 1
        if self._since >= REVIEW_STEPS and self.every is not None:
            self._since = 0
            self.every = self._review(self.every)

    def _review(self, every: int) -> int | None:
        # What was paid, but for the few highest: another program had the processor then.  Of walls the median: one
        # long wait is no slower job.
        costs = sorted(self._costs)[:-OUTLIERS]
        wall, cost = median(self._walls), sum(costs) / len(costs)
        passing = median(self._passes) if self._passes else PASS_NS
        allowed = self._share * wall

        def price(k: int) -> float:
            return (cost + (k - 1) * passing) / k

        while price(every) > allowed and every < EVERY_MAX:
            every *= 2
        if price(every) > self._ratio * wall:
            return None
        while every > 1 and price(every // 2) < SHRINK * allowed:
            every //= 2
        return every
