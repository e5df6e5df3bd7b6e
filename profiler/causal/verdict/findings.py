"""What the verdict consists of: findings, which name somebody, and incidents, which name nobody.

Values only.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..all_ranks.job_graph import Scenario
from ..one_rank.causes import Cause
from .peers import Compared

__all__ = ["Finding", "Incident", "Judgement"]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that holds the job up.

    `places` are the ranks concerned (one, a stage's, or those of a slow link).  Times are for the whole window:
    `saved_ns` by replay, `excess_ns` the named cause's excess over the peers, `own_ns` and `peers_ns` the cause's
    duration on the first of `places` and the median of its peers', `by_step_ns` the excess step by step.
    """

    places: list[int]
    kind: str
    """rank, stage, host (all ranks of one), link or imbalance."""
    cause: Cause
    saved_ns: int
    error_ns: int
    excess_ns: int
    own_ns: int
    peers_ns: int
    since: int
    by_step_ns: list[int]
    p: float
    details: dict[str, float] = field(default_factory=dict)
    causes: tuple[Cause, ...] = ()
    """What `saved_ns` is without: `cause` and those that belong to it, or all that ranks have by themselves."""


@dataclass(frozen=True, slots=True)
class Incident:
    """A single step of one rank that stands out and names nobody."""

    place: int
    step: int
    cause: Cause
    excess_ns: int


@dataclass(frozen=True, slots=True)
class Judgement:
    """What was found, the most harmful first; `mended` is the scenario without all of it."""

    findings: list[Finding]
    incidents: list[Incident]
    mended: Scenario
    compared: list[Compared]
