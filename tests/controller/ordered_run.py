"""A policy under people's orders as the tuner runs them, for tests that need no ranks."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.controller.observation import JobFacts, KnobSpace, Observation, Policy, Proposal, Record
from pacecar.controller.policy.hand_orders import HandOrders

__all__ = ["OrderedRun"]


class OrderedRun(Policy):
    """Calls `orders` and `policy` in the tuner's order."""

    def __init__(self, policy: Policy, orders: HandOrders) -> None:
        self.policy, self.orders = policy, orders

    def begin(self, facts: JobFacts, spaces: Sequence[KnobSpace], *, turns_knobs: bool) -> None:
        self.orders.begin(self.policy, facts, spaces, turns_knobs=turns_knobs)

    def hold(self, reason: str | None, *, is_brief: bool = False) -> None:
        self.orders.hold(reason, is_brief=is_brief)

    def advance(self, observations: Sequence[Observation]) -> tuple[Proposal | None, list[Record]]:
        proposal = self.orders.pursue(observations)
        if proposal is None:
            proposal = self.orders.review(*self.policy.advance(observations))
        return proposal, self.orders.drain()

    def finish(self, reason: str = "the job ended") -> list[Record]:
        self.orders.finish(reason)
        return self.orders.drain()
