"""Says when a run stood still, for how long and on which rank, in a sentence or two for the top of its report.

A run of two hours of which one rank was stopped for twenty minutes looks like a slow run in every mean below.  Two
kinds of records show it: a rank's own record that its process did not run (`ProcessStop`), and the suspicions of ranks
that ended no step (`HangSuspicion`).  While one rank is stopped all others report that they wait.  So a rank that was
stopped is named before one that was silent, and one that was silent in a phase of its own before one that waited for
others.

Pure: a document in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacecar.formatting.dates import second_text
from pacecar.formatting.quantities import percent, plural

from ..document import Report, ReportHang, Stopped
from ..formatting import elapsed

__all__ = ["CAUSE_WORDS", "HUNG_NS_MIN", "hang_sentences", "phase_words", "ranks_word"]

HUNG_NS_MIN = 1_000_000_000
"""Shorter stops are in the ledger; they are not called a hang."""

NAMED_MAX = 3
"""Hangs that are described, the longest; of the others only the number is given."""

SHORT_STOPS_RATIO_MIN = 0.01
"""Share of the run that shorter stops take together before the top of the report says so."""

RANKS_MAX = 8

WAITING = "tail"
"""The phase in which a rank waits for others."""

CAUSE_WORDS = {
    None: "stopped",
    "throttled": "held back by its CPU quota",
    "frozen": "frozen with its control group",
    "preempted": "kept off the processors by others",
    "traced": "stopped by a debugger",
}


PHASE_WORDS = {"data_wait": "data wait", "outside": "the loop's own code"}
"""Phases whose name in the records is no word; "outside" is between all that pacecar knows of a step."""


class _Standstill(NamedTuple):
    lasted_ns: int
    text: str


def hang_sentences(report: Report) -> list[str]:
    """Return the sentences about the run's standstills, long ones and many short ones; none where there was none."""
    return [*_long_ones(report), *_short_stops(report)]


def _short_stops(report: Report) -> list[str]:
    """Return what a rank's stops that are no hangs add up to: a CPU quota holds a job back a little in every step."""
    sums: dict[tuple[int, str | None], list[int]] = {}
    for stop in report.stops:
        if stop.stopped_ns < HUNG_NS_MIN:
            sums.setdefault((stop.rank, stop.cause), []).append(stop.stopped_ns)
    if not sums or not report.duration_ns:
        return []
    (rank, cause), lasted = max(sums.items(), key=lambda one: sum(one[1]))
    ratio = sum(lasted) / report.duration_ns
    if ratio < SHORT_STOPS_RATIO_MIN:
        return []
    what = f"{CAUSE_WORDS[cause]} for {elapsed(sum(lasted))} in all, {percent(ratio)} of the run"
    return [f"Rank {rank} was {what}, in {plural(len(lasted), 'stop')} of less than a second."]


def _long_ones(report: Report) -> list[str]:
    stops = [stop for stop in report.stops if stop.stopped_ns >= HUNG_NS_MIN]
    found = [_of_stops(group, report) for group in _together(stops)]
    steps: dict[tuple[int, int], list[ReportHang]] = {}
    for hang in report.hangs:
        if not any(_explains(stop, hang) for stop in stops):
            steps.setdefault((hang.life, hang.step), []).append(hang)
    found += [_of_hangs(hangs, report) for hangs in steps.values()]
    if not found:
        return []
    found.sort(key=lambda one: -one.lasted_ns)
    total = elapsed(sum(one.lasted_ns for one in found))
    if len(found) == 1:
        return [f"The run hung for {total}: {found[0].text}."]
    named = "; ".join(f"{one.text} ({elapsed(one.lasted_ns)})" for one in found[:NAMED_MAX])
    longest = "" if len(found) <= NAMED_MAX else "; the longest"
    return [f"The run hung {len(found)} times, for {total}{longest}: {named}."]


def phase_words(phase: str) -> str:
    """Return a phase of a step for people."""
    return PHASE_WORDS.get(phase, phase)


def ranks_word(ranks: Iterable[int], of: int | None = None) -> str:
    """Return "rank 1", "ranks 0, 2", or "all 8 ranks"."""
    numbers = sorted(set(ranks))
    if of is not None and len(numbers) == of > 1:
        return f"all {of} ranks"
    shown = ", ".join(map(str, numbers[:RANKS_MAX])) + (" ..." if len(numbers) > RANKS_MAX else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _explains(stop: Stopped, hang: ReportHang) -> bool:
    """Return whether a rank may have ended no step because another one was stopped, in that step or the one before."""
    began = max(stop.wall_ns, hang.wall_ns)
    ended = min(stop.wall_ns + stop.stopped_ns, hang.wall_ns + hang.silent_ns)
    is_near = stop.life == hang.life and abs(stop.step - hang.step) <= 1
    return is_near and 2 * (ended - began) >= min(stop.stopped_ns, hang.silent_ns)


def _together(stops: Sequence[Stopped]) -> list[list[Stopped]]:
    """Group stops that overlap in time: all ranks of a job may be stopped at once."""
    groups: list[list[Stopped]] = []
    until_ns = 0
    for stop in sorted(stops, key=lambda one: one.wall_ns):
        if groups and stop.wall_ns < until_ns:
            groups[-1].append(stop)
        else:
            groups.append([stop])
            until_ns = 0
        until_ns = max(until_ns, stop.wall_ns + stop.stopped_ns)
    return groups


def _of_stops(group: Sequence[Stopped], report: Report) -> _Standstill:
    longest = max(group, key=lambda one: one.stopped_ns)
    began, ended = min(s.wall_ns for s in group), max(s.wall_ns + s.stopped_ns for s in group)
    ranks = {stop.rank for stop in group}
    was = "was" if len(ranks) == 1 else "were"
    who = ranks_word(ranks, report.world_size)
    where = f"in step {longest.step} ({phase_words(longest.phase)})"
    text = f"{who} {was} {CAUSE_WORDS[longest.cause]} from {second_text(began)} on, {where}"
    return _Standstill(ended - began, text)


def _of_hangs(hangs: Sequence[ReportHang], report: Report) -> _Standstill:
    own = [hang for hang in hangs if hang.phase != WAITING] or list(hangs)
    first = min(hangs, key=lambda one: one.wall_ns)
    heard = {hang.rank for hang in hangs}
    gone = [row.rank for row in report.ranks if row.rank not in heard and row.last_words is None]
    where = f"from {second_text(first.wall_ns)} on, in step {first.step}"
    phases = "/".join(sorted({phase_words(hang.phase) for hang in own}))
    if gone and all(hang.phase == WAITING for hang in hangs):
        text = f"{ranks_word(heard)} waited {where}, and {ranks_word(gone)} said no more"
    else:
        text = f"{ranks_word((hang.rank for hang in own), report.world_size)} ended no step {where} ({phases})"
    if not any(hang.is_over for hang in hangs):
        text += ", and was not seen to go on"
    return _Standstill(max(hang.silent_ns for hang in hangs), text)
