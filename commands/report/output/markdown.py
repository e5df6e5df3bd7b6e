"""Renders the report's tables as markdown, to paste into an issue or a pull request."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pacecar.formatting.communicators_table import communicators_table
from pacecar.formatting.plain_text import clean
from pacecar.formatting.tables import Table

from ..document import Report, RunComparison
from ..formatting import change_words
from . import life_tables, tables, utilization_tables
from .comparison_tables import comparison_tables

__all__ = ["comparison_markdown", "report_markdown"]

_SPECIAL = re.compile(r"([\\`*_\[\]<|&~$])")


def report_markdown(report: Report) -> str:
    """Return one run as markdown."""
    lines = [f"# Run {escaped(report.run)}", "", escaped(tables.headline(report)), ""]
    lines += [f"- {'lost' if notice.is_damage else 'note'}: {escaped(notice.line)}" for notice in report.notices]
    if report.notices:
        lines.append("")
    lines.append(", ".join(f"{name} {escaped(value)}" for name, value in tables.facts(report)))
    lines.append("")
    changes = tables.changes_table(report)
    for table in (
        life_tables.life_table(report), life_tables.attempts_table(report), life_tables.intervals_table(report),
        life_tables.google_table(report), tables.stability_table(report), tables.ledger_table(report),
        communicators_table(report.communicators, tables.ROWS_MAX), changes,
        tables.ladder_table(report), utilization_tables.usage_table(report), utilization_tables.energy_table(report),
        utilization_tables.power_table(report), utilization_tables.cost_table(report),
        utilization_tables.incidents(report), utilization_tables.ranks_table(report),
        utilization_tables.trust_table(report),
    ):  # fmt: skip
        lines += _table(table)
        if table is changes and changes is not None:
            lines += [*(f"{place}. {escaped(text)}" for place, text in tables.reasons(report)), ""]
    return "\n".join(lines)


def comparison_markdown(comparison: RunComparison) -> str:
    """Return several runs as markdown."""
    lines = ["# Runs compared", ""]
    for row in comparison.rows:
        if row.stretch == "settled" and row.change is not None:
            said = f"{row.run} against {comparison.runs[0].run}: {row.verdict}, {change_words(row.change)}: {row.why}."
            lines += [escaped(said), ""]
    lines += [f"- {escaped(text)}" for text in comparison.warnings]
    lines += [""] if comparison.warnings else []
    for table in comparison_tables(comparison):
        lines += _table(table)
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Escape `text`, which comes from records, so that markdown shows it literally on one line."""
    return _SPECIAL.sub(r"\\\1", clean(text))


def _table(table: Table | None) -> Iterator[str]:
    if table is None or not table.rows:
        return
    yield f"## {table.name}"
    yield ""
    yield "| " + " | ".join(escaped(cell) or " " for cell in table.head) + " |"
    yield "|" + "|".join(" --- " if column.is_text else " ---: " for column in table.columns) + "|"
    for row in table.rows:
        yield "| " + " | ".join(escaped(cell) for cell in row) + " |"
    yield ""
    if table.note:
        yield escaped(table.note)
        yield ""
