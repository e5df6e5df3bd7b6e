"""Prints the comparison of two runs for a terminal: first the pace, then what changed it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, plural, unit_for
from pacecar.formatting.tables import rich_table
from pacecar.records import LEDGER_HEADINGS, Ledger

from ..compare import WARNING_CODES
from ..one_rank.kernel_families import kernel_name
from ..report import Difference, TraceComparison, TraceDocument
from .text import warning_lines
from .tracetext import BAR_WIDTH_MAX, ROWS_MAX

__all__ = ["comparison_text"]

CHANGE_SHARE_MIN = 0.0005
"""The least change that is listed, as a share of the longer side: the ledger's own table would round away less."""


def comparison_text(document: TraceDocument, console: Console) -> Iterator[RenderableType]:
    """Yield what is to be printed about a document that holds a comparison, in order."""
    comparison, reports = document.comparison, document.traces
    assert comparison is not None
    for word, side in (("before", comparison.before), ("after", comparison.after)):
        steps = f", {plural(side.steps, 'step')}" if side.steps is not None else ""
        yield Text.assemble((f"{word:<7} ", "dim"), f"{clean(side.name)}  ({plural(side.ranks, 'trace')}{steps})")
    yield Text()
    yield Text(_headline(comparison), style="bold")
    yield Text()
    rows = {row.name: row for row in comparison.headings}
    split = len(comparison.before.files)
    for word, some in (("before", reports[:split]), ("after", reports[split:])):
        total = Ledger(wall_ns=0)
        for report in some:
            total = total + report.ledger
        if total.wall_ns > 0:
            bar = ledger_bar(total, min(console.width, BAR_WIDTH_MAX) - 8, console)
            yield Text.assemble((f"{word:<7} ", "dim"), bar)
    yield Text()
    yield _headings(rows, comparison.per)
    operators = "Operators (what they launched)" if comparison.kernels else "Operators"
    for title, some_rows in (
        ("Kernel families", comparison.families),
        ("Kernels", comparison.kernels),
        (operators, comparison.operators),
        ("Collectives", comparison.collectives),
    ):
        worth = CHANGE_SHARE_MIN * max(rows["wall"].before_ns, rows["wall"].after_ns)
        changed = [row for row in some_rows if row.change_ns and abs(row.change_ns) >= worth]
        if changed:
            yield Text()
            yield _changes(title, changed[:ROWS_MAX], comparison.per)
    named = [(Path(report.file).name, report.warnings) for report in reports]
    own = [warning for warning in document.warnings if warning.code in WARNING_CODES]
    yield from warning_lines([("", own), *named], len(reports) > 1)


def _headline(comparison: TraceComparison) -> str:
    before, after = comparison.before, comparison.after
    if before.median_step_ns is not None and after.median_step_ns is not None:
        who = " of the slowest rank" if max(before.ranks, after.ranks) > 1 else ""
        return f"median step{who}: {_way(before.median_step_ns, after.median_step_ns)}"
    wall = next(row for row in comparison.headings if row.name == "wall")
    return f"whole trace: {_way(wall.before_ns, wall.after_ns)}"


def _way(before: float, after: float) -> str:
    text = f"{duration(before)} -> {duration(after)}"
    if before == 0 or before == after:
        return text
    change = after / before - 1
    return f"{text}, {percent(abs(change))} {'longer' if change > 0 else 'shorter'}"


def _headings(rows: dict[str, Difference], per: str) -> Table:
    wall = rows["wall"]
    unit = unit_for([wall.before_ns, wall.after_ns])
    table = rich_table(f"Ledger, mean for each {per}{' and rank' if per == 'step' else ''}, in {unit.name}")
    table.add_column("", no_wrap=True)
    for column in ("before", "", "after", "", "change", ""):
        table.add_column(column, justify="right", no_wrap=True)

    def add(words: str, row: Difference) -> None:
        shares = [
            percent(value / whole) if whole else "-"
            for value, whole in ((row.before_ns, wall.before_ns), (row.after_ns, wall.after_ns))
        ]
        before, after, change = (unit.number(value) for value in (row.before_ns, row.after_ns, row.change_ns))
        table.add_row(words, before, shares[0], after, shares[1], _signed(change), _ratio(row))

    for heading in LEDGER_HEADINGS:
        if rows[heading].before_ns or rows[heading].after_ns:
            add(HEADING_WORDS[heading], rows[heading])
    table.add_section()
    add(per, wall)
    if rows["communication"].before_ns or rows["communication"].after_ns:
        add("communication", rows["communication"])
        add("  overlapped", rows["overlapped_communication"])
    return table


def _changes(title: str, rows: Sequence[Difference], per: str) -> Table:
    unit = unit_for([value for row in rows for value in (row.before_ns, row.after_ns)])
    table = rich_table(f"{title} that changed most, for each {per}, in {unit.name}")
    table.add_column("", no_wrap=True, overflow="ellipsis", ratio=1)
    table.expand = True
    for column in ("before", "count", "after", "count", "change", ""):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        before, after, change = (unit.number(value) for value in (row.before_ns, row.after_ns, row.change_ns))
        cells = (before, _count(row.before_count), after, _count(row.after_count), _signed(change), _way_of(row))
        table.add_row(kernel_name(row.name) if row.status is not None else clean(row.name).replace("_", " "), *cells)
    return table


def _signed(number: str) -> str:
    return number if number.startswith("-") else f"+{number}"


def _way_of(row: Difference) -> str:
    """Return the change over before, or that there was nothing before or is nothing after."""
    return row.status if row.status in ("new", "gone") else _ratio(row)


def _ratio(row: Difference) -> str:
    """Return the change over before; from tenfold on as a factor, which is easier to read than 22931 %."""
    if row.change_ratio is not None and row.change_ratio >= 9:
        return f"{row.change_ratio + 1:.0f} x"
    return percent(row.change_ratio, signed=True)


def _count(count: float | None) -> str:
    return "-" if count is None else f"{count:.4g}"
