"""Defines rules and findings: what is wrong, the values that show it, the remedy and the document that says so.

A rule is a value, not a class with hooks: the table in docs/doctor.md is written from the same rows that are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from .facts.evidence import FindingEvidence, Gain
from .facts.model import NodeFacts

__all__ = ["Finding", "FindingSource", "Hit", "Needs", "Rule", "Severity"]


class Severity(StrEnum):
    """How bad a finding is.

    `critical` breaks training or makes it several times slower, `warning` costs time that can be measured, `info` is
    worth a try.
    """

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """0 for the mildest."""
        return list(Severity).index(self)


Needs = Literal["machine", "--pid", "--run", "--script", "--nccl-log"]
"""What must be given for a rule to have anything to look at."""


@dataclass(frozen=True, slots=True)
class Hit:
    """What a rule found.  `remedy` is what to type or to write, with this machine's own names in it."""

    evidence: Sequence[FindingEvidence]
    remedy: str
    gain: Gain | None = None


@dataclass(frozen=True, slots=True)
class FindingSource:
    """The document that a rule rests on, by name, and the place in it."""

    document: str
    section: str

    def __str__(self) -> str:
        return f"{self.document}: {self.section}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One check.  `check` is pure and gives None where the facts show no fault, or are not there."""

    id: str
    severity: Severity
    title: str
    why: str
    needs: Needs
    source: FindingSource
    check: Callable[[NodeFacts], Hit | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A rule that found its fault on this machine."""

    id: str
    severity: Severity
    title: str
    why: str
    evidence: tuple[FindingEvidence, ...]
    remedy: str
    gain: Gain | None
    source: FindingSource
