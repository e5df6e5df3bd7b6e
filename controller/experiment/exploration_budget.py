"""Charges the time lost to trials against the user's exploration budget, and predicts what the next switch costs.

Counting trials or trial steps would be wrong: a hundred steps of an equally fast setting cost nothing, ten of a setting
three times as slow cost twenty steps.  So time is charged: steps in other than the kept setting, and those that settle
after a switch, against the mean of the kept setting.  A stretch of such steps counts if it lost and not if it gained,
so luck and good candidates never pay for bad ones.  What a wrong verdict costs afterwards is left out; `pace_tracker`
notices that.

Trials must also fit into the overhead budget of each rank.  All ranks gather for a switch, confirm it, and compare
gradients in the steps after it.  While a trial is open they also vote every second to fourth step instead of every
sixteenth; those steps earn something in the meantime:

    price = MARGIN * (switch + STRETCH_BOUNDARIES * max(0, vote - EARNED_SHARE * earned))

`switch` is the most expensive of the last switches, `vote` the mean of the last votes, and `earned` what a step adds to
the overhead budget.  The first measured switch is the rehearsal, which applies the values in force before the first
trial; FIRST_SWITCH_NS is assumed before it.

Pure: nanoseconds in, costs and a number of switches out.  Left out: what may be spent (`overhead_budget`), and what the
policy does with the answer (`ab_trial`, `tuning_policy`).
"""

from __future__ import annotations

import math
from collections import deque

__all__ = [
    "ALLOWANCE_STEPS",
    "PRIOR_LOSS_RATIO",
    "RESERVED_SWITCHES",
    "SWITCH_STEPS",
    "TRIAL_SWITCHES",
    "ExplorationBudget",
    "SwitchPrice",
]

ALLOWANCE_STEPS = 5
"""Steps' worth of time that may be lost before the budget has grown to as much; otherwise no trial could begin.

An advance on the budget, not an addition: adding 10 steps cost 1.1 % of 700 steps if the default was best already.
"""

FORECAST_ALLOWANCE_STEPS = 2
"""The same for candidates with a forecast: one of them that is vague, or several that promise a gain, may be tried at
once.  With five steps, replays of 300 steps lost 0.5 % in 41 of 168 cases with nothing to gain, with two in 17."""

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

    def left_ns(self, typical_ns: float, *, is_forecast: bool) -> float:
        """Return what may still be lost now in trials of candidates with a forecast, or of others."""
        steps = FORECAST_ALLOWANCE_STEPS if is_forecast else ALLOWANCE_STEPS
        advance = steps * typical_ns + self._advance_from_ns
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
        """Return the number of steps until `needed_ns`, more than is left, may be lost; None for never."""
        missing = needed_ns + self.spent_ns - TRIALS_SHARE * self._budget_ratio * self._elapsed_ns
        gained = TRIALS_SHARE * self._budget_ratio * typical_ns
        return None if gained <= 0 else int(missing / gained) + 1


MARGIN = 1.5
"""Prices of switches differ by this factor on a busy machine, as those of windows do."""

SWITCHES_MAX = 4
"""Switches kept; the most expensive of them predicts the next."""

BOUNDARIES_MAX = 32
"""Boundaries with a vote kept: their mean is steady and follows the machine."""

STRETCH_BOUNDARIES = 18
"""Boundaries with a vote from one switch to the next: two windows of a trial, the steps that settle, and the delay.
They were 8 to 26 in trials of `make run`, 18 on average; MARGIN covers the rest."""

EARNED_SHARE = 0.5
"""Share of what a step earns that votes may use; the rest is for the hook's own cost in each step."""

FIRST_SWITCH_NS = 10_000_000
"""Assumed before the rehearsal.  Rehearsals took 4 ms on a quiet machine of two cores and 35 ms on one with a load of
ten."""

TRIAL_SWITCHES = 3
"""A trial switches to its candidate only if all ranks can pay for that, for the way back, and for keeping it."""

RESERVED_SWITCHES = 2
"""Windows leave this much while a trial is open: the way back, or keeping the candidate, and one more."""


class SwitchPrice:
    """The cost of switches and votes on one rank; all calls come from the training thread."""

    def __init__(self) -> None:
        self._switches: deque[int] = deque(maxlen=SWITCHES_MAX)
        self._votes: deque[int] = deque(maxlen=BOUNDARIES_MAX)

    def switched(self, cost_ns: int) -> None:
        """Add a boundary at which knobs were turned."""
        self._switches.append(cost_ns)

    def compared(self, cost_ns: int) -> None:
        """Add a boundary at which gradients were compared: it belongs to the switch before it."""
        if self._switches:
            self._switches[-1] += cost_ns

    def voted(self, cost_ns: int) -> None:
        """Add a boundary at which a vote was launched or read and nothing was turned."""
        self._votes.append(cost_ns)

    def price_ns(self, earned_ns: int) -> int:
        """Return the cost from the next switch to the one after it, if each step earns `earned_ns`."""
        switch_ns = max(self._switches, default=FIRST_SWITCH_NS)
        vote_ns = sum(self._votes) / len(self._votes) if self._votes else 0.0
        return int(MARGIN * (switch_ns + STRETCH_BOUNDARIES * max(0.0, vote_ns - EARNED_SHARE * earned_ns)))

    def affordable(self, headroom_ns: int | None, earned_ns: int) -> int | None:
        """Return how many switches `headroom_ns` pays for; None if nothing limits what is spent."""
        return None if headroom_ns is None else max(0, headroom_ns // max(1, self.price_ns(earned_ns)))
