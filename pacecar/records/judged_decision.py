"""Pairs decisions with their verdicts, for all that show what was changed and what became of it.

A decision has no verdict while it is open, or for good where it is advice.  A verdict stands alone where its decision
was dropped or is too old to be kept.  Of several verdicts on one decision the last counts: a change that was kept may
be rolled back later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from pacecar.records.ranges import KnobValue
from pacecar.records.records import Decision, Verdict

__all__ = ["JudgedDecision", "by_number", "pair"]

Key = TypeVar("Key", int, tuple[int, int])
"""The number of a decision; with the start of the job before it where a file holds several."""

Numbered = TypeVar("Numbered", Decision, Verdict)


class JudgedDecision(NamedTuple):
    """A decision and its verdict; at least one of them is there."""

    decision: Decision | None
    verdict: Verdict | None

    @property
    def said(self) -> Decision | Verdict:
        """The decision, or the verdict where that is all that is known."""
        one = self.verdict if self.decision is None else self.decision
        assert one is not None, "at least one of them is there"
        return one

    @property
    def kind(self) -> str | None:
        """Trial or advise; None where the decision is not known."""
        return None if self.decision is None else self.decision.kind

    @property
    def from_value(self) -> KnobValue | None:
        """The value before; None where the decision is not known."""
        return None if self.decision is None else self.decision.from_value

    @property
    def to_value(self) -> KnobValue | None:
        """The value that is wanted; None where the decision is not known."""
        return None if self.decision is None else self.decision.to_value

    @property
    def expected_gain_ratio(self) -> float | None:
        """Share of step time that was forecast to be saved; None where nothing was."""
        return None if self.decision is None else self.decision.expected_gain_ratio

    @property
    def outcome(self) -> str | None:
        """What the verdict says; None without one."""
        return None if self.verdict is None else self.verdict.outcome

    @property
    def measured_gain_ratio(self) -> float | None:
        """Share of step time that was measured to be saved; None where nothing was."""
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
        """Why it ended as it did; while it is open, why it was made."""
        return self.said.reason if self.verdict is None else self.verdict.reason


def by_number(records: Iterable[Numbered]) -> dict[int, Numbered]:
    """Return the number of the decision -> the last of `records` on it."""
    return {record.decision: record for record in records}


def pair(decisions: Mapping[Key, Decision], verdicts: Mapping[Key, Verdict]) -> dict[Key, JudgedDecision]:
    """Return each decision with its verdict, and each verdict whose decision is not known, in ascending order."""
    keys: list[Key] = sorted(decisions.keys() | verdicts.keys())
    return {key: JudgedDecision(decisions.get(key), verdicts.get(key)) for key in keys}
