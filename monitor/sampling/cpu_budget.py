"""Keeps the daemon's CPU time within the user's budget by how often collectors glance between ticks.

A monitor with a fixed rate is light on the machine where it was tuned.  With 256 processors, 16 ports or a driver whose
calls are slow, the same rate costs ten times as much, and it is the training job that pays.  So the daemon measures its
own CPU time and, while that is over the budget, halves the rate of glances down to none; the ticks stay, they are what
the user asked for.

Going up again must not flap, and must not be denied for ever after one busy minute.  So it does not depend on the share
that was measured at a higher rate before: the workers time their glances, so the cost of a glance is known at any rate,
and the rest of the share with it.  The rate goes up when the rest and the glances at the higher rate fit with room to
spare.  At most one step every `interval_ns`, so that each step is measured before the next.  What glances cost in other
threads than their worker's is not in their figure; so a step up that had to be taken back is tried again ever more
seldom.

The default of 5 % of one processor is twice what ticks and ten glances a second cost for 8 GPUs on a slow machine
(`make bench-daemon`), and less than a thousandth of a node that has 8 GPUs.

Left out on purpose: reading the clocks, and changing the rate.  CPU time and time in, a change out.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["CpuBudget", "RateChange"]

HALVINGS = 3
"""10, 5, 2.5 and 1.25 times a second; less is no better than the tick itself, so the next step is none."""

UP_RATIO = 0.8
"""Share of the budget that must suffice for the higher rate: waking a thread costs something that no glance times."""


PATIENCE_MAX = 64
"""Looks to wait after steps up that failed again and again: a quarter of an hour at 15 s."""


class RateChange(NamedTuple):
    """The result of one look at the budget: the share of CPU time, and the rate before and from now on."""

    cpu_ratio: float
    before: float
    rate: float

    @property
    def direction(self) -> str | None:
        """`down`, `up`, or None when the rate stays."""
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
        """Glances a second that are affordable as far as known."""
        return self._rates[self._level]

    def spend(self, cpu_ns: int, glance_cpu_ns: int, now_ns: int) -> RateChange | None:
        """Take the CPU time so far, of the process and of its glances; return the result, None between two looks."""
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
        if before > 0:  # at no rate nothing is learnt, and what was learnt before stands
            self._share_per_hertz = glances / before
        self._step(share, share - glances)
        return RateChange(share, before, self.rate)

    def _step(self, share: float, rest: float) -> None:
        """Go one step down or up, or stay; `rest` is the share of all that is not glances."""
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
