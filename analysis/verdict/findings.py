"""Defines what a verdict consists of: findings, which name ranks, and incidents, which do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ..graph.causes import CauseCode
from ..graph.job_graph import ReplayScenario
from .peers import Compared

__all__ = ["Incident", "JobVerdict", "VerdictFinding"]


@dataclass(frozen=True, slots=True)
class VerdictFinding:
    """Something that holds the job up.

    `places` are the ranks concerned (one, a stage's, or those of a slow link).  Times are for the whole window:
    `saved_ns` is from replay, `excess_ns` is the cause's excess over the peers and `by_step_ns` the same step by step,
    `own_ns` and `peers_ns` are the cause's duration on the first of `places` and the median of its peers'.
    """

    places: list[int]
    kind: str
    """rank, stage, host (all ranks of one), link or imbalance."""
    cause: CauseCode
    saved_ns: int
    error_ns: int
    excess_ns: int
    own_ns: int
    peers_ns: int
    since: int
    by_step_ns: list[int]
    p: float
    details: dict[str, float] = field(default_factory=dict)
    causes: tuple[CauseCode, ...] = ()
    """The causes that `saved_ns` removes: `cause` and those that belong to it, or all that ranks have by themselves."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A single step of one rank that stands out; it is not evidence against the rank."""

    place: int
    step: int
    cause: CauseCode
    excess_ns: int


@dataclass(frozen=True, slots=True)
class JobVerdict:
    """The findings, the most harmful first; `mended` is the scenario without them."""

    findings: list[VerdictFinding]
    incidents: list[Incident]
    mended: ReplayScenario
    compared: Sequence[Compared]
