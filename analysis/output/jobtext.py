"""Prints the comparison of several ranks for a terminal: late ranks, waiting, and the bandwidth of the wire.

Each rank's own figures are one line; the rest is what no single trace can show.  A rank with long communication only
looks slow: it waits for a late rank, so its communication is split into waiting and wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, plural
from pacecar.formatting.terminal_tables import terminal_table
from pacecar.records import Ledger

from ..document.report import RankClock, StepIncident, TraceJob, TraceReport
from .tables import job_tables, trace_tables
from .tracetext import ROWS_MAX, ledger_lines, table_lines
from .words import CLOCK_WORDS, cause_words, no_late_rank_words, path_sums, shown_ranks, who_words

__all__ = ["job_text"]

RANKS_MAX = 16
"""The most ranks that have a line (`words.shown_ranks`)."""

RANK_BAR_WIDTH = 12
"""Width of the bar of the longest rank."""

CRITICAL_MAX = 8
"""The most parts of the critical path that have a line: the longest."""

INCIDENTS_MAX = 4
"""The most incidents that have a line: the longest."""

INSTANCES_MAX = 12
"""The most collectives that have a line: those with the largest skew."""


def job_text(reports: Sequence[TraceReport], job: TraceJob, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the screen about all ranks together."""
    of = f" of {job.world_size}" if job.world_size is not None and len(job.ranks) <= job.world_size else ""
    yield Text(f"{plural(len(reports), 'trace')}, {len(job.ranks)}{of} ranks", style="bold")
    backends = dict.fromkeys(report.backend for report in reports if report.backend)
    gpus = dict.fromkeys(gpu for report in reports for gpu in report.gpus if gpu)
    yield Text(clean(", ".join((*backends, *gpus))), style="dim", overflow="ellipsis", no_wrap=True)
    yield from ledger_lines(sum((report.ledger for report in reports), Ledger(wall_ns=0)), console)
    yield Text()
    yield from _ranks(reports, job, console)
    yield from _clocks(job.clocks)
    yield from _verdict(job, console)
    found = (
        job_tables.critical_table(job, CRITICAL_MAX),
        trace_tables.collectives_table(job.collectives, ROWS_MAX),
        job_tables.instances_table(job, INSTANCES_MAX),
        trace_tables.what_if_table(job.what_if, worth_only=True),
    )
    yield from table_lines(found, console)
    if job.what_if_untold:
        yield Text("\n".join(job.what_if_untold), style="dim")


def _ranks(reports: Sequence[TraceReport], job: TraceJob, console: Console) -> Iterator[Text]:
    shown = shown_ranks(reports, job, path_sums(job), RANKS_MAX)
    longest = max((report.span_ns for report in shown), default=0)
    bars = [
        ledger_bar(report.ledger, round(RANK_BAR_WIDTH * report.span_ns / longest) if longest else 0, console)
        for report in shown
    ]
    yield from terminal_table(job_tables.ranks_table(shown, len(reports), job), console, bars)


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


def _verdict(job: TraceJob, console: Console) -> Iterator[RenderableType]:
    """Yield the verdict: the late ranks, or that there are none."""
    if job.wall_ns is None or len(job.ranks) < 2:
        return
    yield Text()
    if not job.stragglers:
        yield Text(no_late_rank_words(job), style="bold")
    yield from terminal_table(job_tables.stragglers_table(job), console)
    for one in job.stragglers:
        yield Padding(Text(f"{who_words(one)}: {clean(one.evidence)}", style="dim"), (0, 0, 0, 2))
    yield from _incidents(job.incidents)


def _incidents(incidents: Sequence[StepIncident]) -> Iterator[Text]:
    """Yield the longest outlier steps: without being a rank's fault, they may explain a slow job."""
    shown = sorted(incidents, key=lambda one: -one.excess_ns)[:INCIDENTS_MAX]
    for one in shown:
        step = "once" if one.step is None else f"in step {one.step} only"
        more = f"{cause_words(one.cause)}, {duration(one.excess_ns)} longer than its peers"
        yield Text(f"incident  rank {one.rank}, {step}: {more}", style="dim")
    if len(incidents) > len(shown):
        yield Text(f"incident  {len(incidents) - len(shown)} more: --json has all", style="dim")
