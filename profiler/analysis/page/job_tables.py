"""Makes the tables of the page about all ranks together: verdict, critical path, ranks, clocks, incidents.

The words are those of the terminal's tables (`output.words`); a page has room for more.  A missing number is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.page.table import Cell, Table, sortable_table
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, bandwidth, duration, size_text, unit_for
from pacecar.records import LEDGER_HEADINGS

from ..output.words import CLOCK_WORDS, cause_words, path_words, who_words
from ..report import CriticalPart, TraceJob, TraceReport
from .trace_tables import ROWS_MAX, count_cell, cut_note, share_cell, time_cell, word_cell

__all__ = [
    "clock_pairs_table", "clocks_table", "critical_table", "incidents_table", "instances_table", "ranks_table",
    "stragglers_table",
]  # fmt: skip


def stragglers_table(job: TraceJob) -> Table | None:
    """Return who holds the job up, the most harmful first."""
    unit = unit_for([one.saved_ns for one in job.stragglers])
    rows = [
        (
            (who_words(one), one.rank),
            (f"{cause_words(one.cause)}{'' if one.kind == 'rank' else f' ({one.kind})'}", None),
            time_cell(unit, one.excess_ns),
            time_cell(unit, one.saved_ns),
            time_cell(unit, one.error_ns),
            (DASH, None) if one.since_step is None else (str(one.since_step), one.since_step),
            word_cell(one.evidence),
        )
        for one in job.stragglers
    ]
    head = ("who", "in", "excess", "saved without", "error", "since step", "evidence")
    per = "a step" if any(one.since_step is not None for one in job.stragglers) else "the whole window"
    note = f"Times are of {per}. Saved: how much shorter it were if they were as their peers, by replay."
    return sortable_table("Who holds the job up", head, rows, texts=2, note=note, long=6)


def critical_table(job: TraceJob) -> Table | None:
    """Return the critical path by rank and cause; the parts add up to the wall time."""
    sums: dict[tuple[int, str], list[CriticalPart]] = {}
    for part in job.critical_path:
        sums.setdefault((part.rank, part.cause), []).append(part)
    order = sorted(sums.items(), key=lambda item: -sum(part.duration_ns for part in item[1]))
    unit = unit_for([job.wall_ns])
    rows = []
    for (rank, cause), parts in order[:ROWS_MAX]:
        total = sum(part.duration_ns for part in parts)
        longest = max(parts, key=lambda part: part.duration_ns)
        where = longest.module or longest.collective or longest.family
        rows.append(
            (
                (f"rank {rank}", rank), (path_words(cause), None), time_cell(unit, total),
                share_cell(total, job.wall_ns), word_cell(where),
            )
        )  # fmt: skip
    note = f"The parts add up to the job's wall time, {duration(job.wall_ns)}, exactly. A large share is no blame."
    note = f"{note} {cut_note(len(rows), len(order))}".strip()
    head = ("rank", "cause", "time", "share", "most of it in")
    return sortable_table("Critical path", head, rows, texts=2, note=note, long=4)


def ranks_table(reports: Sequence[TraceReport], job: TraceJob | None) -> Table | None:
    """Return a row for each rank: its ledger, its waiting, and what others waited for it."""
    shares = {share.rank: share for share in job.shares} if job is not None else {}
    used = [name for name in LEDGER_HEADINGS if any(report.ledger.parts().get(name) for report in reports)]
    unit = unit_for([report.span_ns for report in reports])
    rows: list[list[Cell]] = []
    for report in reports[:ROWS_MAX]:
        share = shares.get(report.rank) if report.rank is not None else None
        name = f"rank {report.rank}" if report.rank is not None else clean(report.file)
        walls = [step.ledger.wall_ns for step in report.steps]
        mine: list[float | None] = [sum(walls) / len(walls) if walls else None, report.span_ns]
        mine += [report.ledger.parts().get(name) for name in used]
        mine += [report.idle_ns, report.overlapped_communication_ns]
        mine += [share.wait_ns, share.wire_ns, share.caused_wait_ns] if share is not None else [None] * 3
        rows.append([(name, report.rank), *(time_cell(unit, value) for value in mine)])
    head = (
        "rank", "mean step", "span", *(HEADING_WORDS[name] for name in used), "device idle", "communication hidden",
        "waited", "on the wire", "others waited for it",
    )  # fmt: skip
    note = "The headings add up to the span. Waited and on the wire are of all communication, hidden or not."
    return sortable_table("Ranks", head, rows, note=f"{note} {cut_note(len(rows), len(reports))}".strip())


def instances_table(job: TraceJob) -> Table | None:
    """Return the collectives one by one, those with the largest skew."""
    shown = sorted(job.instances, key=lambda one: -one.skew_ns)[:ROWS_MAX]
    skew, wire = unit_for([one.skew_ns for one in shown]), unit_for([one.wire_ns for one in shown])
    begins = [min((each.start_ns for each in one.arrivals), default=0) for one in shown]
    first = min(begins, default=0)
    axis = unit_for([begin - first for begin in begins])
    rows = [
        (
            word_cell(one.operation),
            word_cell(one.group),
            count_cell(one.index),
            time_cell(axis, begin - first),
            (size_text(one.bytes), one.bytes),
            (f"{one.ranks} of {one.ranks + one.ranks_missing}" if one.ranks_missing else str(one.ranks), one.ranks),
            (f"rank {one.late_rank}", one.late_rank),
            time_cell(skew, one.skew_ns),
            time_cell(wire, one.wire_ns),
            (bandwidth(one.bus_bandwidth), one.bus_bandwidth),
        )
        for one, begin in zip(shown, begins, strict=True)
    ]
    head = ("operation", "group", "number", "began", "size", "ranks", "last came", "skew", "wire", "bus bandwidth")
    note = cut_note(len(shown), len(job.instances)).replace("largest", "most skewed")
    return sortable_table("Collectives, one by one", head, rows, texts=2, note=note)


def clocks_table(job: TraceJob) -> Table | None:
    """Return how each rank's clock was laid on the common one, and with what error."""
    rows = [
        (
            (f"rank {clock.rank}", clock.rank),
            word_cell(clock.host),
            (CLOCK_WORDS.get(clock.method, clean(clock.method)), None),
            (duration(clock.offset_ns), clock.offset_ns),
            (duration(clock.standard_error_ns), clock.standard_error_ns),
            (duration(clock.residual_ns), clock.residual_ns),
            (DASH, None) if clock.drift_ratio is None else (f"{clock.drift_ratio * 1e6:+.2f} ppm", clock.drift_ratio),
        )
        for clock in job.clocks[:ROWS_MAX]
    ]
    head = ("rank", "host", "how", "moved by", "standard error", "doubt left", "drift")
    note = "The axis is the first rank's clock. A dash: nothing ties the clock to it; lateness cannot be told."
    note = f"{note} {cut_note(len(rows), len(job.clocks))}".strip()
    return sortable_table("Clocks", head, rows, texts=3, note=note)


def clock_pairs_table(job: TraceJob) -> Table | None:
    """Return the pairs of clocks whose difference cannot be told."""
    rows = [
        (
            (" and ".join(f"rank {rank}" for rank in pair.ranks), None),
            word_cell(" and ".join(clean(host) for host in pair.hosts if host)),
            (duration(pair.standard_error_ns), pair.standard_error_ns),
        )
        for pair in job.clock_pairs_untold[:ROWS_MAX]
    ]
    note = f"A dash: nothing connects the two. {cut_note(len(rows), len(job.clock_pairs_untold))}".strip()
    return sortable_table(
        "Clocks that cannot be compared", ("ranks", "hosts", "standard error"), rows, texts=2, note=note
    )


def incidents_table(job: TraceJob) -> Table | None:
    """Return single steps in which one rank took much longer."""
    found = sorted(job.incidents, key=lambda one: -one.excess_ns)
    unit = unit_for([one.excess_ns for one in found])
    rows = [
        (
            (f"rank {one.rank}", one.rank),
            (DASH, None) if one.step is None else (str(one.step), one.step),
            (cause_words(one.cause), None),
            time_cell(unit, one.excess_ns),
        )
        for one in found[:ROWS_MAX]
    ]
    note = f"Each happened once, so it names nobody. {cut_note(len(rows), len(found))}".strip()
    return sortable_table("Incidents", ("rank", "step", "cause", "longer than its peers by"), rows, note=note)
