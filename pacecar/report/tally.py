"""What do the steps add up to?  Windows, a time line and sums, of any number of steps in bounded memory.

Where there would be too many windows or bins, neighbours are joined and all become twice as long.  So a report of a
minute shows seconds and one of a week shows minutes, from the same code, and nobody has to know the length beforehand.

A window takes as long as its slowest rank.  To add up the slowest rank of each step would be too much: ranks take turns
in being last, and one that begins a step late has ended the one before late, too.  Samples are those of all ranks.
Steps that not all ranks measured count in the ranks' sums and the ledger over time, and in no pace.
"""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from pacecar.records import LEDGER_HEADINGS, KnobValue, Ledger, StepRecord, Vitals
from pacecar.report.figures import LogHistogram, Moments
from pacecar.report.gather import Key
from pacecar.report.stretches import AFTER_STEPS_MIN, Plan, Stretch
from pacecar.report.weave import Measured

__all__ = ["WINDOW_STEPS", "Part", "RankSum", "Tally", "TimeLine", "Windows"]

WINDOW_STEPS = 8
"""Steps in one window: short enough to have many, long enough to smooth single steps."""

WINDOWS_MAX = 4096

BINS_MAX = 320
"""Of the time line: two pixels each on the page."""

FIRST_BIN_NS = 250_000_000

VITALS_MIN = 8
"""Readings since the last switch, one in some seconds and rank; fewer say little."""

VITALS: dict[str, Callable[[Vitals], float | None]] = {
    "mfu": lambda vitals: vitals.mfu_ratio,
    "model_flops_per_second": lambda vitals: vitals.flops_per_second,
    "memory_allocated_bytes": lambda vitals: vitals.memory.allocated_bytes if vitals.memory else None,
    "memory_reserved_bytes": lambda vitals: vitals.memory.reserved_bytes if vitals.memory else None,
    "memory_fragmentation": lambda vitals: vitals.memory.fragmentation_ratio if vitals.memory else None,
}
"""What is averaged of the vitals."""

_FIELDS = tuple(f"{heading}_ns" for heading in LEDGER_HEADINGS)


class Windows:
    """Wall time, samples and tokens of consecutive windows; None as soon as one step does not say them."""

    def __init__(self) -> None:
        self.steps_each = WINDOW_STEPS
        self.steps = 0
        self.rank_walls: list[int] = []
        self.samples: int | None = 0
        self.tokens: int | None = 0
        self._walls, self._samples, self._tokens = array("q"), array("q"), array("q")
        self._open, self._open_walls = [0, 0, 0], [0]

    @property
    def wall_ns(self) -> int:
        """How long all steps together took the slowest rank."""
        return max(self.rank_walls, default=0)

    def add(self, walls: Sequence[int], samples: int | None, tokens: int | None) -> None:
        """Take one step of the job: how long it took each rank, in the order of ranks, and what it held."""
        self.steps += 1
        self.rank_walls = _added(self.rank_walls, walls)
        self.samples = None if self.samples is None or samples is None else self.samples + samples
        self.tokens = None if self.tokens is None or tokens is None else self.tokens + tokens
        current = self._open
        current[0] += 1
        current[1] += samples or 0
        current[2] += tokens or 0
        self._open_walls = _added(self._open_walls, walls)
        if current[0] == self.steps_each:
            self._close()

    def _close(self) -> None:
        self._walls.append(max(self._open_walls))
        self._samples.append(self._open[1])
        self._tokens.append(self._open[2])
        self._open, self._open_walls = [0, 0, 0], [0]
        if len(self._walls) == WINDOWS_MAX:
            self.steps_each *= 2
            self._walls, self._samples, self._tokens = (
                array("q", [column[i] + column[i + 1] for i in range(0, WINDOWS_MAX, 2)])
                for column in (self._walls, self._samples, self._tokens)
            )

    def rates(self, unit: str) -> list[float]:
        """Return samples, tokens or steps a second, window by window; empty where the unit was not counted.

        A rest that is shorter than a window counts when there is no other.
        """
        walls: Sequence[int] = self._walls
        counts: Sequence[int] = {"samples": self._samples, "tokens": self._tokens}.get(unit, self._walls)
        if (unit == "samples" and self.samples is None) or (unit == "tokens" and self.tokens is None):
            return []
        if not walls and self._open[0]:
            walls, counts = [max(self._open_walls)], [self._open[{"samples": 1, "tokens": 2}.get(unit, 0)]]
            each = self._open[0]
        else:
            each = self.steps_each
        if unit == "steps":
            return [each * 1e9 / wall for wall in walls if wall > 0]
        return [count * 1e9 / wall for count, wall in zip(counts, walls, strict=True) if wall > 0]


def _added(sums: Sequence[int], values: Sequence[int]) -> list[int]:
    """Return the sums with one more value each; as long as the longer of both."""
    if len(sums) == len(values):
        return list(map(operator.add, sums, values))
    return [a + b for a, b in zip_longest(sums, values, fillvalue=0)]


@dataclass(slots=True)
class Part:
    """One stretch of the run: the job's pace, and the ledgers of all its ranks added up."""

    windows: Windows = field(default_factory=Windows)
    paces: LogHistogram = field(default_factory=LogHistogram)
    first: Key | None = None
    last: Key | None = None
    first_wall_ns: int | None = None
    last_wall_ns: int | None = None
    ledger: list[int] = field(default_factory=lambda: [0] * len(_FIELDS))
    ledger_wall_ns: int = 0
    communication_ns: int = 0
    overlapped_ns: int = 0
    rank_steps: int = 0
    compute: Moments = field(default_factory=Moments)
    busy: Moments = field(default_factory=Moments)
    exposed: Moments = field(default_factory=Moments)
    knobs: dict[str, KnobValue] = field(default_factory=dict)

    def add(self, key: Key, pace_ns: int, records: Sequence[StepRecord]) -> None:
        """Take one step of the job that all its ranks measured."""
        samples = _sum([record.samples for record in records])
        walls = [record.wall_ns for record in records]
        self.windows.add(walls, samples, _sum([record.tokens for record in records]))
        self.paces.add(pace_ns)
        self.first = key if self.first is None else self.first
        self.last = key
        ended = max(record.ended_wall_ns for record in records)
        self.first_wall_ns = ended - pace_ns if self.first_wall_ns is None else self.first_wall_ns
        self.last_wall_ns = ended
        self.knobs = dict(records[0].knobs.values)
        for record in records:
            ledger = record.ledger
            self.ledger_wall_ns += ledger.wall_ns
            self.communication_ns += ledger.communication_ns
            self.overlapped_ns += ledger.overlapped_communication_ns
            self.rank_steps += 1
            for place, name in enumerate(_FIELDS):
                self.ledger[place] += getattr(ledger, name)
            if ledger.wall_ns > 0 and record.calibration_age_steps is not None:
                busy_ns = ledger.compute_ns + ledger.exposed_communication_ns + ledger.exposed_copy_ns
                self.compute.add(ledger.compute_ns / ledger.wall_ns)
                self.busy.add(busy_ns / ledger.wall_ns)
                self.exposed.add(ledger.exposed_communication_ns / ledger.wall_ns)


    def join(self, other: Part) -> None:
        """Take all of `other`, which comes later, but its windows."""
        self.paces.join(other.paces)
        self.first, self.last = self.first or other.first, other.last or self.last
        self.first_wall_ns = other.first_wall_ns if self.first_wall_ns is None else self.first_wall_ns
        self.last_wall_ns = self.last_wall_ns if other.last_wall_ns is None else other.last_wall_ns
        self.ledger = [a + b for a, b in zip(self.ledger, other.ledger, strict=True)]
        self.ledger_wall_ns += other.ledger_wall_ns
        self.communication_ns += other.communication_ns
        self.overlapped_ns += other.overlapped_ns
        self.rank_steps += other.rank_steps
        for mine, theirs in ((self.compute, other.compute), (self.busy, other.busy), (self.exposed, other.exposed)):
            mine.join(theirs)
        self.knobs = other.knobs or self.knobs


def _sum(counts: Sequence[int | None]) -> int | None:
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


@dataclass(slots=True)
class Bin:
    """A piece of the time line: `ledger` and `wall_ns` of `rank_steps` steps of ranks, and `steps` of the job."""

    ledger: list[int] = field(default_factory=lambda: [0] * len(_FIELDS))
    wall_ns: int = 0
    rank_steps: int = 0
    steps: int = 0
    pace_ns: int = 0
    samples: int | None = 0

    def join(self, other: Bin) -> None:
        """Take in the neighbour."""
        self.ledger = [a + b for a, b in zip(self.ledger, other.ledger, strict=True)]
        self.wall_ns += other.wall_ns
        self.rank_steps += other.rank_steps
        self.steps += other.steps
        self.pace_ns += other.pace_ns
        self.samples = None if self.samples is None or other.samples is None else self.samples + other.samples


class TimeLine:
    """The run in at most BINS_MAX pieces of equal length, by the time of day at which steps ended."""

    def __init__(self) -> None:
        self.start_ns: int | None = None
        self.end_ns = 0
        self.width_ns = FIRST_BIN_NS
        self.bins: dict[int, Bin] = {}

    def at(self, wall_ns: int, began_ns: int) -> Bin:
        """Return the bin of a step that ended at `wall_ns`; the first one that is asked for begins the line."""
        if self.start_ns is None:
            self.start_ns = began_ns
        self.end_ns = max(self.end_ns, wall_ns)
        while (place := max(0, wall_ns - self.start_ns) // self.width_ns) >= BINS_MAX:
            self.width_ns *= 2
            joined: dict[int, Bin] = {}
            for old in sorted(self.bins):
                if old // 2 in joined:
                    joined[old // 2].join(self.bins[old])
                else:
                    joined[old // 2] = self.bins[old]
            self.bins = joined
        found = self.bins.get(place)
        if found is None:
            found = self.bins[place] = Bin()
        return found

    def add(self, records: Sequence[StepRecord], *, is_whole: bool) -> None:
        """Take the ranks' records of one step, `is_whole` where all ranks measured it; then they tell the pace."""
        ended = max(record.ended_wall_ns for record in records)
        piece = self.at(ended, ended - max(record.wall_ns for record in records))
        for record in records:
            for place, name in enumerate(_FIELDS):
                piece.ledger[place] += getattr(record.ledger, name)
            piece.wall_ns += record.wall_ns
            piece.rank_steps += 1
        if is_whole:
            piece.steps += 1
            piece.pace_ns += sum(record.wall_ns for record in records) // len(records)
            samples = _sum([record.samples for record in records])
            piece.samples = None if piece.samples is None or samples is None else piece.samples + samples


@dataclass(slots=True)
class RankSum:
    """One rank over all its lives; `lives` are the last records of each, whose totals add up."""

    rank: int
    records: int = 0
    slowest_in: int = 0
    first_wall_ns: int | None = None
    lives: dict[int, StepRecord] = field(default_factory=dict)
    vitals: Vitals | None = None

    @property
    def totals(self) -> Ledger:
        """The ledger of all steps, measured or only counted."""
        total = Ledger(wall_ns=0)
        for last in self.lives.values():
            total = total + last.totals
        return total


class Tally:
    """The second reading: takes the steps of the job one after another."""

    def __init__(self, plan: Plan, ranks: int) -> None:
        self._plan = plan
        self._ranks = ranks
        self._first_step: dict[int, int] = {}
        self.parts = {stretch: Part() for stretch in Stretch if stretch is not Stretch.WARMUP}
        self.run = Part()
        self.line = TimeLine()
        self.ranks: dict[int, RankSum] = {}
        self._vitals: dict[str, tuple[Moments, Moments, Moments]] = {}
        self.complete_steps = 0
        self.incomplete_steps = 0
        self.is_sampled = False

    def take(self, key: Key, measured: Sequence[tuple[int, Measured]]) -> None:
        """Take what all ranks measured at `key`."""
        records: list[StepRecord] = []
        for rank, record in measured:
            total = self.ranks.get(rank)
            if total is None:
                total = self.ranks[rank] = RankSum(rank)
            if isinstance(record, Vitals):
                total.vitals = record
                self._vital(key, record)
                continue
            total.records += 1
            total.lives[key[0]] = record
            if total.first_wall_ns is None:
                total.first_wall_ns = record.ended_wall_ns - record.wall_ns
            self.is_sampled |= record.measured_every != 1
            records.append(record)
        if not records:
            return
        first_step = self._first_step.setdefault(key[0], key[1])
        if len(records) < self._ranks:
            self.incomplete_steps += 1
            self.line.add(records, is_whole=False)
            return
        self.complete_steps += 1
        slowest = max(records, key=lambda record: record.wall_ns)
        self.ranks[slowest.rank].slowest_in += 1
        self.line.add(records, is_whole=True)
        if any(record.disturbed or record.source == "exact" for record in records):
            return
        stretch = self._plan.stretch(key, first_step, records[0])
        if stretch is not Stretch.WARMUP:
            self.parts[stretch].add(key, slowest.wall_ns, records)
            self.run.add(key, slowest.wall_ns, records)

    def after(self) -> list[Part]:
        """Return the parts that make up `after`: the fewest that are enough."""
        chosen: list[Part] = []
        for stretch in (Stretch.SINCE_LAST_SWITCH, Stretch.SINCE_LAST_KEPT, Stretch.AT_SETTLED):
            chosen.insert(0, self.parts[stretch])
            if sum(part.windows.steps for part in chosen) >= AFTER_STEPS_MIN:
                break
        return [part for part in chosen if part.windows.steps]

    def vital(self, name: str) -> tuple[Moments, Moments] | None:
        """Return before and after of one of VITALS; after the last switch, or the last kept change if that is little."""
        found = self._vitals.get(name)
        if found is None:
            return None
        before, since_kept, since_switch = found
        return before, since_switch if since_switch.count >= VITALS_MIN else since_kept

    def _vital(self, key: Key, vitals: Vitals) -> None:
        plan = self._plan
        place = 0
        if plan.first_switch is not None and key > plan.first_switch:
            turned = plan.last_kept or plan.first_switch
            place = 2 if plan.last_switch is not None and key > plan.last_switch else 1
            if key <= turned:
                return
        for name, read in VITALS.items():
            value = read(vitals)
            if value is not None:
                found = self._vitals.setdefault(name, (Moments(), Moments(), Moments()))
                found[place].add(value)
                if place == 2:
                    found[1].add(value)
