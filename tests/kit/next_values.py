"""A policy that turns every knob again and again, in place of one that turns only what is worthwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy, Proposal

__all__ = ["NextValues"]


class NextValues(Policy):
    """Proposes the next values as soon as the last ones are in force."""

    def __init__(self, *, is_trial: bool = False) -> None:
        self.is_trial = is_trial
        self.turn: Proposal | None = None
        self.turns = 0
        self.seen: list[Observation] = []
        self.spaces: Sequence[KnobSpace] = ()

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        self.spaces = spaces

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Any]]:
        self.seen.extend(observations)
        if self.turn is None or observations[-1].values == self.turn.values:
            self.turns += 1
            values = {s.knob: s.domain[self.turns % len(s.domain)] for s in self.spaces}
            self.turn = Proposal(self.turns, values, is_trial=self.is_trial)
        return self.turn, []

    def finish(self, reason: str = "") -> list[Any]:
        return []
