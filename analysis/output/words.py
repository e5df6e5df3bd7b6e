"""Holds the words that the terminal and the page share, about clocks, idle gaps and the verdict.

It also chooses the rank whose work both show (`shown_rank`) and, of many ranks, those with a row (`shown_ranks`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pacecar.formatting.ledger_headings import CAUSE_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, unit_for

from ..document.report import LateTraceRank, TraceJob, TraceReport

__all__ = [
    "CLOCK_WORDS",
    "GAP_WORDS",
    "cause_words",
    "module_tail",
    "no_late_rank_words",
    "pace_of",
    "path_sums",
    "path_words",
    "place_words",
    "saved_words",
    "shown_rank",
    "shown_ranks",
    "untold_words",
    "who_words",
]  # fmt: skip

CLOCK_WORDS = {
    "same_host": "one host, one clock",
    "collectives": "aligned by the collectives",
    "wall_clock": "by the hosts' own clocks",
    "none": "not aligned",
}

GAP_WORDS = {
    "launch_late": "host launched late",
    "launch_latency": "launched in time, began late",
    "sync": "host waited for the device",
    "unknown": "cannot be told",
}

RANKS_NAMED_MAX = 4


def cause_words(cause: str) -> str:
    """Return the words for a cause of a late rank."""
    return CAUSE_WORDS.get(cause, clean(cause))


def path_words(cause: str) -> str:
    """Return the words for a cause on the critical path, where time on the wire is not the fault of a link."""
    return "on the wire" if cause == "link" else cause_words(cause)


def module_tail(module: str | None) -> str | None:
    """Return the last two modules of a path: the most telling part."""
    return None if module is None else "/".join(module.split("/")[-2:])


def place_words(module: str | None, source: str | None) -> str:
    """Return the place of a call: the innermost modules, and the python line without its file's folders."""
    parts = (module_tail(module), None if source is None else source.rpartition("/")[2])
    return ", ".join(part for part in parts if part)


def who_words(one: LateTraceRank) -> str:
    """Return "rank 3", or the first of several ranks."""
    if one.kind == "rank" or len(one.ranks) < 2:
        return f"rank {one.rank}"
    shown = ", ".join(map(str, one.ranks[:RANKS_NAMED_MAX]))
    return f"ranks {shown}{', ...' if len(one.ranks) > RANKS_NAMED_MAX else ''}"


def untold_words(job: TraceJob) -> str | None:
    """Return why no rank could be named; None if "no late rank" is a sound answer."""
    codes = {warning.code: warning.message for warning in job.warnings}
    if "replay_not_trusted" in codes:
        return f"work began for no known reason in {percent(job.unexplained_ratio)} of a rank's time"
    return codes.get("too_few_steps", codes.get("nobody_unproven"))


def no_late_rank_words(job: TraceJob) -> str:
    """Return the words for a verdict without a late rank: none exists, or unknown."""
    return "No rank holds the job up" if untold_words(job) is None else "Who holds the job up cannot be told"


def pace_of(job: TraceJob) -> float | None:
    """Return how long a step of the job takes, or its window if no steps are marked; None if unknown."""
    return next((one.step_ns + one.saved_ns for one in job.what_if), job.wall_ns)


def saved_words(one: LateTraceRank, job: TraceJob) -> str:
    """Return what fixing it would save, of what, and the error of that."""
    pace = pace_of(job)
    unit = unit_for([one.saved_ns])
    of = "" if not pace else f" of {duration(pace)} {'a step' if one.since_step is not None else 'in all'}"
    share = "" if not pace else f" ({percent(one.saved_ns / pace)})"
    return f"{unit.text(one.saved_ns)}{of}{share}, with an error of {unit.text(one.error_ns)}"


def shown_rank(reports: Sequence[TraceReport], job: TraceJob) -> tuple[TraceReport, str]:
    """Return the rank whose work is shown, and why: a late rank, else the one with most of the critical path."""
    named = job.stragglers[0].ranks if job.stragglers else []
    found = next((report for report in reports if report.rank in named), None)
    if found is not None:
        return found, "the first that holds the job up"
    sums = path_sums(job)
    rank = max(sums, key=lambda each: (sums[each], -each)) if sums else None
    found = next((report for report in reports if report.rank == rank), None)
    return (
        (reports[0], "the first") if rank is None or found is None else (found, "which has most of the critical path")
    )


def path_sums(job: TraceJob) -> dict[int, int]:
    """Return the time of the critical path on each of its ranks."""
    sums: dict[int, int] = {}
    for part in job.critical_path:
        sums[part.rank] = sums.get(part.rank, 0) + part.duration_ns
    return sums


def shown_ranks(
    reports: Sequence[TraceReport], job: TraceJob | None, on_path: Mapping[int, float], most: int
) -> list[TraceReport]:
    """Return at most `most` ranks to show: late ranks, ranks on the critical path, then the first ones.

    Late ranks come first; those with most of the critical path get half of the remaining room.
    """
    by_rank = sorted(reports, key=lambda report: (report.rank is None, report.rank or 0, report.file))
    if len(by_rank) <= most:
        return by_rank
    named = {rank for one in job.stragglers for rank in one.ranks or [one.rank]} if job is not None else set()
    chosen = [report for report in by_rank if report.rank in named][:most]
    longest = [report for report in by_rank if report.rank in on_path and report.rank not in named]
    longest.sort(key=lambda report: -on_path[report.rank or 0])
    chosen += longest[: (most - len(chosen) + 1) // 2]
    kept = {id(report) for report in chosen}
    rest = [report for report in by_rank if id(report) not in kept][: most - len(chosen)]
    kept |= {id(report) for report in rest}
    return [report for report in by_rank if id(report) in kept]
