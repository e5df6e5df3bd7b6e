"""Prints the verdict on a hang for a terminal: who holds the job up, why that is said, and the groups that differ."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.text import Text

from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import plural
from pacecar.formatting.tables import Table, TableColumn

from ..hang.document import HangDocument, WaitedGroup
from ..hang.sentences import ranks_words
from .tracetext import table_lines

__all__ = ["hang_text"]

GROUPS_SHOWN_MAX = 16
"""Rows of the table; `--json` has all groups."""


def hang_text(document: HangDocument, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the screen in order."""
    verdict = document.verdict
    named = f": {ranks_words(verdict.culprits)}" if verdict.culprits else ""
    yield Text.assemble((verdict.kind.replace("_", " ") + named, "bold"))
    yield Text(clean(verdict.summary), overflow="fold")
    yield Text()
    yield Text("Evidence", style="bold")
    for sentence in verdict.evidence:
        yield Text(f"- {clean(sentence)}", overflow="fold")
    yield from table_lines([_groups_table(document.groups)], console)
    yield Text()
    ranks = f"{plural(document.files, 'dump')} of a job of {plural(document.world_size, 'rank')}"
    yield Text(f"{ranks}, {plural(len(document.problems), 'problem')}", style="dim")


def _groups_table(groups: list[WaitedGroup]) -> Table | None:
    shown = groups[:GROUPS_SHOWN_MAX]
    if not shown:
        return None
    columns = (
        TableColumn.text("group", [one.description or one.name for one in shown], is_long=True, name_cells=10),
        TableColumn.text("name", [one.name for one in shown], most=12),
        TableColumn.text("waits in", [one.call for one in shown], is_long=True, name_cells=10),
        TableColumn.count("waiting", [len(one.waiting) for one in shown]),
        TableColumn.text("not joined", [_numbers(one.absent) for one in shown], most=24),
        TableColumn.text("unknown", [_numbers(one.unknown) for one in shown], most=24, shown="wide"),
        TableColumn.text("joined", [_span(one.joined) for one in shown], shown="wide"),
        TableColumn.text("finished", [_span(one.finished) for one in shown], shown="wide"),
    )
    cut = f"the first {len(shown)} of {len(groups)}" if len(groups) > len(shown) else ""
    return Table("Groups that do not agree", columns, cut=cut)


def _numbers(ranks: tuple[int, ...]) -> str | None:
    return ", ".join(map(str, ranks)) or None


def _span(numbers: tuple[int, int] | None) -> str | None:
    return None if numbers is None else f"{numbers[0]}" if numbers[0] == numbers[1] else f"{numbers[0]}-{numbers[1]}"
