"""Sums the steps of a run in bounded memory: windows, a time line, and totals for each stretch and rank.

When there are too many windows or bins, neighbours are merged and all become twice as long.  So a report of a minute
resolves seconds and one of a week minutes, without knowing the length in advance.

Samples are those of all ranks.  Steps that not all ranks measured count in the ranks' totals and the ledger over time,
but not in the pace.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple, cast

from msgspec import structs

from pacecar.records import LEDGER_HEADINGS, Goodbye, KnobValue, Ledger, StepRecord, Vitals
from pacecar.records.final_totals import completed
from pacecar.run_statistics import AFTER_STEPS_MIN

from ..figures import LogHistogram, Moments
from .before_after import BeforeAfterPlan, SettingStretch
from .run_index import Key
from .step_join import Measured
from .windows import WindowSums

__all__ = ["Bin", "JoinedStep", "RankSum", "StepSumPart", "StepSums", "TimeLine"]

BINS_MAX = 320
"""Bins of the time line: two pixels each on the page."""

FIRST_BIN_NS = 250_000_000

CLOCK_JUMP_NS = 600_000_000_000
"""The clock was set if wall-clock time between two steps of a rank differs from their durations by more than this."""

VITALS_MIN = 8
"""Readings needed since the last switch; a rank records one every few seconds."""

VITALS: dict[str, Callable[[Vitals], float | None]] = {
    "mfu": lambda vitals: vitals.mfu_ratio,
    "model_flops_per_second": lambda vitals: vitals.flops_per_second,
    "memory_allocated_bytes": lambda vitals: None if vitals.memory is None else vitals.memory.allocated_bytes,
    "memory_reserved_bytes": lambda vitals: None if vitals.memory is None else vitals.memory.reserved_bytes,
    "memory_fragmentation": lambda vitals: None if vitals.memory is None else vitals.memory.fragmentation_ratio,
}
"""The figures of a `Vitals` record that are averaged."""

_headings = operator.attrgetter(*(f"{heading}_ns" for heading in LEDGER_HEADINGS))
assert LEDGER_HEADINGS[:3] == ("compute", "exposed_communication", "exposed_copy"), "the device is busy in these"


def _known_headings(ledger: Ledger) -> Sequence[int]:
    if ledger.data_wait_ns is None:
        ledger = structs.replace(ledger, data_wait_ns=0)
    return cast("Sequence[int]", _headings(ledger))


class JoinedStep(NamedTuple):
    """One step of all ranks that measured it, summed for parts and time line."""

    walls: list[int]
    ledger: list[int]
    communication_ns: int
    overlapped_ns: int
    samples: int | None
    tokens: int | None
    began_ns: int
    ended_ns: int
    knobs: Mapping[str, KnobValue]
    is_calibrated: bool
    sees_data: bool

    @classmethod
    def of(cls, records: Sequence[StepRecord]) -> JoinedStep:
        """Return the sums over `records`, one a rank."""
        ledgers = [record.ledger for record in records]
        walls = [record.wall_ns for record in records]
        ended_ns = max(record.ended_wall_ns for record in records)
        return cls(
            walls,
            list(map(sum, zip(*map(_known_headings, ledgers), strict=True))),
            sum(ledger.communication_ns for ledger in ledgers),
            sum(ledger.overlapped_communication_ns for ledger in ledgers),
            _sum([record.samples for record in records]),
            _sum([record.tokens for record in records]),
            ended_ns - max(walls),
            ended_ns,
            records[0].knobs.values,
            all(record.calibration_age_steps is not None for record in records),
            any(ledger.data_wait_ns is not None for ledger in ledgers),
        )


@dataclass(slots=True)
class StepSumPart:
    """One stretch of the run: the job's pace, and the sum of the ledgers of all ranks.

    The ledger covers `ledger_steps` rank steps: the calibrated ones if there are any.  Before its first exact window,
    most of a rank's step time is unknown.
    """

    windows: WindowSums = field(default_factory=WindowSums)
    paces: LogHistogram = field(default_factory=LogHistogram)
    first: Key | None = None
    last: Key | None = None
    first_wall_ns: int | None = None
    last_wall_ns: int | None = None
    ledger: list[int] = field(default_factory=lambda: [0] * len(LEDGER_HEADINGS))
    communication_ns: int = 0
    overlapped_ns: int = 0
    ledger_steps: int = 0
    is_calibrated: bool = False
    rank_steps: int = 0
    compute: Moments = field(default_factory=Moments)
    busy: Moments = field(default_factory=Moments)
    exposed: Moments = field(default_factory=Moments)
    knobs: Mapping[str, KnobValue] = field(default_factory=dict)
    sees_data: bool = False

    def add(self, key: Key, together: JoinedStep) -> None:
        """Add one step of the job that all its ranks measured."""
        self.windows.add(together.walls, together.samples, together.tokens)
        self.paces.add(max(together.walls))
        if self.first is None or self.first_wall_ns is None:
            self.first, self.first_wall_ns = key, together.began_ns
        self.last, self.last_wall_ns = key, together.ended_ns
        self.knobs = together.knobs
        self.rank_steps += len(together.walls)
        self._add_ledger(together, len(together.walls))
        wall_ns = sum(together.walls)
        if wall_ns > 0 and together.is_calibrated:
            compute_ns, exposed_ns, copy_ns = together.ledger[:3]
            self.compute.add(compute_ns / wall_ns)
            self.busy.add((compute_ns + exposed_ns + copy_ns) / wall_ns)
            self.exposed.add(exposed_ns / wall_ns)

    def _add_ledger(self, other: JoinedStep | StepSumPart, steps: int) -> None:
        if other.is_calibrated and not self.is_calibrated:
            self.ledger = [0] * len(LEDGER_HEADINGS)
            self.communication_ns = self.overlapped_ns = self.ledger_steps = 0
            self.is_calibrated = True
        self.sees_data |= other.sees_data
        if other.is_calibrated == self.is_calibrated:
            self.ledger = list(map(operator.add, self.ledger, other.ledger))
            self.communication_ns += other.communication_ns
            self.overlapped_ns += other.overlapped_ns
            self.ledger_steps += steps

    def join(self, other: StepSumPart) -> None:
        """Add `other`, which comes later, without its windows."""
        self.paces.join(other.paces)
        self.first, self.last = self.first or other.first, other.last or self.last
        self.first_wall_ns = other.first_wall_ns if self.first_wall_ns is None else self.first_wall_ns
        self.last_wall_ns = self.last_wall_ns if other.last_wall_ns is None else other.last_wall_ns
        self.rank_steps += other.rank_steps
        self._add_ledger(other, other.ledger_steps)
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

    ledger: list[int] = field(default_factory=lambda: [0] * len(LEDGER_HEADINGS))
    wall_ns: int = 0
    rank_steps: int = 0
    steps: int = 0
    pace_ns: int = 0
    samples: int | None = 0
    sees_data: bool = False

    def join(self, other: Bin) -> None:
        """Add the neighbour."""
        self.ledger = [a + b for a, b in zip(self.ledger, other.ledger, strict=True)]
        self.sees_data |= other.sees_data
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
        """Return the bin of a step that ended at `wall_ns`; the first call starts the line at `began_ns`."""
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

    def add(self, together: JoinedStep, *, is_whole: bool) -> None:
        """Add one step; it counts for the pace if it `is_whole`, which means that all ranks measured it."""
        piece = self.at(together.ended_ns, together.began_ns)
        wall_ns, ranks = sum(together.walls), len(together.walls)
        piece.ledger = list(map(operator.add, piece.ledger, together.ledger))
        piece.sees_data |= together.sees_data
        piece.wall_ns += wall_ns
        piece.rank_steps += ranks
        if is_whole:
            piece.steps += 1
            piece.pace_ns += wall_ns // ranks
            known = piece.samples is not None and together.samples is not None
            piece.samples = (piece.samples or 0) + (together.samples or 0) if known else None


@dataclass(slots=True)
class RankSum:
    """One rank over all its lives; `lives` holds the last record of each, whose totals add up."""

    rank: int
    records: int = 0
    slowest_in: int = 0
    lives: dict[int, StepRecord] = field(default_factory=dict)

    @property
    def totals(self) -> Ledger:
        """The ledger of all steps, measured or only counted."""
        total = Ledger(wall_ns=0, data_wait_ns=None)
        for last in self.lives.values():
            total = total + last.totals
        return total


class StepSums:
    """The sums of the second reading; steps are added in order."""

    def __init__(self, plan: BeforeAfterPlan, ranks: int, ranks_of: Mapping[int, int] | None = None) -> None:
        """A step is complete with `ranks` records, or fewer in a life for which `ranks_of` says so."""
        self._plan = plan
        self._ranks = ranks
        self._ranks_of = ranks_of or {}
        self._first_step: dict[int, int] = {}
        self.parts: dict[SettingStretch, StepSumPart] = {
            stretch: StepSumPart() for stretch in SettingStretch if stretch is not SettingStretch.WARMUP
        }
        self._run_windows = WindowSums()
        self.line = TimeLine()
        self.ranks: dict[int, RankSum] = {}
        self._utilization: dict[str, tuple[Moments, Moments, Moments]] = {}
        self.complete_steps = 0
        self.guessed_steps = 0
        """Complete steps whose samples are guessed on any rank."""
        self.incomplete_steps = 0
        self.is_sampled = False
        self.jumps_ns: list[int] = []
        self._ended_ns: int | None = None
        self._rest_ns = 0
        self._clock: tuple[int, int, int, int] | None = None

    @property
    def run_ns(self) -> int | None:
        """Wall-clock duration of the run, corrected for changes of the clock; None without steps."""
        if self.line.start_ns is None or self._ended_ns is None:
            return None
        ended_ns = self._ended_ns if self.jumps_ns else self.line.end_ns
        return ended_ns - self.line.start_ns - sum(self.jumps_ns) + self._rest_ns

    def complete(self, goodbyes: Mapping[tuple[int, int], Goodbye], lives: Set[int]) -> None:
        """Add the steps that a rank only counted after its last record; `goodbyes` are by (life, rank).

        A rank with more lives than `lives` is skipped: its file is damaged, so its goodbyes cannot be assigned.
        """
        for total in self.ranks.values():
            if not total.lives.keys() <= lives:
                continue
            for life, last in total.lives.items():
                whole = total.lives[life] = completed(last, goodbyes.get((life, total.rank)))
                if life == max(self._first_step, default=life):
                    self._rest_ns = max(self._rest_ns, whole.totals.wall_ns - last.totals.wall_ns)

    def _watch_clock(self, life: int, first: StepRecord) -> None:
        """Compare the wall-clock time between one rank's steps with their durations."""
        now = (life, first.rank, first.ended_wall_ns, first.totals.wall_ns)
        if self._clock is not None and self._clock[:2] == now[:2]:
            jump = (now[2] - self._clock[2]) - (now[3] - self._clock[3])
            if abs(jump) > CLOCK_JUMP_NS:
                self.jumps_ns.append(jump)
        self._clock = now

    def add(self, key: Key, measured: Sequence[tuple[int, Measured]]) -> None:
        """Add what the ranks measured at `key`."""
        records: list[StepRecord] = []
        for rank, record in measured:
            total = self.ranks.get(rank)
            if total is None:
                total = self.ranks[rank] = RankSum(rank)
            if isinstance(record, Vitals):
                self._add_vitals(key, record)
                continue
            total.records += 1
            total.lives[key[0]] = record
            self.is_sampled |= record.measured_every != 1
            records.append(record)
        if not records:
            return
        first_step = self._first_step.setdefault(key[0], key[1])
        self._watch_clock(key[0], records[0])
        together = JoinedStep.of(records)
        self._ended_ns = together.ended_ns
        is_whole = len(records) >= min(self._ranks, self._ranks_of.get(key[0], self._ranks))
        self.line.add(together, is_whole=is_whole)
        if not is_whole:
            self.incomplete_steps += 1
            return
        self.complete_steps += 1
        self.guessed_steps += any(record.samples_guessed for record in records)
        self.ranks[records[together.walls.index(max(together.walls))].rank].slowest_in += 1
        if any(record.disturbed or record.source == "exact" for record in records):
            return
        stretch = self._plan.stretch(key, first_step, records[0])
        if stretch is not SettingStretch.WARMUP:
            self.parts[stretch].add(key, together)
            self._run_windows.add(together.walls, together.samples, together.tokens)

    @property
    def run(self) -> StepSumPart:
        """The whole run after warm-up: all parts, with windows that span them."""
        whole = StepSumPart()
        for part in sorted((p for p in self.parts.values() if p.last is not None), key=lambda p: p.last or (0, 0)):
            first = whole.first
            whole.join(part)
            if first is not None and part.first is not None and part.first < first:
                whole.first, whole.first_wall_ns = part.first, part.first_wall_ns
        whole.windows = self._run_windows
        return whole

    def after_stretches(self) -> list[SettingStretch]:
        """Return the stretches that make up `after`, in order: as few as have AFTER_STEPS_MIN steps."""
        chosen: list[SettingStretch] = []
        for stretch in (SettingStretch.SINCE_LAST_SWITCH, SettingStretch.SINCE_LAST_KEPT, SettingStretch.AT_SETTLED):
            chosen.insert(0, stretch)
            if sum(self.parts[one].windows.steps for one in chosen) >= AFTER_STEPS_MIN:
                break
        return [stretch for stretch in chosen if self.parts[stretch].windows.steps]

    def vital(self, name: str) -> tuple[Moments, Moments] | None:
        """Return one of VITALS before and after, which is since the last switch or, if that is short, the last kept."""
        found = self._utilization.get(name)
        if found is None:
            return None
        before, since_kept, since_switch = found
        return before, since_switch if since_switch.count >= VITALS_MIN else since_kept

    def _add_vitals(self, key: Key, vitals: Vitals) -> None:
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
                found = self._utilization.setdefault(name, (Moments(), Moments(), Moments()))
                found[place].add(value)
                if place == 2:
                    found[1].add(value)
