"""Writes the sentences about hangs at the top of a report: when, for how long, and on which rank.

A two-hour run with one rank stopped for twenty minutes looks merely slow in every mean.  Two kinds of records show it:
a rank's process was stopped (`ProcessStop`), or a rank finished no step (`HangSuspicion`).  While one rank is stopped,
all others report that they wait.  So a stopped rank is named before a silent one, and a rank that was silent in its own
work before one that waited for others.

Pure: a document in, sentences out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pacecar.formatting.dates import second_text
from pacecar.formatting.quantities import percent, plural

from ..document import Report, ReportHang, ReportHangVerdict, Stopped
from ..formatting import elapsed

__all__ = ["HUNG_NS_MIN", "STOP_WORDS", "hang_sentences", "phase_words", "ranks_word"]

HUNG_NS_MIN = 1_000_000_000
"""Shorter stops appear in the ledger only."""

NAMED_MAX = 3
"""The longest hangs are described; the others are only counted."""

SHORT_STOPS_RATIO_MIN = 0.01
"""Shorter stops are mentioned at the top of the report if together they take this share of the run."""

RANKS_MAX = 8

WAITING = "tail"
"""The phase in which a rank waits for others."""

STOP_WORDS = {
    None: "stopped",
    "throttled": "held back by its CPU quota",
    "frozen": "frozen with its control group",
    "preempted": "kept off the processors by others",
    "traced": "stopped by a debugger",
}


PHASE_WORDS = {"data_wait": "data wait", "outside": "the loop's own code"}
"""Words for phases whose name in the records is not readable; "outside" is time outside all known phases."""


class _Hang(NamedTuple):
    lasted_ns: int
    text: str


def hang_sentences(report: Report) -> list[str]:
    """Return the sentences about hangs and about many short stops; empty if there were none."""
    return [*_long_hangs(report), *_short_stops(report)]


def _short_stops(report: Report) -> list[str]:
    """Return the total of a rank's short stops: a CPU quota, for example, delays every step a little."""
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
    what = f"{STOP_WORDS[cause]} for {elapsed(sum(lasted))} in all, {percent(ratio)} of the run"
    return [f"Rank {rank} was {what}, in {plural(len(lasted), 'stop')} of less than a second."]


def _long_hangs(report: Report) -> list[str]:
    stops = [stop for stop in report.stops if stop.stopped_ns >= HUNG_NS_MIN]
    found = [_from_stops(group, report) for group in _together(stops)]
    steps: dict[tuple[int, int], list[ReportHang]] = {}
    verdicts = (one for one in report.hang_verdicts if not any(_meets(stop, one) for stop in stops))
    found += [_from_verdict(one) for one in verdicts]
    judged = {(verdict.life, verdict.step) for verdict in report.hang_verdicts}
    for hang in report.hangs:
        if (hang.life, hang.step) not in judged and not any(_explains(stop, hang) for stop in stops):
            steps.setdefault((hang.life, hang.step), []).append(hang)
    found += [_from_hangs(hangs, report) for hangs in steps.values()]
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
    """Return the words for a phase of a step."""
    return PHASE_WORDS.get(phase, phase)


def ranks_word(ranks: Iterable[int], of: int | None = None) -> str:
    """Return "rank 1", "ranks 0, 2", or "all 8 ranks"."""
    numbers = sorted(set(ranks))
    if of is not None and len(numbers) == of > 1:
        return f"all {of} ranks"
    shown = ", ".join(map(str, numbers[:RANKS_MAX])) + (" ..." if len(numbers) > RANKS_MAX else "")
    return f"rank {shown}" if len(numbers) == 1 else f"ranks {shown}"


def _explains(stop: Stopped, hang: ReportHang) -> bool:
    """Return whether a stop explains another rank's hang: same or adjacent step, and half the time in common."""
    began = max(stop.wall_ns, hang.wall_ns)
    ended = min(stop.wall_ns + stop.stopped_ns, hang.wall_ns + hang.silent_ns)
    is_near = stop.life == hang.life and abs(stop.step - hang.step) <= 1
    return is_near and 2 * (ended - began) >= min(stop.stopped_ns, hang.silent_ns)


def _together(stops: Sequence[Stopped]) -> list[list[Stopped]]:
    """Group stops that overlap in time, as when all ranks of a job are stopped at once."""
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


def _from_stops(group: Sequence[Stopped], report: Report) -> _Hang:
    longest = max(group, key=lambda one: one.stopped_ns)
    began, ended = min(s.wall_ns for s in group), max(s.wall_ns + s.stopped_ns for s in group)
    ranks = {stop.rank for stop in group}
    was = "was" if len(ranks) == 1 else "were"
    who = ranks_word(ranks, report.world_size)
    where = f"in step {longest.step} ({phase_words(longest.phase)})"
    text = f"{who} {was} {STOP_WORDS[longest.cause]} from {second_text(began)} on, {where}"
    return _Hang(ended - began, text)


def _meets(stop: Stopped, verdict: ReportHangVerdict) -> bool:
    """Return whether the rank that was blamed was stopped then, so that the stop says it already."""
    began, ended = verdict.wall_ns, verdict.wall_ns + verdict.waited_ns
    return stop.rank in verdict.culprits and stop.wall_ns < ended and began < stop.wall_ns + stop.stopped_ns


def _from_verdict(verdict: ReportHangVerdict) -> _Hang:
    went_on = "" if verdict.is_over else ", and the job was not seen to go on"
    return _Hang(verdict.waited_ns, f"{verdict.summary}, from {second_text(verdict.wall_ns)} on{went_on}")


def _from_hangs(hangs: Sequence[ReportHang], report: Report) -> _Hang:
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
    return _Hang(max(hang.silent_ns for hang in hangs), text)
