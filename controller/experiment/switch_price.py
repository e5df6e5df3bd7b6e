"""Predicts what the next switch of a trial costs this rank, so that trials fit into the overhead budget.

All ranks gather for a switch, confirm it, and compare gradients in the steps after it.  While a trial is open they also
vote every second to fourth step instead of every sixteenth; those steps earn something in the meantime:

    price = MARGIN * (switch + STRETCH_BOUNDARIES * max(0, vote - EARNED_SHARE * earned))

`switch` is the most expensive of the last switches, `vote` the mean of the last votes, and `earned` what a step adds to
the overhead budget.  The first measured switch is the rehearsal, which applies the values in force before the first
trial; FIRST_SWITCH_NS is assumed before it.

Pure: nanoseconds in, a number of switches out.  Left out: what may be spent (`overhead_budget`), and what the policy
does with the answer (`ab_trial`, `tuning_policy`).
"""

from __future__ import annotations

from collections import deque

__all__ = ["RESERVED_SWITCHES", "TRIAL_SWITCHES", "SwitchPrice"]

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
