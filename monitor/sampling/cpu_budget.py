"""Keeps the daemon's CPU time within the user's budget by changing how often collectors glance between ticks.

A fixed rate is cheap only on the machine where it was tuned.  With 256 processors, 16 ports or a slow driver it costs
ten times as much, and the training job pays.  So the daemon measures its own CPU time, and over the budget it halves
the rate of glances, down to none.  The ticks stay, because the user asked for them.

The rate must go up again, but not flap.  Workers time their glances, so their cost is known at any rate, and the
remaining share with it.  The rate goes up if the remaining share plus the glances at the higher rate fit with a margin.
There is at most one step per `interval_ns`, so that each is measured before the next.  Glances also cost time in
threads that do not measure it; so a step up that failed is retried after longer and longer waits.

The default of 5 % of one processor is twice what ticks and ten glances a second cost for 8 GPUs on a slow machine
(`make bench-daemon`), and less than a thousandth of a node with 8 GPUs.

`CpuBudget` is pure: CPU time and time in, a change out.  `GlanceControl` applies, counts and logs the changes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import NamedTuple

from pacecar.records import Sample

from ..catalog_sample import sample

__all__ = ["CpuBudget", "GlanceControl", "RateChange"]

HALVINGS = 3
"""10, 5, 2.5 and 1.25 times a second; less is no better than the tick itself, so the next step is none."""

UP_RATIO = 0.8
"""Share of the budget that the higher rate must fit into: glances do not measure the cost of waking a thread."""


PATIENCE_MAX = 64
"""Updates to wait after repeatedly failed steps up: a quarter of an hour at 15 s."""

_log = logging.getLogger(__name__)


class RateChange(NamedTuple):
    """The result of one update: the share of CPU time, and the rate before and from now on."""

    cpu_ratio: float
    before: float
    rate: float

    @property
    def direction(self) -> str | None:
        """`down`, `up`, or None if the rate stays."""
        if self.rate == self.before:
            return None
        return "up" if self.rate > self.before else "down"


class CpuBudget:
    """The daemon's allowance of CPU time, as a share of one processor."""

    def __init__(self, cpu_budget: float, glances_per_second: float, *, interval_ns: int) -> None:
        self._budget = cpu_budget
        self._rates = [*(glances_per_second / (1 << n) for n in range(HALVINGS + 1)), 0.0]
        if glances_per_second <= 0:
            self._rates = [0.0]
        self._level = 0
        self._went_up = False
        self._patience = self._hold = 0
        self._interval_ns = interval_ns
        self._since: tuple[int, int, int] | None = None
        self._share_per_hertz = 0.0

    @property
    def rate(self) -> float:
        """Glances a second that the budget allows, as far as known."""
        return self._rates[self._level]

    def update(self, cpu_ns: int, glance_cpu_ns: int, now_ns: int) -> RateChange | None:
        """Record the CPU time so far, of the process and of its glances; return a result at the end of an interval."""
        if self._since is None:
            self._since = (cpu_ns, glance_cpu_ns, now_ns)
            return None
        cpu_before, glance_before, then = self._since
        elapsed_ns = now_ns - then
        if elapsed_ns < self._interval_ns:
            return None
        self._since = (cpu_ns, glance_cpu_ns, now_ns)
        share = (cpu_ns - cpu_before) / elapsed_ns
        glances = (glance_cpu_ns - glance_before) / elapsed_ns
        before = self.rate
        if before > 0:  # without glances keep the last figure
            self._share_per_hertz = glances / before
        self._step(share, share - glances)
        return RateChange(share, before, self.rate)

    def _step(self, share: float, rest: float) -> None:
        """Go one step down or up, or stay; `rest` is the share of everything but glances."""
        went_up, self._went_up = self._went_up, False
        if share > self._budget:
            if went_up:
                self._patience = min(max(1, 2 * self._patience), PATIENCE_MAX)
            self._hold = self._patience
            self._level = min(self._level + 1, len(self._rates) - 1)
        elif self._level == 0:
            self._patience = 0
        elif self._hold > 0:
            self._hold -= 1
        elif rest + self._share_per_hertz * self._rates[self._level - 1] <= self._budget * UP_RATIO:
            self._level -= 1
            self._went_up = True


class GlanceControl:
    """Keeps glances within the CPU budget.  The tick's thread calls `update`; another may call `set_limits`."""

    def __init__(self, cpu_budget: float, glances_per_second: float, *, interval_ns: int) -> None:
        self._limits = (cpu_budget, glances_per_second)
        self._interval_ns = interval_ns
        self._budget = CpuBudget(cpu_budget, glances_per_second, interval_ns=interval_ns)
        self._cpu_ratio: float | None = None
        self._changes = {"down": 0, "up": 0}

    @property
    def rate(self) -> float:
        """Glances a second at present."""
        return self._budget.rate

    def set_limits(self, cpu_budget: float, glances_per_second: float) -> None:
        """Apply another budget and highest rate from now on; equal ones change nothing."""
        if (cpu_budget, glances_per_second) != self._limits:
            self._limits = (cpu_budget, glances_per_second)
            self._budget = CpuBudget(cpu_budget, glances_per_second, interval_ns=self._interval_ns)

    def update(self, cpu_ns: int, glance_cpu_ns: int, now_ns: int) -> None:
        """Record the CPU time so far, of the process and of its glances, and set the rate; log a change once."""
        change = self._budget.update(cpu_ns, glance_cpu_ns, now_ns)
        if change is None:
            return
        self._cpu_ratio = change.cpu_ratio
        if change.direction is not None:
            self._changes[change.direction] += 1
            _log.log(
                logging.WARNING if change.direction == "down" else logging.INFO,
                "took %.1f %% of a processor, the budget is %.1f %%: glancing %g instead of %g times a second",
                100 * change.cpu_ratio, 100 * self._limits[0], change.rate, change.before,
            )  # fmt: skip

    def own_samples(self) -> Iterator[Sample]:
        """Yield the budget, the rate of glances, its changes and, after the first interval, the share of CPU time."""
        yield sample("pacecar_daemon_cpu_budget_ratio", self._limits[0])
        yield sample("pacecar_daemon_glance_frequency_hertz", self.rate)
        cpu_ratio = self._cpu_ratio
        if cpu_ratio is not None:
            yield sample("pacecar_daemon_cpu_utilization_ratio", cpu_ratio)
        for direction, count in self._changes.items():
            yield sample("pacecar_daemon_glance_changes_total", count, direction)
