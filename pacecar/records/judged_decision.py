"""Pairs decisions with their verdicts.

A decision has no verdict while it is open, and never if it is advice.  A verdict is alone if its decision was dropped
or is too old.  Of several verdicts on one decision the last counts: a change that was kept may be rolled back later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from pacecar.records.ranges import KnobValue
from pacecar.records.records import Decision, Verdict

__all__ = ["JudgedDecision", "by_number", "pair"]

Key = TypeVar("Key", int, tuple[int, int])
"""The number of a decision, preceded by the number of the job's start if a file holds several."""

Numbered = TypeVar("Numbered", Decision, Verdict)


class JudgedDecision(NamedTuple):
    """A decision and its verdict; at least one of them is known."""

    decision: Decision | None
    verdict: Verdict | None

    @property
    def said(self) -> Decision | Verdict:
        """The decision, or the verdict if the decision is not known."""
        one = self.verdict if self.decision is None else self.decision
        assert one is not None, "at least one of them is known"
        return one

    @property
    def kind(self) -> str | None:
        """Trial or advise; None if the decision is not known."""
        return None if self.decision is None else self.decision.kind

    @property
    def from_value(self) -> KnobValue | None:
        """The value before; None if the decision is not known."""
        return None if self.decision is None else self.decision.from_value

    @property
    def to_value(self) -> KnobValue | None:
        """The proposed value; None if the decision is not known."""
        return None if self.decision is None else self.decision.to_value

    @property
    def expected_gain_ratio(self) -> float | None:
        """The forecast saving as a share of step time; None without a forecast."""
        return None if self.decision is None else self.decision.expected_gain_ratio

    @property
    def outcome(self) -> str | None:
        """The verdict's outcome; None without a verdict."""
        return None if self.verdict is None else self.verdict.outcome

    @property
    def measured_gain_ratio(self) -> float | None:
        """The measured saving as a share of step time; None without a measurement."""
        return None if self.verdict is None else self.verdict.measured_gain_ratio

    @property
    def gain_low(self) -> float | None:
        """The lower bound of the measured gain."""
        return None if self.verdict is None else self.verdict.gain_low

    @property
    def gain_high(self) -> float | None:
        """The upper bound of the measured gain."""
        return None if self.verdict is None else self.verdict.gain_high

    @property
    def reason(self) -> str:
        """The verdict's reason, or the decision's while it is open."""
        return self.said.reason if self.verdict is None else self.verdict.reason


def by_number(records: Iterable[Numbered]) -> dict[int, Numbered]:
    """Return decision number -> the last of `records` about it."""
    return {record.decision: record for record in records}


def pair(decisions: Mapping[Key, Decision], verdicts: Mapping[Key, Verdict]) -> dict[Key, JudgedDecision]:
    """Return all decisions with their verdicts, and verdicts without a decision, in ascending order."""
    keys: list[Key] = sorted(decisions.keys() | verdicts.keys())
    return {key: JudgedDecision(decisions.get(key), verdicts.get(key)) for key in keys}
