"""Prints one trace for a terminal: what it is, its ledger as a bar, and its tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.formatting.plain_text import clean
from pacecar.formatting.tables import Table
from pacecar.formatting.terminal_tables import terminal_table
from pacecar.records import Ledger

from ..document.report import TraceReport
from .tables import trace_tables

__all__ = ["BAR_WIDTH_MAX", "ROWS_MAX", "ledger_lines", "table_lines", "trace_text"]

ROWS_MAX = 8
"""The most collectives and families shown: the largest, with nearly all of the time."""

BAR_WIDTH_MAX = 88


def trace_text(report: TraceReport, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the screen about one trace."""
    yield from _title(report)
    yield from ledger_lines(report.ledger, console)
    found = (
        trace_tables.ledger_table(report),
        trace_tables.marked_steps_table(report.steps),
        trace_tables.gaps_table(report.gaps, report.span_ns),
        trace_tables.collectives_table(report.collectives, ROWS_MAX),
        trace_tables.families_table(report.families, ROWS_MAX),
        trace_tables.what_if_table(report.what_if, worth_only=True),
    )
    yield from table_lines(found, console)


def ledger_lines(ledger: Ledger, console: Console) -> Iterator[Text]:
    """Yield a ledger as a bar with its legend; nothing if it is empty."""
    if ledger.wall_ns > 0:
        width = min(console.width, BAR_WIDTH_MAX)
        yield Text()
        yield ledger_bar(ledger, width, console)
        yield from ledger_legend(ledger, width, console)


def table_lines(tables: Iterable[Table | None], console: Console) -> Iterator[Text]:
    """Yield tables below each other, without empty ones."""
    for table in tables:
        if table is not None:
            yield Text()
            yield from terminal_table(table, console)


def _title(report: TraceReport) -> Iterator[Text]:
    yield Text(clean(Path(report.file).name), style="bold", overflow="fold")
    facts = [
        _rank(report),
        report.backend or "",
        _gpus(report.gpus),
        f"{report.events:,} events".replace(",", " "),
        "cut off" if report.is_truncated else "",
    ]
    yield Text(clean(", ".join(fact for fact in facts if fact)), style="dim")


def _rank(report: TraceReport) -> str:
    if report.rank is None:
        return ""
    return f"rank {report.rank}" + (f" of {report.world_size}" if report.world_size is not None else "")


def _gpus(gpus: Sequence[str]) -> str:
    names = [name for name in dict.fromkeys(gpus) if name]
    count = f"{len(gpus)} x " if len(gpus) > 1 and len(names) == 1 else ""
    return count + ", ".join(names)
