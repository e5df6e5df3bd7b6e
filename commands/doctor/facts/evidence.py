"""Says what a finding rests on: a value that was read and where, and what may be gained at most."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FindingEvidence", "Gain"]


@dataclass(frozen=True, slots=True)
class FindingEvidence:
    """One value that was read: what it is, what it says, and where it is."""

    what: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class Gain:
    """A bound, no promise: the share of step time (0..1) that may be saved at most, and what says so."""

    at_most_ratio: float
    basis: str
