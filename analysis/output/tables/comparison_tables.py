"""Defines the tables of two runs: the ledger of each, and the greatest changes."""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.analysis.document.report import Difference
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import DisplayUnit, percent, unit_for
from pacecar.formatting.tables import Table, TableColumn
from pacecar.records import LEDGER_HEADINGS

__all__ = ["changes_table", "headings_table"]


def headings_table(rows: dict[str, Difference], per: str) -> Table:
    """Return the ledgers of both runs side by side."""
    wall = rows["wall"]
    names = [(heading, HEADING_WORDS[heading]) for heading in LEDGER_HEADINGS if _has_time(rows[heading])]
    sums = [("wall", per)]
    if _has_time(rows["communication"]):
        sums += [("communication", "communication"), ("overlapped_communication", "  overlapped")]
    found = [rows[name] for name, _ in (*names, *sums)]
    unit = unit_for([wall.before_ns, wall.after_ns])
    columns = [
        TableColumn.text("", [words for _, words in (*names, *sums)]),
        TableColumn.time("before", unit, [row.before_ns for row in found]),
        TableColumn.ratio("", [row.before_ns / wall.before_ns if wall.before_ns else None for row in found]),
        TableColumn.time("after", unit, [row.after_ns for row in found]),
        TableColumn.ratio("", [row.after_ns / wall.after_ns if wall.after_ns else None for row in found]),
        *_change(found, unit),
    ]
    title = f"Ledger, mean for each {per}{' and rank' if per == 'step' else ''}"
    return Table(title, columns, unit=unit, sums=len(sums))


def changes_table(title: str, rows: Sequence[Difference], per: str) -> Table:
    """Return the changed rows in the given order."""
    unit = unit_for([value for row in rows for value in (row.before_ns, row.after_ns)])
    names = [kernel_name(row.name) if row.status is not None else row.name.replace("_", " ") for row in rows]
    columns = [
        TableColumn.text("", names),
        TableColumn.time("before", unit, [row.before_ns for row in rows]),
        TableColumn.number("count", [row.before_count for row in rows], lambda count: f"{count:.4g}"),
        TableColumn.time("after", unit, [row.after_ns for row in rows]),
        TableColumn.number("count", [row.after_count for row in rows], lambda count: f"{count:.4g}"),
        *_change(rows, unit),
    ]
    return Table(f"{title} that changed most, for each {per}", columns, unit=unit)


def _has_time(row: Difference) -> bool:
    return bool(row.before_ns or row.after_ns)


def _change(rows: Sequence[Difference], unit: DisplayUnit) -> tuple[TableColumn, TableColumn]:
    """Return the change with its sign, and over before, or that there was nothing before or is nothing after."""
    changes = TableColumn.number("change", [row.change_ns for row in rows], lambda value: _signed(unit.number(value)))
    ways = [row.status if row.status in ("new", "gone") else _ratio(row) for row in rows]
    return changes, TableColumn("", [(way, row.change_ratio) for way, row in zip(ways, rows, strict=True)])


def _signed(number: str) -> str:
    return number if number.startswith("-") else f"+{number}"


def _ratio(row: Difference) -> str:
    """Return the change relative to before; from tenfold on as a factor, easier to read than 22931 %."""
    if row.change_ratio is not None and row.change_ratio >= 9:
        return f"{row.change_ratio + 1:.0f} x"
    return percent(row.change_ratio, signed=True)
