"""Prints the comparison of several ranks for a terminal: who holds the job up, who waits, and what the wire can do.

Each rank's own figures are one line; the rest is what no single trace can show.  A rank that communicates for long
looks slow and is not: it waits for one that came late, so its communication is split into waiting and wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import bandwidth, duration, percent, plural, size_text, unit_for
from pacecar.formatting.tables import rich_table
from pacecar.records import Ledger

from ..report import (
    CollectiveInstance,
    CriticalPart,
    LateTraceRank,
    RankClock,
    RankShare,
    StepIncident,
    TraceJob,
    TraceReport,
)
from .tracetext import BAR_WIDTH_MAX, collectives_table, ladder_table
from .words import CLOCK_WORDS, cause_words, nobody_words, path_words, who_words

__all__ = ["job_text"]

RANKS_MAX = 16
"""The most ranks that have a line; beyond it, those that the others waited for longest."""

CRITICAL_MAX = 8
"""The most parts of the critical path that have a line: the longest."""

INCIDENTS_MAX = 4
"""The most incidents that have a line: the longest."""

INSTANCES_MAX = 12
"""The most collectives that have a line: those with the largest skew."""


def job_text(reports: Sequence[TraceReport], job: TraceJob, console: Console) -> Iterator[RenderableType]:
    """Yield what is to be printed about the ranks together, in order."""
    total = Ledger(wall_ns=0)
    for report in reports:
        total = total + report.ledger
    of = f" of {job.world_size}" if job.world_size is not None and len(job.ranks) <= job.world_size else ""
    yield Text(f"{plural(len(reports), 'trace')}, {len(job.ranks)}{of} ranks", style="bold")
    backends = dict.fromkeys(report.backend for report in reports if report.backend)
    gpus = dict.fromkeys(gpu for report in reports for gpu in report.gpus if gpu)
    yield Text(clean(", ".join((*backends, *gpus))), style="dim", overflow="ellipsis", no_wrap=True)
    yield Text()
    width = min(console.width, BAR_WIDTH_MAX)
    if total.wall_ns > 0:
        yield ledger_bar(total, width, console)
        yield from ledger_legend(total, width, console)
        yield Text()
    yield _ranks(reports, job, console)
    yield from _clocks(job.clocks)
    yield from _verdict(job)
    for part in (
        _critical(job),
        collectives_table(job.collectives, console),
        _instances(job.instances),
        ladder_table(job.what_if),
    ):
        if part is not None:
            yield Text()
            yield part
    if job.what_if_untold:
        yield Text("\n".join(job.what_if_untold), style="dim")


def _ranks(reports: Sequence[TraceReport], job: TraceJob, console: Console) -> Table:
    shares = {share.rank: share for share in job.shares}
    shown = _ranks_shown(reports, shares)
    title = "Ranks" if len(shown) == len(reports) else f"Ranks (the {len(shown)} that the others waited for longest)"
    table = rich_table(title)
    has_ranks = all(report.rank is not None for report in shown)
    table.add_column("rank" if has_ranks else "trace", justify="right" if has_ranks else "left", no_wrap=True)
    for column in ("span", "compute", "exposed", "wait", "wire", "idle", "caused"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    longest = max((report.span_ns for report in shown), default=0)
    unit = unit_for([longest])
    if longest >= 1000 * unit.ns:
        unit = unit._replace(digits=1)
    for report in shown:
        share = shares.get(report.rank) if report.rank is not None else None
        name = str(report.rank) if has_ranks else clean(Path(report.file).name)
        cells = [report.span_ns, report.compute_ns, report.exposed_communication_ns]
        cells += [share.wait_ns, share.wire_ns] if share is not None else []
        texts = [unit.number(value) for value in cells] + ["-"] * (5 - len(cells))
        texts += [unit.number(report.idle_ns)]
        texts += [unit.number(share.caused_wait_ns) if share is not None else "-"]
        width = round(12 * report.span_ns / longest) if longest else 0
        table.add_row(name, *texts, ledger_bar(report.ledger, width, console))
    table.caption = (
        f"in {unit.name}; exposed communication; wait and wire of all of it; caused: what others waited for this rank"
    )
    table.caption_justify = "left"
    return table


def _ranks_shown(reports: Sequence[TraceReport], shares: dict[int, RankShare]) -> Sequence[TraceReport]:
    def order(report: TraceReport) -> tuple[bool, int, str]:
        return report.rank is None, report.rank if report.rank is not None else 0, report.file

    def caused(report: TraceReport) -> int:
        share = shares.get(report.rank) if report.rank is not None else None
        return -share.caused_wait_ns if share is not None else 0

    chosen = sorted(reports, key=lambda report: (caused(report), *order(report)))[:RANKS_MAX]
    return sorted(chosen, key=order)


def _clocks(clocks: Sequence[RankClock]) -> Iterator[Text]:
    methods: dict[str, list[RankClock]] = {}
    for clock in clocks:
        methods.setdefault(clock.method, []).append(clock)
    for method, some in methods.items():
        words = CLOCK_WORDS.get(method, clean(method))
        residuals = [clock.residual_ns for clock in some if clock.residual_ns is not None]
        text = f"clocks    {plural(len(some), 'rank')}: {words}"
        moved = [clock.offset_ns for clock in some if clock.offset_ns]
        if moved and method == "collectives":
            text += f", moved by {duration(min(moved))} .. {duration(max(moved))}"
        errors = [clock.standard_error_ns for clock in some if clock.standard_error_ns]
        if errors:
            text += f", standard error at most {duration(max(errors))}"
        elif any(residuals):
            text += f", residual at most {duration(max(residuals))}"
        yield Text(text, style="dim")


def _verdict(job: TraceJob) -> Iterator[RenderableType]:
    """Yield who holds the job up, or that nobody does."""
    if job.wall_ns is None or len(job.ranks) < 2:
        return
    yield Text()
    per = " a step" if any(one.since_step is not None for one in job.stragglers) else ""
    if job.stragglers:
        yield _stragglers(job.stragglers, per)
        for one in job.stragglers:
            yield Padding(Text(f"{who_words(one)}: {clean(one.evidence)}", style="dim"), (0, 0, 0, 2))
    else:
        yield Text(nobody_words(job), style="bold")
    yield from _incidents(job.incidents)


def _incidents(incidents: Sequence[StepIncident]) -> Iterator[Text]:
    """Yield the longest single steps that stand out: what is no rank's fault may still be why the job was slow."""
    shown = sorted(incidents, key=lambda one: -one.excess_ns)[:INCIDENTS_MAX]
    for one in shown:
        step = "once" if one.step is None else f"in step {one.step} only"
        more = f"{cause_words(one.cause)}, {duration(one.excess_ns)} longer than its peers"
        yield Text(f"incident  rank {one.rank}, {step}: {more}", style="dim")
    if len(incidents) > len(shown):
        yield Text(f"incident  {len(incidents) - len(shown)} more: --json has all", style="dim")


def _stragglers(stragglers: Sequence[LateTraceRank], per: str) -> Table:
    table = rich_table(f"Who holds the job up, and by what{', for one step' if per else ''}")
    table.add_column("", no_wrap=True)
    table.add_column("cause", no_wrap=True)
    for column in ("excess", "saved without", "error"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("since step", justify="right", no_wrap=True)
    unit = unit_for([one.saved_ns for one in stragglers])
    for one in stragglers:
        cells = (unit.text(one.excess_ns), unit.text(one.saved_ns), unit.text(one.error_ns))
        since = "-" if one.since_step is None else str(one.since_step)
        table.add_row(who_words(one), Text(cause_words(one.cause), style="bold"), *cells, since)
    return table


def _critical(job: TraceJob) -> Table | None:
    """Return the table of the critical path: the longest parts by rank and cause."""
    if not job.wall_ns or len(job.ranks) < 2:
        return None
    sums: dict[tuple[int, str], list[CriticalPart]] = {}
    for part in job.critical_path:
        sums.setdefault((part.rank, part.cause), []).append(part)
    order = sorted(sums.items(), key=lambda item: -sum(part.duration_ns for part in item[1]))
    few = len(order) > CRITICAL_MAX
    table = rich_table(f"Critical path ({duration(job.wall_ns)}{f', the longest {CRITICAL_MAX} parts' if few else ''})")
    table.add_column("rank", justify="right", no_wrap=True)
    table.add_column("cause", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("most of it in", no_wrap=True, overflow="ellipsis")
    unit = unit_for([sum(part.duration_ns for part in parts) for _, parts in order])
    for (rank, cause), parts in order[:CRITICAL_MAX]:
        total = sum(part.duration_ns for part in parts)
        longest = max(parts, key=lambda part: part.duration_ns)
        where = longest.module or longest.collective or longest.family or ""
        table.add_row(str(rank), path_words(cause), unit.text(total), percent(total / job.wall_ns), clean(where))
    return table


def _instances(instances: Sequence[CollectiveInstance]) -> Table | None:
    if not instances:
        return None
    shown = sorted(instances, key=lambda one: -one.skew_ns)[:INSTANCES_MAX]
    few = len(shown) < len(instances)
    table = rich_table(f"Collectives, one by one (the {len(shown)} most skewed)" if few else "Collectives, one by one")
    table.add_column("operation", no_wrap=True, overflow="ellipsis")
    for column in ("#", "size", "ranks", "last came", "skew", "wire", "bus bw"):
        table.add_column(column, justify="right", no_wrap=True)
    skew, wire = unit_for([one.skew_ns for one in shown]), unit_for([one.wire_ns for one in shown])
    # In order of time: people read a step from its beginning.
    for one in sorted(shown, key=lambda one: min((a.start_ns for a in one.arrivals), default=0)):
        ranks = f"{one.ranks} of {one.ranks + one.ranks_missing}" if one.ranks_missing else str(one.ranks)
        cells = (f"rank {one.late_rank}", skew.text(one.skew_ns), wire.text(one.wire_ns), bandwidth(one.bus_bandwidth))
        table.add_row(clean(one.operation), str(one.index), size_text(one.bytes), ranks, *cells)
    return table
