"""Charges every nanosecond of a job's life, over all its attempts, to exactly one heading.

A life begins with the first process of the first attempt and ends with the last record of the last one.  It is laid out
as stretches, one after the other; each has a length, and its headings fill it exactly:

    start-up | first step | steps: kept ... lost | unrecorded | down | start-up | first step | ...

A step is *lost* if a later attempt trained it again, or if the job failed and no checkpoint holds it.  Both follow from
one rule: reading backwards, a step is lost if its number is above the lowest number from which a later step went on.
Numbers count the optimizer updates of the whole training.  Where they are unknown, the last checkpoint of an attempt is
where the next one is taken to resume, and without that the attempt's lost steps are unknown.

Durations come from the monotonic clock where there is one (steps) and else from differences of wall clocks.  A wall
clock that was set by more than CLOCK_JUMP_NS within an attempt, or as far back between two, is counted and left out of
the life.  Attempts that overlap by less share no time: the later one begins where the earlier ends.

Everything here is pure: attempts in, a `JobLife` out.

Sources: ETTR is productive runtime over the available wall-clock time of a job run, time in the queue included, where
restarts' initialization and steps trained again are unproductive (Kokolis et al., "Revisiting Reliability in
Large-Scale Machine Learning Research Clusters", arXiv 2410.21680).  `GOOGLE_NAMES` are the BadputType names of
AI-Hypercomputer/ml-goodput-measurement.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import msgspec

__all__ = [
    "CLOCK_JUMP_NS", "GOOGLE_NAMES", "INTERVALS_MAX", "LIFE_HEADINGS", "Attempt", "AttemptCharge", "JobLife",
    "LifeInterval", "StepRow", "charge",
]  # fmt: skip

LIFE_HEADINGS = {
    "productive": "steps that were kept, less the parts below",
    "exposed_communication": "in kept steps: communication with no compute beside it",
    "straggler_wait": "in kept steps: what they took longer because of a late rank",
    "compilation": "in kept steps: torch.compile compiled",
    "data_wait": "in kept steps: the loop waited for a batch",
    "trials": "in kept steps: what pacecar's trials cost",
    "evaluation": "from a forward in evaluation to the next one in training",
    "stopped": "the process had no processor",
    "hang": "no step ended; until the last record if the job never went on",
    "checkpoint_save": "inside pacer.checkpoint() after the first step",
    "checkpoint_restore": "inside pacer.checkpoint() before the first step ended",
    "lost_steps": "steps trained again, or that failed and no checkpoint holds",
    "start_up": "start of the process to the first step, where it cannot be split",
    "start_up_rendezvous": "start of the process until its process group exists: python, libraries, rendezvous",
    "start_up_preparation": "from there to the first step: model, data, restored state",
    "start_up_compilation": "in an attempt's first step: torch.compile compiled",
    "start_up_first_step": "the rest of an attempt's first step, with lazy initialization",
    "unrecorded": "in an attempt, but no record covers it: mostly after its last recorded step",
    "down": "between the last record of an attempt and the first process of the next",
}
"""Heading -> what is charged to it, in reading order.  They sum to the life."""

IN_STEPS = (
    "checkpoint_save", "checkpoint_restore", "evaluation", "hang", "stopped", "compilation", "data_wait",
    "straggler_wait", "exposed_communication", "trials",
)  # fmt: skip
"""What is taken out of a step, in this order as long as there is time left in it."""

IN_FIRST_STEP = {name: name for name in ("checkpoint_restore", "evaluation", "hang", "stopped")} | {
    "compilation": "start_up_compilation"
}
"""What of these a first step has beside start-up, and the heading that it is charged to there."""

START_UP = ("start_up", "start_up_rendezvous", "start_up_preparation", "start_up_compilation", "start_up_first_step")

WITHOUT_PROGRESS = (*START_UP, "lost_steps", "hang", "unrecorded", "down")
"""What ETTR holds unproductive: initialization, what is trained again, and time in which nothing is trained."""

GOOGLE_NAMES = {
    "GoodputType.TOTAL": ("productive", "exposed_communication", "straggler_wait", "trials"),
    "TPU_INITIALIZATION": ("start_up_rendezvous",),
    "TRAINING_PREP": ("start_up", "start_up_preparation"),
    "PROGRAM_STARTUP": ("start_up_compilation", "start_up_first_step"),
    "DATA_LOADING_SYNC": ("data_wait",),
    "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME": ("checkpoint_save",),
    "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME": ("checkpoint_restore",),
    "WASTED_PROGRESS_FROM_DISRUPTION": ("lost_steps",),
    "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION": ("down",),
    "OTHER": ("evaluation", "stopped", "compilation", "hang", "unrecorded"),
}
"""Google's name -> the headings that it covers; each heading is in exactly one."""

CLOCK_JUMP_NS = 600_000_000_000
"""Ten minutes between two steps, beside what the second one took, are rarer than a clock that was set."""

INTERVALS_MAX = 24
"""Intervals of a life: enough to see when it went wrong, and a screen of rows."""


class StepRow(NamedTuple):
    """Consecutive steps of one attempt, `wall_ns` long together, that ended at `ended_ns` (wall clock).

    `number` counts the optimizer updates of the whole training after the last of these `steps`; None: unknown.  `parts`
    is heading of IN_STEPS -> nanoseconds within them.
    """

    ended_ns: int
    steps: int
    wall_ns: int
    number: int | None = None
    parts: Mapping[str, int] = {}


class Attempt(NamedTuple):
    """One start of the job, as seen by one of its ranks; times are of the wall clock.

    began_ns       its first process started
    rendezvous_ns  its process group existed; None: no group, or unknown
    rows           its steps in order; the first is its first step alone
    ended_ns       the last record of any of its ranks
    is_failed      it did not say goodbye, or said that it failed
    saved_steps    how many of its own steps the last checkpoint holds; None: no checkpoint was seen
    hangs          a hang was reported after its last step
    """

    began_ns: int
    rows: Sequence[StepRow]
    ended_ns: int
    number: int | None = None
    rendezvous_ns: int | None = None
    is_failed: bool = True
    saved_steps: int | None = None
    hangs: bool = False


class AttemptCharge(msgspec.Struct, frozen=True, kw_only=True):
    """What one attempt, with the down time before it, was charged.

    `number` is the launcher's restart count.  `first_step` and `last_step` count the updates of the whole training;
    None: unknown.  `lost_steps` is None if it cannot be known.
    """

    number: int | None
    began_wall_ns: int
    wall_ns: int
    steps: int
    first_step: int | None
    last_step: int | None
    lost_steps: int | None
    is_failed: bool
    headings_ns: dict[str, int]


class LifeInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A part of the life, `at_ns` after its start."""

    at_ns: int
    wall_ns: int
    productive_time_ratio: float | None
    headings_ns: dict[str, int]


class JobLife(msgspec.Struct, frozen=True, kw_only=True):
    """A job over all its attempts; `headings_ns` sums to `wall_ns` exactly, and so does each interval's.

    productive_time_ratio  productive over all time
    ettr                   all but start-up, lost steps, hang, unrecorded and down, over all time (arXiv 2410.21680)
    google_ns              the same time under the names of ml-goodput-measurement
    lost_steps             None: unknown for every attempt where it matters
    lost_is_partial        some attempts' lost steps are unknown or known only to be at least so many
    jumps_ns               wall clocks that were set, and are left out; overlaps of attempts are negative
    """

    wall_ns: int
    productive_time_ratio: float | None
    ettr: float | None
    lost_steps: int | None
    lost_is_partial: bool
    headings_ns: dict[str, int]
    google_ns: dict[str, int]
    attempts: tuple[AttemptCharge, ...]
    intervals: tuple[LifeInterval, ...]
    jumps_ns: tuple[int, ...]


Stretch = tuple[str, int]
"""A heading and nanoseconds, in the order of time."""


def charge(attempts: Sequence[Attempt], *, intervals: int = INTERVALS_MAX) -> JobLife | None:
    """Return the life of the job whose `attempts` are in the order of their starts; None if there are none.

    Its `intervals` are equally long, the last one by up to as many nanoseconds shorter.
    """
    if not attempts:
        return None
    losses = _losses(attempts)
    jumps: list[int] = []
    laid: list[list[Stretch]] = []
    end_ns = attempts[0].began_ns
    for attempt, loss in zip(attempts, losses, strict=True):
        gap = attempt.began_ns - end_ns
        begin_ns = max(attempt.began_ns, end_ns)
        if gap < -CLOCK_JUMP_NS:
            jumps.append(gap)
            gap, begin_ns = 0, attempt.began_ns
        jumps_before = len(jumps)
        stretches = list(_lay(attempt, begin_ns, loss.of_rows, jumps))
        laid.append([("down", max(0, gap)), *stretches])
        # Steps are timed by another clock, which may be microseconds ahead.
        length = sum(length for _, length in stretches)
        end_ns = begin_ns + length if len(jumps) == jumps_before else max(attempt.ended_ns, begin_ns)
    total = _summed(stretch for stretches in laid for stretch in stretches)
    wall_ns = sum(total.values())
    lost = [sum(loss.of_rows) for loss in losses if loss.of_rows is not None]
    return JobLife(
        wall_ns=wall_ns,
        productive_time_ratio=_ratio(total["productive"], wall_ns),
        ettr=_ratio(wall_ns - sum(total[heading] for heading in WITHOUT_PROGRESS), wall_ns),
        lost_steps=sum(lost) if lost else None,
        lost_is_partial=not all(loss.is_exact for loss in losses),
        headings_ns=total,
        google_ns={name: sum(total[heading] for heading in names) for name, names in GOOGLE_NAMES.items()},
        attempts=tuple(map(_attempt_charge, attempts, losses, laid)),
        intervals=tuple(_cut((one for stretches in laid for one in stretches), wall_ns, intervals)),
        jumps_ns=tuple(jumps),
    )


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _summed(stretches: Iterable[Stretch]) -> dict[str, int]:
    total = dict.fromkeys(LIFE_HEADINGS, 0)
    for heading, length in stretches:
        total[heading] += length
    return total


class _Loss(NamedTuple):
    """The lost steps of each row of an attempt; None: unknown.  If not exact, there may be more."""

    of_rows: list[int] | None
    is_exact: bool


def _losses(attempts: Sequence[Attempt]) -> list[_Loss]:
    """Return what each attempt lost; see the rule in the module's docstring."""
    found: list[_Loss] = []
    floor: int | None = None
    is_followed = False
    has_checkpoints = any(attempt.saved_steps is not None for attempt in attempts)
    for attempt in reversed(attempts):
        rows = attempt.rows
        if not rows:
            found.append(_Loss([], True))
            continue
        numbers = _numbers(rows)
        own = numbers or list(accumulate(row.steps for row in rows))
        first = own[0] - rows[0].steps
        limit, is_exact = None, True
        if is_followed:
            limit = floor if numbers is not None else None
            is_exact = limit is not None
            if limit is None and attempt.saved_steps is not None:
                limit = first + attempt.saved_steps
        elif attempt.is_failed:
            limit = first + (attempt.saved_steps or 0) if has_checkpoints else None
            is_exact = has_checkpoints
        of_rows = _lost_of(rows, own, limit)
        found.append(_Loss(of_rows if limit is not None or is_exact else None, is_exact))
        if numbers is not None:
            lowest = min(number - row.steps for number, row in zip(numbers, rows, strict=True))
            floor = lowest if floor is None else min(floor, lowest)
        is_followed = True
    return found[::-1]


def _numbers(rows: Sequence[StepRow]) -> list[int] | None:
    """Return the number after each row; rows before the first known one are counted back from it."""
    numbers: list[int] = []
    following: StepRow | None = None
    for row in reversed(rows):
        if row.number is not None:
            numbers.append(row.number)
        elif following is None:
            return None
        else:
            numbers.append(numbers[-1] - following.steps)
        following = row
    return numbers[::-1] or None


def _lost_of(rows: Sequence[StepRow], numbers: Sequence[int], limit: int | None) -> list[int]:
    """Return the lost steps of each row, if steps above `limit` are; a step that goes back within the rows counts."""
    lost = []
    for row, number in zip(reversed(rows), reversed(numbers), strict=True):
        lost.append(0 if limit is None else min(row.steps, max(0, number - limit)))
        limit = number - row.steps if limit is None else min(limit, number - row.steps)
    return lost[::-1]


def _lay(attempt: Attempt, now: int, lost: list[int] | None, jumps: list[int]) -> Iterator[Stretch]:
    """Yield the stretches of one attempt from `now` on; clocks that were set are added to `jumps`."""
    begin_ns = now
    for place, row in enumerate(attempt.rows):
        before = row.ended_ns - row.wall_ns - now
        # A start-up may take hours, and so may what follows the last step: there only a clock that goes back shows.
        if before < -CLOCK_JUMP_NS or (place and before > CLOCK_JUMP_NS):
            jumps.append(before)
            before, now = 0, row.ended_ns - row.wall_ns
        before = max(0, before)  # a clock that is slewed: the next row makes up for it
        if place == 0:
            yield from _start_up(attempt, begin_ns, before)
        else:
            yield "unrecorded", before
        yield from _charged(row, 0 if lost is None else lost[place], is_first=place == 0 and row.steps == 1)
        now += before + row.wall_ns
    rest = attempt.ended_ns - now
    if attempt.rows and rest < -CLOCK_JUMP_NS:
        jumps.append(rest)
    elif not attempt.rows:
        yield from _start_up(attempt, begin_ns, max(0, rest))
    else:
        yield "hang" if attempt.hangs else "unrecorded", max(0, rest)


def _start_up(attempt: Attempt, begin_ns: int, length: int) -> Iterator[Stretch]:
    met_ns = None if attempt.rendezvous_ns is None else attempt.rendezvous_ns - begin_ns
    if met_ns is None or not 0 <= met_ns <= length:
        yield "start_up", length
        return
    yield "start_up_rendezvous", met_ns
    yield "start_up_preparation", length - met_ns


def _charged(row: StepRow, lost: int, *, is_first: bool) -> Iterator[Stretch]:
    """Yield what a row is charged to; its lost steps are its last ones."""
    lost_ns = row.wall_ns * lost // row.steps if row.steps and not is_first else 0
    left = row.wall_ns - lost_ns
    for heading in IN_STEPS:
        part = row.parts.get(heading, 0)
        part = min(left, max(0, part) * (row.wall_ns - lost_ns) // row.wall_ns if row.wall_ns else 0)
        if is_first and heading not in IN_FIRST_STEP:
            continue
        left -= part
        yield IN_FIRST_STEP[heading] if is_first else heading, part
    yield "start_up_first_step" if is_first else "productive", left
    yield "lost_steps", lost_ns


def _attempt_charge(attempt: Attempt, loss: _Loss, stretches: Sequence[Stretch]) -> AttemptCharge:
    rows, lost = attempt.rows, loss.of_rows
    numbers = _numbers(rows)
    headings = _summed(stretches)
    return AttemptCharge(
        number=attempt.number,
        began_wall_ns=attempt.began_ns,
        wall_ns=sum(headings.values()),
        steps=sum(row.steps for row in rows),
        first_step=None if numbers is None else numbers[0] - rows[0].steps + 1,
        last_step=None if numbers is None else numbers[-1],
        lost_steps=None if lost is None else sum(lost),
        is_failed=attempt.is_failed,
        headings_ns={heading: length for heading, length in headings.items() if length},
    )


def _cut(stretches: Iterator[Stretch], wall_ns: int, count: int) -> Iterator[LifeInterval]:
    """Yield `count` equal intervals of the life; a stretch that lies in two is cut."""
    width = -(-wall_ns // count)
    if width == 0:
        return
    at, inside, headings = 0, 0, dict.fromkeys(LIFE_HEADINGS, 0)
    for heading, length in stretches:
        left = length
        while left:
            part = min(left, width - inside)
            headings[heading] += part
            inside, left = inside + part, left - part
            if inside == width:
                yield _interval(at, headings)
                at, inside, headings = at + width, 0, dict.fromkeys(LIFE_HEADINGS, 0)
    if inside:
        yield _interval(at, headings)


def _interval(at: int, headings: dict[str, int]) -> LifeInterval:
    wall_ns = sum(headings.values())
    return LifeInterval(
        at_ns=at,
        wall_ns=wall_ns,
        productive_time_ratio=_ratio(headings["productive"], wall_ns),
        headings_ns={heading: length for heading, length in headings.items() if length},
    )
