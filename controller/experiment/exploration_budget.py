"""Charges the time lost to trials against the user's exploration budget.

Counting trials or trial steps would be wrong: a hundred steps of an equally fast setting cost nothing, ten of a setting
three times as slow cost twenty steps.  So time is charged: steps in other than the kept setting, and those that settle
after a switch, against the mean of the kept setting.  A stretch of such steps counts if it lost and not if it gained,
so luck and good candidates never pay for bad ones.

Left out: what a wrong verdict costs afterwards; `pace_tracker` notices that.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["ALLOWANCE_STEPS", "PRIOR_LOSS_RATIO", "SWITCH_STEPS", "ExplorationBudget"]

ALLOWANCE_STEPS = 5
"""Steps' worth of time that may be lost before the budget has grown to as much; otherwise no trial could begin.

An advance on the budget, not an addition: adding 10 steps cost 1.1 % of 700 steps if the default was best already.
"""

TRIALS_SHARE = 0.75
"""Share of the budget for beginning trials; the rest covers what they cost beyond the forecast."""

PRIOR_LOSS_RATIO = 0.05
"""Assumed loss of a candidate without a forecast, as a share of step time."""

SWITCH_STEPS = 0.5
"""Cost of one switch in steps' worth of time (TUNING: +5 to +60 % over the first two steps)."""


RECENT_STEPS_MAX = 256
"""Steps whose charges are kept one by one: an alarm comes within ten windows of the change."""


class ExplorationBudget:
    """Accounts for the time that was lost.

    `spent_ns` falls only when conditions changed; `balance_ns` is signed, and reported as a trial's cost.
    """

    def __init__(self, budget_ratio: float) -> None:
        self._budget_ratio = budget_ratio
        self._elapsed_ns = 0
        self._banked_ns = 0.0
        self._recent_ns: deque[float] = deque([0.0], maxlen=RECENT_STEPS_MAX)
        self._stretch_ns = 0.0
        self._advance_from_ns = 0.0
        self._advanced_at_ns = 0
        self.balance_ns = 0.0

    @property
    def spent_ns(self) -> float:
        """Time lost to exploring so far."""
        return self._banked_ns + max(0.0, self._stretch_ns)

    def pass_step(self, pace_ns: int) -> None:
        """Count a step of the job under any setting."""
        self._elapsed_ns += pace_ns
        self._recent_ns.append(0.0)

    def charge(self, extra_ns: float) -> None:
        """Charge how much longer (or shorter) a step took because of a trial."""
        self._stretch_ns += extra_ns
        self._recent_ns[-1] += extra_ns
        self.balance_ns += extra_ns

    def close_stretch(self) -> None:
        """End a stretch, because the values in force changed: add its loss to what was spent."""
        self._banked_ns += max(0.0, self._stretch_ns)
        self._stretch_ns = 0.0

    def left_ns(self, typical_ns: float) -> float:
        """Return what may still be lost now."""
        advance = ALLOWANCE_STEPS * typical_ns + self._advance_from_ns
        return max(TRIALS_SHARE * self._budget_ratio * self._elapsed_ns, advance) - self.spent_ns

    def start_anew(self, typical_ns: float, *, steps: int) -> None:
        """Refund what the last `steps` cost: conditions changed before them, so the trial did not cause it.

        The advance is granted again for the new conditions, but not before the budget has paid the last one back, so
        that many changes cost at most twice the budget.
        """
        self.close_stretch()
        refund = max(0.0, math.fsum(list(self._recent_ns)[-steps:])) if steps else 0.0
        self._banked_ns = max(0.0, self._banked_ns - refund)
        if self._budget_ratio * (self._elapsed_ns - self._advanced_at_ns) >= ALLOWANCE_STEPS * typical_ns:
            self._advance_from_ns, self._advanced_at_ns = self.spent_ns, self._elapsed_ns

    def wait_steps(self, typical_ns: float, needed_ns: float) -> int | None:
        """Return the number of steps until `needed_ns` may be lost; None for never (the budget is zero)."""
        if needed_ns <= self.left_ns(typical_ns):
            return 0
        missing = needed_ns + self.spent_ns - TRIALS_SHARE * self._budget_ratio * self._elapsed_ns
        gained = TRIALS_SHARE * self._budget_ratio * typical_ns
        return None if gained <= 0 else int(missing / gained) + 1
