"""Indexes a run's records by job: ranks, decisions and events.  This is the first of two readings; it skips steps.

Steps are nearly all of a run's bytes, and only the verdicts decide whether a step is before or after tuning.  So steps
are read afterwards, with this index.

A job that is restarted in the same folder appends to the same files.  Each attach begins a *life* with its own step 0,
so a place in a run is (life, step).  Different jobs in one folder are separate runs, identified by name.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from pacecar.records import (
    Decision,
    EstimateCheck,
    Goodbye,
    HangSuspicion,
    HangVerdict,
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

__all__ = ["EVENTS_MAX", "Key", "LifeStart", "RunIndex", "index_jobs"]

T = TypeVar("T")

Key = tuple[int, int]
"""A life and a step in it."""

Timed = Decision | Goodbye | HangSuspicion | HangVerdict | Straggler | TunerOrder | TunerStatus | Verdict
"""Records whose `wall_ns` is when they were written."""

EVENTS_MAX = 20_000
"""The last so many of each kind are kept: thousands of decisions are days of tuning."""

PROCESS_APART_NS = 1_000_000_000
"""The start of a process, as two hellos of it say: the kernel counts in 10 ms, and the clock is corrected meanwhile."""


class LifeStart(NamedTuple):
    """When the ranks of a life attached and their processes began, when all had met, and the launchers' restarts."""

    ranks_ns: tuple[tuple[int, int], ...]
    rendezvous_ns: int | None
    attempt: int | None


@dataclass(slots=True)
class RunIndex:
    """The records of one job except its steps; decisions and verdicts are by (life, number).

    `worlds` is life -> the ranks that said hello, and the world size, which changes in an elastic job.  `goodbyes` are
    by (life, rank).  `ended_ns` is life -> rank -> the latest time in any of these records.
    """

    job: str
    records: int = 0
    lives: set[int] = field(default_factory=set)
    hellos: dict[int, JobHello] = field(default_factory=dict)
    worlds: dict[int, tuple[set[int], int]] = field(default_factory=dict)
    starts: dict[int, LifeStart] = field(default_factory=dict)
    ended_ns: dict[int, dict[int, int]] = field(default_factory=dict)
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
    hang_verdicts: deque[tuple[int, HangVerdict]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))
    stops: deque[tuple[Key, ProcessStop]] = field(default_factory=lambda: deque(maxlen=EVENTS_MAX))

    @property
    def world_size(self) -> int | None:
        """The world size from the hellos; None without a hello."""
        return max((hello.world_size for hello in self.hellos.values()), default=None)

    @property
    def last_switch(self) -> Key | None:
        """The life and step of the last switch."""
        return max((key for key, _ in self.switches), default=None)

    @property
    def last_kept(self) -> Key | None:
        """The life and step of the last verdict that kept a change."""
        kept = [(life, v.step) for (life, _), v in self.verdicts.items() if v.outcome == "kept"]
        return max(kept, default=None)

    @property
    def overhead_budget(self) -> float | None:
        """The job's budget for pacecar, as a share of wall time; None if no hello holds it."""
        said = [hello.overhead_budget for hello in self.hellos.values() if hello.overhead_budget is not None]
        return max(said, default=None)

    @property
    def tuner(self) -> str | None:
        """The tuner's last status; None if there is none."""
        return None if self.status is None else f"{self.status.state}: {self.status.detail}"

    @property
    def explored_ns(self) -> int | None:
        """The exploration cost in all starts of the job; None if no tuner reported it."""
        return sum(self.exploration_ns.values()) if self.exploration_ns else None

    @property
    def last_ladder(self) -> WhatIf | None:
        """The job's last what-if bounds, or else those of the lowest rank that has any."""
        ranks = self.rank_ladders
        return self.ladder or (ranks[min(ranks)] if ranks else None)

    def settled(self) -> dict[str, KnobValue]:
        """Return the knobs with which the job ended; empty if none was turned.

        They are those of the last switch.  If the job ended inside a trial, its knob has the value before the trial.
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


def index_jobs(rows: Iterable[Row]) -> dict[str, RunIndex]:
    """Return job -> its index."""
    indexes: dict[str, RunIndex] = {}
    for rank, life, _, record in rows:
        index = indexes.get(record.job)
        if index is None:
            index = indexes[record.job] = RunIndex(record.job)
        index.records += 1
        index.lives.add(life)
        if isinstance(record, Timed):
            ended_ns = index.ended_ns.setdefault(life, {})
            ended_ns[rank] = max(record.wall_ns, ended_ns.get(rank, 0))
        _add(index, rank, life, record)
    return indexes


def _add(index: RunIndex, rank: int, life: int, record: object) -> None:
    match record:
        case JobHello():
            before, index.hellos[rank] = index.hellos.get(rank), record
            there, world = index.worlds.get(life, (set(), 0))
            free_ns = 0
            if before is not None and _is_one_process(before, record):
                byes = (bye.wall_ns for (its, of), bye in index.goodbyes.items() if of == rank and its < life)
                free_ns = max(byes, default=record.started_wall_ns)
            index.starts[life] = _start(index.starts.get(life), record, free_ns)
            index.worlds[life] = ({*there, rank}, max(world, record.world_size))
        case Goodbye():
            index.goodbyes[life, rank] = record
        case KnobSwitch():
            _add_switch(index, life, record)
        case Decision():
            _keep_latest(index.decisions, (life, record.decision), record)
        case Verdict():
            _keep_latest(index.verdicts, (life, record.decision), record)
        case TunerOrder():
            index.orders.append(((life, record.step), record))
        case TunerStatus():
            # Each rank has a status; the one with the latest step counts.
            if index.status is None or (life, record.step, record.wall_ns) >= index.status_at:
                index.status, index.status_at = record, (life, record.step, record.wall_ns)
            index.exploration_ns[life] = max(record.exploration_ns, index.exploration_ns.get(life, 0), key=abs)
        case EstimateCheck():
            if record.error is not None:
                index.checks.append(record.error)
        case WhatIf(of_rank=None):
            index.ladder = record
        case WhatIf():
            index.rank_ladders[rank] = record
        case Straggler():
            index.stragglers.append(((life, record.step), record))
        case HangSuspicion():
            index.hangs.append(((life, record.step), record))
        case HangVerdict():
            index.hang_verdicts.append((life, record))
        case ProcessStop():
            index.stops.append(((life, record.step), record))
        case _:
            pass


def _is_one_process(one: JobHello, other: JobHello) -> bool:
    """Return whether a process attached twice: a process id comes again, above all in containers."""
    if one.process_wall_ns is None or other.process_wall_ns is None or (one.host, one.pid) != (other.host, other.pid):
        return False
    return abs(one.process_wall_ns - other.process_wall_ns) < PROCESS_APART_NS


def _start(known: LifeStart | None, hello: JobHello, free_ns: int) -> LifeStart:
    """Return `known` with `hello`, of a process that was in the life before until `free_ns`."""
    attached_ns = hello.started_wall_ns
    process_ns = attached_ns if hello.process_wall_ns is None else hello.process_wall_ns
    its_ns = attached_ns, min(attached_ns, max(process_ns, free_ns))
    if known is None:
        return LifeStart((its_ns,), hello.rendezvous_wall_ns, hello.attempt)
    met = [at for at in (known.rendezvous_ns, hello.rendezvous_wall_ns) if at is not None]
    counts = [count for count in (known.attempt, hello.attempt) if count is not None]  # a new torchrun agent's is 0
    return LifeStart((*known.ranks_ns, its_ns), max(met, default=None), max(counts, default=None))


def _add_switch(index: RunIndex, life: int, switch: KnobSwitch) -> None:
    """Add a switch.  All ranks record each switch, so those of one rank are kept."""
    key = (life, switch.step)
    index.first_switch = key if index.first_switch is None else min(index.first_switch, key)
    index.applied.setdefault((life, switch.decision), switch.step)
    if index.switches and switch.rank != index.switches[-1][1].rank:
        return
    index.switches.append((key, switch))


def _keep_latest(kept: dict[Key, T], key: Key, value: T) -> None:
    kept[key] = value
    if len(kept) > EVENTS_MAX:
        del kept[next(iter(kept))]
