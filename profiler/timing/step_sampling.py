"""Decides how many steps the hook measures within the overhead budget: all, one in k, or none.

Measuring a step costs the same whether it takes 100 ms or 1 ms, which in the second case exceeds the user's budget.  So
if the always-on part alone would exceed SHARE of the budget (the rest is for windows), only one step in k is measured
and the others are counted: their end is observed, their wall time is added, and their ledger is that of the next
measured step, scaled.  If even counting is too expensive, the hook turns itself off for the rest of the run.  A few
steps during which other programs had the processor look the same, so OFF_REVIEWS consecutive reviews, each with new
steps, must agree.

Adding and removing torch's hooks costs more than measuring a step.  So BURST steps are measured in a row and then none
until k times as many have passed.  k is a power of two, so that ranks with different k still measure some steps in
common.

    k = 4    mmmm............mmmm............mmmm............
    k = 1    mmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmmm

k grows at once and shrinks with a margin (hysteresis) so that it does not oscillate.  Under a strained budget the share
is a quarter.  A ratio of 0 (no windows) or 1 (no limit) means that every step is measured.

Pure: numbers in, k out.
"""

from __future__ import annotations

from collections import deque
from statistics import median

__all__ = ["BURST", "EVERY_MAX", "REVIEW_STEPS", "SHARE", "StepSampling", "burst_end", "next_measured"]

BURST = 4
"""Steps measured in a row: as many as a range has over which ranks are compared (`crew_period_steps`)."""

REVIEW_STEPS = 32
"""Measured steps between two reviews of k: enough for a stable median."""

EARLY_STEPS = 4
EARLY_NS = 10_000_000
"""A review comes after only EARLY_STEPS if they have cost EARLY_NS more than their share, a tenth of the start-up debt.
A step of a hundred closures takes milliseconds to measure, and 32 of them may pass in a second."""

EVERY_MAX = 64
"""The largest k: with fewer measured steps a user would see a change too late."""

SHARE = 0.5
"""The share of the budget that the always-on part may take."""

STRAINED_SHARE = SHARE / 4
"""The share while the budget is strained: the rest earns the debt back."""

SHRINK = 0.7
"""k is halved only if the cost is then below this part of its share."""

REVIEWS = 8
"""Reviews over which the cost of records, which are written many at once, is averaged."""

OUTLIERS_RATIO = 0.1
"""The share of the costs, the highest ones, that is left out."""

OFF_REVIEWS = 3
"""Reviews in a row that must find even counting too expensive to turn the hook off; a burst each after the first."""

PASS_NS = 2_000
"""The assumed cost of a counted step before one was seen."""


class StepSampling:
    """Adapts k to the cost of measured steps; `every` is k (see `next_measured`), None when no step is measured."""

    def __init__(self, ratio: float) -> None:
        self._is_limited = 0.0 < ratio < 1.0
        self._ratio = ratio
        self._walls: deque[int] = deque(maxlen=REVIEW_STEPS)
        self._costs: deque[int] = deque(maxlen=REVIEW_STEPS)
        self._passes: deque[float] = deque(maxlen=REVIEW_STEPS)
        self._since = 0
        self._too_expensive = 0  # reviews in a row
        self._excess_ns = 0.0
        self._records_ns = 0
        self._records: deque[int] = deque(maxlen=REVIEWS)
        self.every: int | None = 1

    def charged(self, cost_ns: int) -> None:
        """Add the time one of our threads spent writing and sending the records of measured steps."""
        self._records_ns += cost_ns

    def measured(
        self, wall_ns: int, cost_ns: int, *, passed: int = 0, passed_cost_ns: int = 0, is_strained: bool = False
    ) -> None:
        """Add a measured step, its cost and the counted steps before it; `is_strained` is the state of the budget."""
        if not self._is_limited:
            return
        self._walls.append(wall_ns)
        self._costs.append(cost_ns)
        if passed:
            self._passes.append(passed_cost_ns / passed)
        self._since += 1
        if self.every is None:
            return
        self._excess_ns = max(0.0, self._excess_ns + cost_ns - SHARE * self._ratio * wall_ns)
        is_early = self._excess_ns > EARLY_NS and self._since >= EARLY_STEPS
        is_doubtful = self._too_expensive > 0 and self._since >= BURST
        if self._since >= REVIEW_STEPS or is_early or is_doubtful:
            self._since, self._excess_ns = 0, 0.0
            self.every = self._review(self.every, STRAINED_SHARE if is_strained else SHARE)

    def _review(self, every: int, share: float) -> int | None:
        # Use the mean of the costs without the few highest, when another program had the processor, and the median of
        # the wall times: one long wait does not mean a slower job.
        costs = self._usual_costs(every)
        self._records.append(self._records_ns)
        self._records_ns = 0
        of_records = sum(self._records) / (REVIEW_STEPS * len(self._records))
        wall, cost = median(self._walls), sum(costs) / len(costs) + of_records
        passing = median(self._passes) if self._passes else PASS_NS
        allowed = share * self._ratio * wall

        def price(k: int) -> float:
            return (cost + (k - 1) * passing) / k

        while price(every) > allowed and every < EVERY_MAX:
            every *= 2
        is_too_expensive = price(every) > self._ratio * wall
        self._too_expensive = self._too_expensive + 1 if is_too_expensive else 0
        if self._too_expensive >= OFF_REVIEWS:
            return None
        while every > 1 and price(every // 2) < SHRINK * allowed:
            every //= 2
        return every

    def _usual_costs(self, every: int) -> list[float]:
        costs: list[float] = list(self._costs)
        if every > 1:  # the first step of a burst pays for all of it
            costs = [sum(costs[start : start + BURST]) / BURST for start in range(0, len(costs) - BURST + 1, BURST)]
        return sorted(costs)[: len(costs) - max(1, round(OUTLIERS_RATIO * len(costs)))]


def next_measured(step: int, every: int) -> int:
    """Return the first measured step, from `step` on, when one in `every` is measured."""
    into = step % (BURST * every)
    return step if into < BURST else step - into + BURST * every


def burst_end(step: int, every: int) -> int:
    """Return the first step after measured `step` that is not measured; `every` > 1."""
    return step - step % (BURST * every) + BURST
