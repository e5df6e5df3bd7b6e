"""Defines rules and findings: the fault, the values that show it, the remedy and the document behind it.

Rules are values, so that the table in docs/doctor.md is generated from the rows that are applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from .facts.evidence import FindingEvidence, Gain
from .facts.model import NodeFacts

__all__ = ["Finding", "FindingSource", "Hit", "Needs", "Rule", "Severity", "hit"]


class Severity(StrEnum):
    """The severity of a finding.

    `critical` breaks training or makes it several times slower, `warning` costs a measurable time, `info` is worth
    trying.
    """

    INFO = "info"
    WARNING = "warning"
    CRITICAL = "critical"

    @property
    def rank(self) -> int:
        """The order of severity, 0 for the mildest."""
        return list(Severity).index(self)


Needs = Literal["machine", "--pid", "--run", "--script", "--nccl-log"]
"""The input that a rule needs."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The result of a rule.  `remedy` is a command or code for this machine."""

    evidence: Sequence[FindingEvidence]
    remedy: str
    gain: Gain | None = None


def hit(evidence: Iterable[FindingEvidence], remedy: str, gain: Gain | None = None) -> Hit | None:
    """Return a hit; None without evidence."""
    found = tuple(evidence)
    return Hit(found, remedy, gain) if found else None


@dataclass(frozen=True, slots=True)
class FindingSource:
    """The document behind a rule, by name, and the section."""

    document: str
    section: str

    def __str__(self) -> str:
        return f"{self.document}: {self.section}"


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule.  `check` is pure and returns None if the facts do not show a fault."""

    id: str
    severity: Severity
    title: str
    why: str
    needs: Needs
    source: FindingSource
    check: Callable[[NodeFacts], Hit | None]


@dataclass(frozen=True, slots=True)
class Finding:
    """A fault that a rule found on this machine."""

    id: str
    severity: Severity
    title: str
    why: str
    evidence: tuple[FindingEvidence, ...]
    remedy: str
    gain: Gain | None
    source: FindingSource
