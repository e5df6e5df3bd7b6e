"""Reads and analyzes one trace file: the task for a process or a dask worker, and its answer.

An unreadable file does not stop the others: its answer has the error, with the file's name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from ..document.report import TraceReport
from ..trace.columns import Trace, TraceWarning
from ..trace.decoding.remote_file import TracePlace
from .trace_paths import printable

if TYPE_CHECKING:
    from ..one_rank.tables.all_tables import TablePlaces

__all__ = ["EngineError", "FileTask", "Window", "WorkerAnswer", "read_one"]

Window = Literal["trace", "steps", "hta"]


class EngineError(Exception):
    """The engine itself fails (no cluster, for example); the message is one line for users."""


@dataclass(frozen=True, slots=True)
class FileTask:
    """One file to read; it is sent to a worker."""

    path: TracePlace
    window: Window
    steps: tuple[int, int] | None
    returns_table: bool
    makes_tables: bool = False
    """Whether the report has tables, for which the file is read with its details."""


@dataclass(frozen=True, slots=True)
class WorkerAnswer:
    """The result of one file: a report and perhaps its columns, or the reason why there is none."""

    report: TraceReport | None = None
    table: Trace | None = None
    places: TablePlaces | None = None
    """The places of the rows of `table` in the report's tables."""
    error: TraceWarning | None = None


def read_one(task: FileTask, progress: Callable[[int, int | None], None] | None = None) -> WorkerAnswer:
    """Read and analyze one file; the answer has its problems.  Runs in any process of the engine."""
    # Imported here: the command's `--help` and a dask scheduler do not need it.
    from ..one_rank.one_trace import analyze_trace
    from ..plausibility.examine import examine
    from ..trace.reader import TraceError, read_trace

    try:
        trace = read_trace(task.path, progress=progress, details=task.makes_tables)
    except TraceError as error:
        return WorkerAnswer(error=TraceWarning("unreadable", _named(task.path, str(error))))
    except OSError as error:
        return WorkerAnswer(error=TraceWarning("unreadable", _named(task.path, (error.strerror or str(error)).lower())))
    except MemoryError:
        return WorkerAnswer(error=TraceWarning("out_of_memory", _named(task.path, "not enough memory to read it")))
    if trace.file != (name := printable(task.path)):
        trace = replace(trace, file=name)
    examined = examine(trace)
    if examined.refusal is not None:
        return _refused(task.path, examined.refusal, trace.warnings)
    report = analyze_trace(examined.trace, window=task.window, steps=task.steps)
    nothing = next((warning for warning in report.warnings if warning.code == "no_work"), None)
    if nothing is not None:
        return _refused(task.path, nothing, trace.warnings)
    trace = examined.trace
    places = None
    if task.makes_tables:
        from ..one_rank.tables.all_tables import tables_of

        report.tables, places = tables_of(trace, report)
        trace = replace(trace, details=None)
    if not task.returns_table:
        return WorkerAnswer(report=report)
    return WorkerAnswer(report=report, table=trace, places=places)


def _refused(path: TracePlace, why: TraceWarning, others: Sequence[TraceWarning]) -> WorkerAnswer:
    """Return why a file is not analyzed, with the problems of reading it, which may be the cause."""
    message = "; ".join([why.message, *(other.line for other in others)])
    return WorkerAnswer(error=msgspec.structs.replace(why, message=_named(path, message), effect="refused"))


def _named(path: TracePlace, message: str) -> str:
    message = message if str(path) in message else f"{path}: {message}"
    return message.replace(str(path), printable(path))
