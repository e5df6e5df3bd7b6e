"""Cuts the steps of a rank into ranges that are the same on all ranks without a message about them.

Ranges are intervals of step numbers, not of measured steps: hooks measure one step in k where steps are short, and k
differs between ranks and changes.  A range holds the measured steps that fall into it, on some rank perhaps none.

    step      0   4   8  12      20      28 ...
    range     | 0 | 1 | 2 |   3   |   4   | ...      lengths are the period times a power of two

A range is `period` steps long, or longer, so that it lasts RANGE_SECONDS_MIN (more where the overhead budget is small)
and that each rank measures `period` steps in it.  Both are computed from the rows of the range LAG + 1 before, which
every rank must have received from all ranks before it may cut this one.  So all ranks compute the same lengths from the
same numbers, whatever else each has received by then.

Ranges are sent in *batches* of a power of two, ROWS_MAX at most, as many as last `gather_seconds`: of short steps many
at once, as sending costs more than cutting; of steps of a second each range by itself.  The same rows decide how many.

Pure: notes and rows in, cuts out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import NamedTuple

from .phase_sums_message import ROWS_MAX, RankRange, StepNote
from .subgroups import SUBGROUP_RANKS, WHOLE_MAX

__all__ = [
    "LAG",
    "RANGE_SECONDS_MIN",
    "RANGE_STEPS_MAX",
    "WAITING_MAX",
    "RangeCut",
    "RangesError",
    "StepRanges",
    "gather_seconds",
    "glance_seconds",
]

LAG = 3 * ROWS_MAX
"""Ranges that a rank may be ahead of those complete from all ranks.

One batch that waits, one under way, and one to spare.
"""

RANGE_SECONDS_MIN = 0.05
"""The shortest range.  While nothing changes, ROWS_MAX rows are sent at a time, so gathers are that much rarer."""

FIRST_ROWS = 8
"""Ranges in a batch before it is known how long they last."""

GATHER_COST_SECONDS = 0.0015
GATHER_COST_SECONDS_A_RANK = 0.000125
"""Processor time of a gather of ROWS_MAX rows on a rank, with the work before it; rank 0 pays the most."""

SUBGROUP_SECONDS = 5.0
"""The least time between two gathers of a subgroup, whose findings wait for the reports of its leader anyway.

Of steps of 0.1 s they take 64, with which a rank receives 1.4 KB a step.
"""

BUDGET_SHARE = 0.15
"""The share of the overhead budget that gathers may take when nothing is unusual."""

GLANCE_SECONDS_MIN = 0.1
GLANCE_COST_SECONDS = 0.00015
GLANCE_SHARE = 0.15
"""The same for glances at the pace; the cost includes the thread that wakes and the one that waits for it."""

RANGE_STEPS_MAX = 256
"""The longest range: four measured steps if every 64th is measured.  A longer one would delay reports too much."""

WAITING_MAX = 4096
"""The most notes that wait to be cut.  If there are more, a rank has not answered for thousands of steps."""


class RangesError(RuntimeError):
    """The ranks can no longer be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class RangeCut:
    """A finished range: its measured steps, the latest known step, and whether it ends a batch."""

    number: int
    first_step: int
    steps: int
    notes: tuple[StepNote, ...]
    latest: StepNote
    ends_batch: bool = False


class _Plan(NamedTuple):
    """The number of steps in a range and of ranges in its batch."""

    steps: int
    rows: int


class StepRanges:
    """Cuts one rank's notes into ranges."""

    def __init__(self, period: int, gather_seconds: float = ROWS_MAX * RANGE_SECONDS_MIN) -> None:
        self._period = period
        self._gather_ns = round(gather_seconds * 1e9)
        self._steps_max = max(period, RANGE_STEPS_MAX)
        self._waiting: deque[StepNote] = deque()
        self._inside: list[StepNote] = []
        self._number = 0
        self._first = 0
        self._received = 0
        self._first_plan = _Plan(period, FIRST_ROWS)
        self._plans: dict[int, _Plan] = {}

    @property
    def end(self) -> int | None:
        """The first step after the range under way; None while rows of other ranks are missing."""
        plan = self._plan()
        return None if plan is None else self._first + plan.steps

    @property
    def batch_end(self) -> int | None:
        """The first step after the batch under way; an estimate where the lengths of its ranges are not known yet."""
        plan = self._plan()
        if plan is None:
            return None
        number, end = self._number, self._first + plan.steps
        while not _ends_batch(number, plan):
            number += 1
            plan = self._plans.get(number, plan)
            end += plan.steps
        return end

    def add(self, note: StepNote) -> None:
        """Add the next measured step.

        Raises:
            RangesError: WAITING_MAX steps wait.
        """
        if len(self._waiting) >= WAITING_MAX:
            raise RangesError(f"a rank did not answer for {WAITING_MAX} steps")
        self._waiting.append(note)

    def cut(self) -> Iterator[RangeCut]:
        """Yield the ranges that are over and may be cut."""
        while True:
            end = self.end
            if end is None:
                return
            while self._waiting and self._waiting[0].step < end:
                self._inside.append(self._waiting.popleft())
            latest = self._waiting[0] if self._waiting else self._inside[-1] if self._inside else None
            if latest is None or latest.step + 1 < end:
                return
            plan = self._plan() or self._first_plan
            ends_batch = _ends_batch(self._number, plan)
            made = RangeCut(self._number, self._first, plan.steps, tuple(self._inside), latest, ends_batch)
            self._number, self._first, self._inside = self._number + 1, end, []
            yield made

    def receive(self, rows: Sequence[RankRange]) -> None:
        """Receive all ranks' rows of the next range.

        Raises:
            RangesError: the rows are not of that range.
        """
        if any((row.number, row.first_step, row.steps) != (self._received, *_place(rows[0])) for row in rows):
            places = sorted({(row.number, *_place(row)) for row in rows})
            raise RangesError(f"ranks sent different steps when range {self._received} was due: {places[:4]}")
        self._received += 1
        walls = [row.wall_ns for row in rows if row.wall_ns is not None]
        wall = median_high(walls) if walls else None
        needed = self._period * max(1, *(row.every for row in rows))
        if wall is not None:
            needed = max(needed, -(-self._gather_ns // (ROWS_MAX * max(1, wall))))
        length = self._period
        while length < min(needed, self._steps_max):
            length *= 2
        length = min(length, self._steps_max)
        batch = 1
        while batch < ROWS_MAX and wall is not None and batch * length * wall < self._gather_ns:
            batch *= 2
        self._plans[rows[0].number + LAG + 1] = _Plan(length, batch)

    def _plan(self) -> _Plan | None:
        if self._number <= LAG:
            return self._first_plan
        for number in [number for number in self._plans if number < self._number]:
            del self._plans[number]
        return self._plans.get(self._number)


def _ends_batch(number: int, plan: _Plan) -> bool:
    return number % plan.rows == plan.rows - 1


def gather_seconds(budget_ratio: float, world_size: int) -> float:
    """Return how long two gathers must be apart on average to stay within BUDGET_SHARE of `budget_ratio`.

    It is the same on all ranks of the job.
    """
    is_whole = world_size <= WHOLE_MAX
    shortest = ROWS_MAX * RANGE_SECONDS_MIN if is_whole else SUBGROUP_SECONDS
    if not 0.0 < budget_ratio < 1.0:
        return shortest
    cost_seconds = GATHER_COST_SECONDS + GATHER_COST_SECONDS_A_RANK * (world_size if is_whole else SUBGROUP_RANKS)
    return max(shortest, cost_seconds / (BUDGET_SHARE * budget_ratio))


def glance_seconds(budget_ratio: float) -> float:
    """Return how long two glances at the pace must be apart to stay within GLANCE_SHARE of `budget_ratio`."""
    if not 0.0 < budget_ratio < 1.0:
        return GLANCE_SECONDS_MIN
    return max(GLANCE_SECONDS_MIN, GLANCE_COST_SECONDS / (GLANCE_SHARE * budget_ratio))


def _place(row: RankRange) -> tuple[int, int]:
    return row.first_step, row.steps
