"""Indexes a run's records by job: who ran and what was decided; the first of two readings, which skips steps.

Steps are nearly all of a run's bytes, and what they count for (before the first change, after the last one that was
kept) is known only when all verdicts are.  So they are read afterwards, with this index.

A job that is started again in the same folder appends to the same files.  Each attach begins a *life* with a step 0
of its own, so a place in a run is (life, step).  Two different jobs in one folder are two runs: they are told apart
by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from pacecar.records import (
    Decision,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    JobHello,
    KnobSwitch,
    KnobValue,
    ProcessStop,
    Straggler,
    TunerOrder,
    TunerStatus,
    Verdict,
    WhatIf,
)
from pacecar.records.measurements.estimate_check import CheckedError

from .inputs import Row

__all__ = ["EVENTS_MAX", "Key", "RunIndex", "gather"]

T = TypeVar("T")

Key = tuple[int, int]
"""A life and a step in it."""

EVENTS_MAX = 20_000
"""Kept of each kind, the last ones: thousands of decisions are days of tuning."""


@dataclass(slots=True)
class RunIndex:
    """What the records of one job hold besides its steps; decisions and verdicts are by (life, number).

    `worlds` is life -> the ranks that said hello in it, and how many there are: an elastic job has fewer or more;
    `goodbyes` are by (life, rank).
    """

    job: str
    records: int = 0
    lives: set[int] = field(default_factory=set)
    hellos: dict[int, JobHello] = field(default_factory=dict)
    worlds: dict[int, tuple[set[int], int]] = field(default_factory=dict)
    goodbyes: dict[tuple[int, int], Goodbye] = field(default_factory=dict)
    switches: deque[tuple[Key, KnobSwitch]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    first_switch: Key | None = None
    decisions: dict[Key, Decision] = field(default_factory=dict)
    verdicts: dict[Key, Verdict] = field(default_factory=dict)
    applied: dict[Key, int] = field(default_factory=dict)
    orders: deque[tuple[Key, TunerOrder]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    status: TunerStatus | None = None
    status_at: tuple[int, int, int] = (0, 0, 0)
    exploration_ns: dict[int, int] = field(default_factory=dict)
    checks: deque[CheckedError] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    ladder: WhatIf | None = None
    rank_ladders: dict[int, WhatIf] = field(default_factory=dict)
    stragglers: deque[tuple[Key, Straggler]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    hangs: deque[tuple[Key, HangSuspicion]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    stops: deque[tuple[Key, ProcessStop]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))

    @property
    def world_size(self) -> int | None:
        """Ranks of the job, as its hellos say; None when there is no hello."""
        return max((hello.world_size for hello in self.hellos.values()), default=None)

    @property
    def last_switch(self) -> Key | None:
        """The life and step at which knobs were turned last."""
        return max((key for key, _ in self.switches), default=None)

    @property
    def last_kept(self) -> Key | None:
        """The life and step of the last verdict that kept a change."""
        kept = [(life, v.step) for (life, _), v in self.verdicts.items() if v.outcome == "kept"]
        return max(kept, default=None)

    @property
    def overhead_budget(self) -> float | None:
        """The share of wall time that the job allowed pacecar; None where no hello says it."""
        said = [hello.overhead_budget for hello in self.hellos.values() if hello.overhead_budget is not None]
        return max(said, default=None)

    @property
    def tuner(self) -> str | None:
        """What the tuner said last; None when it said nothing."""
        return None if self.status is None else f"{self.status.state}: {self.status.detail}"

    @property
    def explored_ns(self) -> int | None:
        """What trials cost in all starts of the job; None where no tuner said it."""
        return sum(self.exploration_ns.values()) if self.exploration_ns else None

    @property
    def last_ladder(self) -> WhatIf | None:
        """The job's last what-if bounds; where it has none those of the lowest rank that has."""
        ranks = self.rank_ladders
        return self.ladder or (ranks[min(ranks)] if ranks else None)

    def settled(self) -> dict[str, KnobValue]:
        """Return the knobs that the job was left at; empty when none was turned.

        Those of the last switch; where the job ended inside a trial, the value that the trial began with.
        """
        if not self.switches:
            return {}
        (life, _), last = max(self.switches, key=lambda one: (one[0], one[1].epoch))
        values = dict(last.knobs.values)
        for (its_life, number), decision in self.decisions.items():
            verdict = self.verdicts.get((its_life, number))
            is_open = verdict is None or verdict.outcome == "abandoned"
            if its_life == life and is_open and number == last.decision and decision.knob in values:
                values[decision.knob] = decision.from_value
        return values


def gather(rows: Iterable[Row]) -> dict[str, RunIndex]:
    """Return job -> its index."""
    stories: dict[str, RunIndex] = {}
    for rank, life, _, record in rows:
        story = stories.get(record.job)
        if story is None:
            story = stories[record.job] = RunIndex(record.job)
        story.records += 1
        story.lives.add(life)
        _take(story, rank, life, record)
    return stories


def _take(story: RunIndex, rank: int, life: int, record: object) -> None:
    match record:
        case JobHello():
            story.hellos[rank] = record
            there, world = story.worlds.get(life, (set(), 0))
            story.worlds[life] = ({*there, rank}, max(world, record.world_size))
        case Goodbye():
            story.goodbyes[life, rank] = record
        case KnobSwitch():
            _switched(story, life, record)
        case Decision():
            _keep(story.decisions, (life, record.decision), record)
        case Verdict():
            _keep(story.verdicts, (life, record.decision), record)
        case TunerOrder():
            story.orders.append(((life, record.step), record))
        case TunerStatus():
            # Each rank has a status; the one that decides is the one that came furthest.
            if story.status is None or (life, record.step, record.wall_ns) >= story.status_at:
                story.status, story.status_at = record, (life, record.step, record.wall_ns)
            story.exploration_ns[life] = max(record.exploration_ns, story.exploration_ns.get(life, 0), key=abs)
        case EstimateCheck():
            if record.error is not None:
                story.checks.append(record.error)
        case WhatIf(of_rank=None):
            story.ladder = record
        case WhatIf():
            story.rank_ladders[rank] = record
        case Straggler():
            story.stragglers.append(((life, record.step), record))
        case HangSuspicion():
            story.hangs.append(((life, record.step), record))
        case ProcessStop():
            story.stops.append(((life, record.step), record))
        case _:
            pass


def _switched(story: RunIndex, life: int, switch: KnobSwitch) -> None:
    """Add a switch.  All ranks report each, so only one rank's records are kept."""
    key = (life, switch.step)
    story.first_switch = key if story.first_switch is None else min(story.first_switch, key)
    story.applied.setdefault((life, switch.decision), switch.step)
    if story.switches and switch.rank != story.switches[-1][1].rank:
        return
    story.switches.append((key, switch))


def _keep(kept: dict[Key, T], key: Key, value: T) -> None:
    kept[key] = value
    if len(kept) > EVENTS_MAX:
        del kept[next(iter(kept))]
