"""Prints the analysis of traces for a terminal: one screen or two, at 80 columns.

The screen shows what a trace is, where its time went, which steps were odd, what the device waited for, the largest
collectives and kernels, and what a change would be worth.  Everything else is in `--json`.

`tracetext` prints one trace, `jobtext` several ranks of a job.  A missing number is a dash.  The command prints the
document's own warnings (unreadable files) on stderr.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from pacecar.formatting.communicators_table import communicators_table
from pacecar.formatting.plain_text import clean

from ..document.report import TraceDocument
from ..trace.columns import TraceWarning
from .jobtext import job_text
from .tracetext import ROWS_MAX, table_lines, trace_text

__all__ = ["document_text", "warning_lines"]

WARNINGS_MAX = 12
"""The most lines of warnings; the rest is counted."""


def document_text(document: TraceDocument, console: Console) -> Iterator[RenderableType]:
    """Yield the parts of the screen in order."""
    if document.job is not None:
        yield from job_text(document.traces, document.job, console)
    else:
        for index, report in enumerate(document.traces):
            if index:
                yield Text()
            yield from trace_text(report, console)
    table = communicators_table(document.communicators, ROWS_MAX)
    if table is not None:
        yield from table_lines([table], console)
    named = [(Path(report.file).name, report.warnings) for report in document.traces]
    job = document.job.warnings if document.job is not None else []
    yield from warning_lines([*named, ("", job)], len(document.traces) > 1)


def warning_lines(groups: Iterable[tuple[str, Sequence[TraceWarning]]], names_files: bool) -> Iterator[Text]:
    """Yield at most `WARNINGS_MAX` warnings; the same one from many files is one line."""
    merged: dict[tuple[str, str], list[str]] = {}
    counts: Counter[tuple[str, str]] = Counter()
    for name, warnings in groups:
        for warning in warnings:
            key = warning.code, warning.message
            merged.setdefault(key, []).append(name)
            counts[key] += warning.count
    if not merged:
        return
    yield Text()
    yield Text("Warnings", style="bold")
    for (code, message), names in list(merged.items())[:WARNINGS_MAX]:
        files = [name for name in names if name]
        where = ""
        if files and names_files:
            where = f" ({clean(files[0])})" if len(files) == 1 else f" ({len(files)} files)"
        count = counts[code, message]
        line = TraceWarning(code, message, 1 if count == len(names) else count).line
        yield Text.assemble((f"{clean(code)}: ", "yellow"), clean(line), (where, "dim"))
    if len(merged) > WARNINGS_MAX:
        yield Text(f"and {len(merged) - WARNINGS_MAX} more: --json has them all", style="dim")
