"""Holds the words of the analysis that a terminal and a page share: of clocks, of idle gaps, and of the verdict.

Both show the work of one rank only, and of the same one (`shown_rank`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, unit_for

from ..all_ranks.verdict_report import CAUSE_WORDS
from ..report import LateTraceRank, TraceJob, TraceReport

__all__ = [
    "CLOCK_WORDS", "GAP_WORDS", "cause_words", "module_tail", "nobody_words", "pace_of", "path_words",
    "place_words", "saved_words", "shown_rank", "untold_words", "who_words",
]  # fmt: skip

CLOCK_WORDS = {
    "same_host": "one host, one clock",
    "collectives": "laid together by the collectives",
    "wall_clock": "by the hosts' own clocks",
    "none": "not laid together",
}

GAP_WORDS = {
    "launch_late": "host launched late",
    "launch_latency": "launched in time, began late",
    "sync": "host waited for the device",
    "unknown": "cannot be told",
}

RANKS_NAMED_MAX = 4


def cause_words(cause: str) -> str:
    """Return what somebody holds the job up in."""
    return CAUSE_WORDS.get(cause, clean(cause))


def path_words(cause: str) -> str:
    """Return what a part of the critical path is spent in: time on the wire is no fault of a link."""
    return "on the wire" if cause == "link" else cause_words(cause)


def module_tail(module: str | None) -> str | None:
    """Return the last two modules of a path, which tell most in little room."""
    return None if module is None else "/".join(module.split("/")[-2:])


def place_words(module: str | None, source: str | None) -> str:
    """Return where something was called: the innermost modules, and the python line without its file's folders."""
    parts = (module_tail(module), None if source is None else source.rpartition("/")[2])
    return ", ".join(part for part in parts if part)


def who_words(one: LateTraceRank) -> str:
    """Return "rank 3", or the first of several ranks."""
    if one.kind == "rank" or len(one.ranks) < 2:
        return f"rank {one.rank}"
    shown = ", ".join(map(str, one.ranks[:RANKS_NAMED_MAX]))
    return f"ranks {shown}{', ...' if len(one.ranks) > RANKS_NAMED_MAX else ''}"


def untold_words(job: TraceJob) -> str | None:
    """Return why nobody could be named; None where that nobody is named is an answer."""
    codes = {warning.code: warning.message for warning in job.warnings}
    if "replay_not_trusted" in codes:
        return f"work began for no known reason in {percent(job.unexplained_ratio)} of a rank's time"
    return codes.get("too_few_steps", codes.get("nobody_unproven"))


def nobody_words(job: TraceJob) -> str:
    """Return that nobody is named, and whether that is an answer."""
    return "Nobody holds the job up" if untold_words(job) is None else "Who holds the job up cannot be told"


def pace_of(job: TraceJob) -> float | None:
    """Return how long a step of the job takes, or its window where no steps are marked; None where nothing says so."""
    return next((one.step_ns + one.saved_ns for one in job.what_if), job.wall_ns)


def saved_words(one: LateTraceRank, job: TraceJob) -> str:
    """Return what mending it would save, of what, and how far that may be off."""
    pace = pace_of(job)
    unit = unit_for([one.saved_ns])
    of = "" if not pace else f" of {duration(pace)} {'a step' if one.since_step is not None else 'in all'}"
    share = "" if not pace else f" ({percent(one.saved_ns / pace)})"
    return f"{unit.text(one.saved_ns)}{of}{share}, with an error of {unit.text(one.error_ns)}"


def shown_rank(reports: Sequence[TraceReport], job: TraceJob) -> tuple[TraceReport, str]:
    """Return the rank whose work is shown, and why it is that one: who is named, else who has most of the path."""
    named = job.stragglers[0].ranks if job.stragglers else []
    found = next((report for report in reports if report.rank in named), None)
    if found is not None:
        return found, "the first that holds the job up"
    sums = dict.fromkeys(job.ranks, 0)
    for part in job.critical_path:
        sums[part.rank] += part.duration_ns
    rank = max(sums, key=lambda each: (sums[each], -each)) if job.critical_path else None
    found = next((report for report in reports if report.rank == rank), None)
    return (
        (reports[0], "the first") if rank is None or found is None else (found, "which has most of the critical path")
    )
