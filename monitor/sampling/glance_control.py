"""Sets how often collectors glance to what the CPU budget allows; counts and logs the changes.

`cpu_budget` decides and is pure.  Here is what lasts: the rate that the workers read, what the last look found, and the
changes so far, which stay when a reload brings another budget.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from pacecar.records import Sample

from ..catalog_sample import sample
from .cpu_budget import CpuBudget
from .sampler import GlanceRate

__all__ = ["GlanceControl"]

_log = logging.getLogger(__name__)


class GlanceControl:
    """Keeps glances within the CPU budget.  The tick's thread calls `look`, another may call `limit`."""

    def __init__(self, cpu_budget: float, glances_per_second: float, *, interval_ns: int) -> None:
        self._limits = (cpu_budget, glances_per_second)
        self._interval_ns = interval_ns
        self._budget = CpuBudget(cpu_budget, glances_per_second, interval_ns=interval_ns)
        self.rate = GlanceRate(self._budget.rate)
        """The rate in force."""
        self._cpu_ratio: float | None = None
        self._changes = {"down": 0, "up": 0}

    def limit(self, cpu_budget: float, glances_per_second: float) -> None:
        """Apply another budget and highest rate from the next look on; the same ones change nothing."""
        if (cpu_budget, glances_per_second) != self._limits:
            self._limits = (cpu_budget, glances_per_second)
            self._budget = CpuBudget(cpu_budget, glances_per_second, interval_ns=self._interval_ns)
            self.rate.glances_per_second = self._budget.rate

    def look(self, cpu_ns: int, glance_cpu_ns: int, now_ns: int) -> None:
        """Take the CPU time so far, of the process and of its glances, and set the rate; log once when it changes."""
        change = self._budget.spend(cpu_ns, glance_cpu_ns, now_ns)
        if change is None:
            return
        self._cpu_ratio = change.cpu_ratio
        self.rate.glances_per_second = change.rate
        if change.direction is not None:
            self._changes[change.direction] += 1
            _log.log(
                logging.WARNING if change.direction == "down" else logging.INFO,
                "took %.1f %% of a processor, the budget is %.1f %%: glancing %g instead of %g times a second",
                100 * change.cpu_ratio, 100 * self._limits[0], change.rate, change.before,
            )  # fmt: skip

    def own_samples(self) -> Iterator[Sample]:
        """Yield the budget, the rate of glances, its changes and, after the first look, the share of CPU time."""
        yield sample("pacecar_daemon_cpu_budget_ratio", self._limits[0])
        yield sample("pacecar_daemon_glance_frequency_hertz", self.rate.glances_per_second)
        cpu_ratio = self._cpu_ratio
        if cpu_ratio is not None:
            yield sample("pacecar_daemon_cpu_utilization_ratio", cpu_ratio)
        for direction, count in self._changes.items():
            yield sample("pacecar_daemon_glance_changes_total", count, direction)
