"""Defines the tables of all ranks together: verdict, critical path, ranks, collectives, clocks, incidents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pacecar.analysis.document.report import CriticalPart, TraceJob, TraceReport
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import DASH, duration, unit_for
from pacecar.formatting.tables import Table, TableColumn
from pacecar.records import LEDGER_HEADINGS

from ..words import CLOCK_WORDS, cause_words, path_words, who_words
from .trace_tables import cut_words

__all__ = [
    "clock_pairs_table", "clocks_table", "critical_table", "incidents_table", "instances_table", "ranks_table",
    "stragglers_table"
]  # fmt: skip

FINE_UNITS_MAX = 1000
"""From this many units on, one digit after the point is enough: eight columns of times share a line."""


def stragglers_table(job: TraceJob) -> Table | None:
    """Return who holds the job up, the most harmful first."""
    found = job.stragglers
    if not found:
        return None
    is_stepped = any(one.since_step is not None for one in found)
    unit = unit_for([one.saved_ns for one in found])
    columns = [
        TableColumn.text("who", [who_words(one) for one in found]),
        TableColumn.text("kind", [one.kind for one in found], "wide"),
        TableColumn.text("cause", [cause_words(one.cause) for one in found]),
        TableColumn.time("excess", unit, [one.excess_ns for one in found]),
        TableColumn.time("saved without", unit, [one.saved_ns for one in found]),
        TableColumn.time("error", unit, [one.error_ns for one in found]),
        TableColumn.number("since step", [one.since_step for one in found]),
        TableColumn.text("evidence", [one.evidence for one in found], "page", is_long=True),
    ]
    note = (
        f"Times are of {'a step' if is_stepped else 'the whole window'}. Saved: how much shorter it would be,"
        " by replay, if they were as their peers."
    )
    return Table(f"Who holds the job up, and by what{', for one step' if is_stepped else ''}", columns, note=note)


def critical_table(job: TraceJob, most: int) -> Table | None:
    """Return the critical path by rank and cause; the parts add up to the wall time."""
    if not job.wall_ns or len(job.ranks) < 2 or not job.critical_path:
        return None
    wall = job.wall_ns
    sums: dict[tuple[int, str], list[CriticalPart]] = {}
    for part in job.critical_path:
        sums.setdefault((part.rank, part.cause), []).append(part)
    found = [(rank, cause, sum(part.duration_ns for part in parts)) for (rank, cause), parts in sums.items()]
    rows = sorted(found, key=lambda row: -row[2])[:most]
    longest = [max(sums[rank, cause], key=lambda part: part.duration_ns) for rank, cause, _ in rows]
    columns = [
        TableColumn.number("rank", [rank for rank, _, _ in rows]),
        TableColumn.text("cause", [path_words(cause) for _, cause, _ in rows]),
        TableColumn.time("time", unit_for([rows[0][2]]), [total for _, _, total in rows]),
        TableColumn.ratio("share", [total / wall for _, _, total in rows]),
        TableColumn.text(
            "most of it in", [part.module or part.collective or part.family or "" for part in longest], is_long=True
        ),
    ]
    note = f"The parts add up to the job's wall time, {duration(wall)}, exactly. A large share is not blame."
    cut = cut_words(len(rows), len(found), "longest")
    return Table("Critical path", columns, note=note, cut=cut, about=duration(wall))


def ranks_table(shown: Sequence[TraceReport], found: int, job: TraceJob | None) -> Table | None:
    """Return a row for each of the ranks `shown`: its ledger, its waiting, and how long the others waited for it."""
    if not shown:
        return None
    by_rank = {share.rank: share for share in job.shares} if job is not None else {}
    shares = [by_rank.get(report.rank) if report.rank is not None else None for report in shown]
    longest = max(report.span_ns for report in shown)
    unit = unit_for([longest])
    if longest >= FINE_UNITS_MAX * unit.ns:
        unit = unit._replace(digits=1)
    walls = [[step.ledger.wall_ns for step in report.steps] for report in shown]
    columns = [
        _name_column(shown),
        TableColumn.time("mean step", unit, [sum(each) / len(each) if each else None for each in walls], "wide"),
        TableColumn.time("span", unit, [report.span_ns for report in shown]),
        TableColumn.time("compute", unit, [report.compute_ns for report in shown]),
        TableColumn.time(
            "exposed communication", unit, [report.exposed_communication_ns for report in shown], short="exposed"
        ),
        *(
            TableColumn.time(HEADING_WORDS[name], unit, [report.ledger.parts().get(name) for report in shown], "wide")
            for name in LEDGER_HEADINGS
            if name not in {"compute", "exposed_communication"}
            and any(report.ledger.parts().get(name) for report in shown)
        ),
        TableColumn.time("overlapped", unit, [report.overlapped_communication_ns for report in shown], "wide"),
        TableColumn.time("wait", unit, [None if share is None else share.wait_ns for share in shares]),
        TableColumn.time("wire", unit, [None if share is None else share.wire_ns for share in shares]),
        TableColumn.time("device idle", unit, [report.idle_ns for report in shown], short="idle"),
        TableColumn.time("arrived last", unit, [None if share is None else share.caused_wait_ns for share in shares]),
    ]
    caption = "Wait and wire are of all communication. Arrived last: how long others waited for this rank; not blame."
    cut = "" if len(shown) == found else f"{len(shown)} of {found}"
    note = "The headings add up to the span."
    return Table("Ranks", columns, caption=caption, note=note, cut=cut, unit=unit)


def _name_column(shown: Sequence[TraceReport]) -> TableColumn:
    if all(report.rank is not None for report in shown):
        return TableColumn.number("rank", [report.rank for report in shown])
    return TableColumn.text("trace", [Path(report.file).name for report in shown])


def instances_table(job: TraceJob, most: int) -> Table | None:
    """Return the collectives with the largest skew, one by one, in order of time."""
    if not job.instances:
        return None
    begun = [(min((each.start_ns for each in one.arrivals), default=0), one) for one in job.instances]
    first = min(begin for begin, _ in begun)
    begun = sorted(sorted(begun, key=lambda row: -row[1].skew_ns)[:most], key=lambda row: row[0])
    rows = [one for _, one in begun]
    axis = unit_for([begin - first for begin, _ in begun])
    ranks = [f"{one.ranks} of {one.ranks + one.ranks_missing}" if one.ranks_missing else str(one.ranks) for one in rows]
    columns = [
        TableColumn.text("operation", [one.operation for one in rows]),
        TableColumn.text("group", [one.group for one in rows], "wide"),
        TableColumn.count("#", [one.index for one in rows]),
        TableColumn.time("began", axis, [begin - first for begin, _ in begun], "wide"),
        TableColumn.size("size", [one.bytes for one in rows]),
        TableColumn("ranks", [(text, one.ranks) for text, one in zip(ranks, rows, strict=True)]),
        TableColumn.number("last rank", [one.late_rank for one in rows]),
        TableColumn.time("skew", unit_for([one.skew_ns for one in rows]), [one.skew_ns for one in rows]),
        TableColumn.time("wire", unit_for([one.wire_ns for one in rows]), [one.wire_ns for one in rows]),
        TableColumn.bandwidth("bus bw", [one.bus_bandwidth for one in rows]),
    ]
    return Table("Collectives, one by one", columns, cut=cut_words(len(rows), len(job.instances), "most skewed"))


def clocks_table(job: TraceJob, most: int) -> Table | None:
    """Return how each rank's clock was aligned with the common one, and the error."""
    rows = job.clocks[:most]
    if not rows:
        return None
    columns = [
        TableColumn.number("rank", [clock.rank for clock in rows]),
        TableColumn.text("host", [clock.host for clock in rows]),
        TableColumn.text("how", [CLOCK_WORDS.get(clock.method, clock.method) for clock in rows]),
        TableColumn.number("moved by", [clock.offset_ns for clock in rows], duration),
        TableColumn.number("standard error", [clock.standard_error_ns for clock in rows], duration),
        TableColumn.number("doubt left", [clock.residual_ns for clock in rows], duration),
        TableColumn.number("drift", [clock.drift_ratio for clock in rows], lambda ratio: f"{ratio * 1e6:+.2f} ppm"),
    ]
    note = "The axis is the first rank's clock. A dash: nothing ties the clock to it; lateness cannot be told."
    return Table("Clocks", columns, note=note, cut=cut_words(len(rows), len(job.clocks), "first"))


def clock_pairs_table(job: TraceJob, most: int) -> Table | None:
    """Return the pairs of clocks whose difference is unknown."""
    rows = job.clock_pairs_untold[:most]
    if not rows:
        return None
    hosts = [" and ".join(host for host in pair.hosts if host) for pair in rows]
    columns = [
        TableColumn.text("ranks", [" and ".join(f"rank {rank}" for rank in pair.ranks) for pair in rows]),
        TableColumn.text("hosts", [names or DASH for names in hosts]),
        TableColumn.number("standard error", [pair.standard_error_ns for pair in rows], duration),
    ]
    cut = cut_words(len(rows), len(job.clock_pairs_untold), "first")
    return Table("Clocks that cannot be compared", columns, note="A dash: nothing connects the two.", cut=cut)


def incidents_table(job: TraceJob, most: int) -> Table | None:
    """Return single steps in which one rank took much longer."""
    rows = sorted(job.incidents, key=lambda one: -one.excess_ns)[:most]
    if not rows:
        return None
    columns = [
        TableColumn.number("rank", [one.rank for one in rows]),
        TableColumn.number("step", [one.step for one in rows]),
        TableColumn.text("cause", [cause_words(one.cause) for one in rows]),
        TableColumn.time("longer than its peers by", unit_for([rows[0].excess_ns]), [one.excess_ns for one in rows]),
    ]
    note = "Each happened once, so no rank is blamed."
    return Table("Incidents", columns, note=note, cut=cut_words(len(rows), len(job.incidents), "longest"))
