"""Defines the evidence of a finding (a value and its source), a bound on the gain, and the error of unusable files."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FactError", "FindingEvidence", "Gain"]


class FactError(ValueError):
    """A given file or folder is not what it should be; the message names it and, if known, the line."""


@dataclass(frozen=True, slots=True)
class FindingEvidence:
    """One value that was read: its name, the value, and its source."""

    what: str
    value: str
    where: str


@dataclass(frozen=True, slots=True)
class Gain:
    """An upper bound on the share of step time (0..1) that may be saved, and its source."""

    at_most_ratio: float
    basis: str
