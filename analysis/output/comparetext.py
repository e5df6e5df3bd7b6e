"""Prints the comparison of two runs for a terminal: first the pace, then what changed it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, plural
from pacecar.records import Ledger

from ..compare import WARNING_CODES
from ..document.report import TraceComparison, TraceDocument
from .tables import comparison_tables
from .text import warning_lines
from .tracetext import BAR_WIDTH_MAX, ROWS_MAX, table_lines

__all__ = ["comparison_text"]

CHANGE_SHARE_MIN = 0.0005
"""The least change that is listed, as a share of the longer side; the ledger's table would round less to zero."""


def comparison_text(document: TraceDocument, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the screen for a document with a comparison."""
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
    found = [comparison_tables.headings_table(rows, comparison.per)]
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
            found.append(comparison_tables.changes_table(title, changed[:ROWS_MAX], comparison.per))
    yield from table_lines(found, console)
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
