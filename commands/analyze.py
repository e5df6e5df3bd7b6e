"""Runs `pacecar analyze`: results go to stdout, errors to stderr.

    0 at least one trace, or dump, was analyzed    1 none could be, or an output could not be written

With `--json`, stdout has only the document, and one file needs neither rich nor multiprocessing: on a small trace,
importing them would take longer than the analysis.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TextIO

import msgspec

from pacecar import __version__
from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.hang.document import HangDocument, hang_document
from pacecar.analysis.reading.one_file import EngineError, Window
from pacecar.analysis.reading.parallel_reading import Analysis, Options, Progress, analyze
from pacecar.analysis.reading.trace_paths import find_traces, printable
from pacecar.analysis.shelf import ShelfError
from pacecar.analysis.trace.columns import TraceWarning
from pacecar.analysis.trace.decoding.remote_file import TracePlace
from pacecar.clock import SystemClock
from pacecar.nccl_inspector import find_inspector_files, read_inspector
from pacecar.safe_files import is_stdout

from .shared_options import complain

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AnalyzeOptions", "run_analyze"]

SHOW_PROGRESS_SECONDS = 1.0
"""Shorter work shows no progress bar."""

PROBLEMS_SHOWN = 20
"""Files of a folder that could not be read and are named; `--json` names all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzeOptions:
    """The command's options, parsed."""

    paths: tuple[TracePlace, ...] = ()
    compare: tuple[TracePlace, TracePlace] | None = None
    hang: Path | None = None
    as_json: bool = False
    window: Window | None = None
    steps: tuple[int, int] | None = None
    ranks: frozenset[int] | None = None
    perfetto: Path | None = None
    picture: Path | None = None
    tables: tuple[str, ...] = ()
    by: Literal["total", "exposed", "critical"] = "total"
    csv: Path | None = None
    parquet: Path | None = None
    html: Path | None = None
    step: int | None = None
    engine: Literal["local", "dask"] = "local"
    dask_address: str | None = None
    jobs: int | None = None
    cache: Path | None = None
    is_quiet: bool = False


def run_analyze(options: AnalyzeOptions) -> int:
    """Analyze, print, and return the exit code."""
    if options.hang is not None:
        return _run_hang(options.hang, options.as_json)
    try:
        document = _analyze(options) if options.compare is None else _compare(options, options.compare)
    except (EngineError, ShelfError) as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        return 130
    if document is None:
        return 1
    if options.csv is not None and not _write_csv(document, options.csv):
        return 1
    if options.as_json:
        _print_json(document)
    elif not any(map(is_stdout, (options.perfetto, options.picture, options.html))):
        _print(document, options)
    return 0


def _run_hang(folder: Path, as_json: bool) -> int:
    """Judge the dumps in `folder`, print the verdict, and return the exit code."""
    try:
        document = hang_document(folder, SystemClock())
    except OSError as error:
        complain(f"{printable(folder)}: {(error.strerror or str(error)).lower()}")
        return 1
    for problem in document.problems[:PROBLEMS_SHOWN]:
        complain(f"{printable(folder)}: {problem}")
    if len(document.problems) > PROBLEMS_SHOWN:
        complain(f"{printable(folder)}: and {len(document.problems) - PROBLEMS_SHOWN} more problems")
    if not document.files:
        complain(
            f"{printable(folder)}: no flight recorder dump in this folder (_dump_0, nccl_trace_rank_0, rank0.json)"
        )
        return 1
    if as_json:
        _print_json(document)
        return 0
    from rich.console import Console

    from pacecar.analysis.output.hangtext import hang_text

    console = Console(highlight=False, emoji=False, markup=False)
    for part in hang_text(document, console):
        console.print(part)
    return 0


def _print_json(document: TraceDocument | HangDocument) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()


def _write_csv(document: TraceDocument, folder: Path) -> bool:
    """Write the document's lists into `folder`; on failure print why and return False."""
    from pacecar.analysis.output.csv_tables import write_csv

    try:
        write_csv(document, folder)
    except OSError as error:
        complain(f"{folder}: cannot be written: {(error.strerror or str(error)).lower()}")
        return False
    return True


def _analyze(options: AnalyzeOptions) -> TraceDocument | None:
    """Analyze the paths and write the requested files; None if there is nothing to show."""
    window = options.window or ("steps" if options.steps is not None else "trace")
    analysis = _read(options, options.paths, window)
    if analysis is None:
        return None
    outputs: list[tuple[Path, Callable[[Path], None]]] = []
    if options.perfetto is not None:
        from pacecar.analysis.output.merged_trace.perfetto import write_perfetto

        outputs.append((options.perfetto, lambda path: write_perfetto(analysis, path)))
    if options.picture is not None:
        from pacecar.analysis.output.page.picture import write_picture

        outputs.append((options.picture, lambda path: write_picture(analysis, path, options.step)))
    if options.html is not None:
        from pacecar.analysis.output.page.page import write_page

        outputs.append((options.html, lambda path: write_page(analysis, path, options.step)))
    if options.parquet is not None:
        from pacecar.analysis.output.parquet_tables import write_parquet

        outputs.append((options.parquet, lambda path: write_parquet(analysis, path)))
    for path, write in outputs:
        try:
            write(path)
        except BrokenPipeError:
            raise  # click handles a closed pipe
        except OSError as error:
            complain(f"{path}: cannot be written: {(error.strerror or str(error)).lower()}")
            return None
        except LookupError as error:
            complain(str(error.args[0]))
            return None
    return analysis.document


def _compare(options: AnalyzeOptions, paths: tuple[TracePlace, TracePlace]) -> TraceDocument | None:
    from pacecar.analysis.compare import compare

    sides = []
    for path in paths:
        analysis = _read(options, (path,), options.window or "steps")
        if analysis is None:
            return None
        sides.append((printable(path), analysis.document))
    (before_name, before), (after_name, after) = sides
    comparison, warnings = compare((before_name, before.traces), (after_name, after.traces))
    return TraceDocument(
        traces=[*before.traces, *after.traces],
        comparison=comparison,
        warnings=[*before.warnings, *after.warnings, *warnings],
    )


def _read(options: AnalyzeOptions, paths: Sequence[TracePlace], window: Window) -> Analysis | None:
    """Find and analyze the files at `paths`; print why and return None if there is no trace at all."""
    found = find_traces(paths, options.ranks)
    folders = [path for path in paths if isinstance(path, Path) and os.path.isdir(path)]
    inspector = read_inspector(find_inspector_files(folders))
    missing = [TraceWarning("not_found", message) for message in found.errors]
    unread = [TraceWarning("inspector", note) for note in inspector.notes]
    draws = any((options.perfetto, options.picture, options.html, options.parquet, options.tables, options.csv))
    draws = draws or options.compare is not None
    if not found.files and inspector.rows and not draws:
        _complain_of(unread)
        return Analysis(TraceDocument(traces=[], communicators=[*inspector.rows], warnings=unread), ())
    if not found.files:
        _complain_of(missing)
        return None
    how = Options(
        window=window,
        steps=options.steps,
        ranks=options.ranks,
        engine=options.engine,
        dask_address=options.dask_address,
        jobs=options.jobs,
        cache=options.cache,
        version=__version__,
        keeps_tables=any((options.perfetto, options.picture, options.html, options.parquet)),
        makes_tables=any((options.tables, options.csv, options.compare, options.html, options.parquet)),
        compares_ranks=options.compare is None,
    )
    with _progress(options.is_quiet, sys.stderr) as progress:
        analysis = analyze(found.files, how, progress)
    analysis.document.warnings = [*missing, *analysis.document.warnings, *unread]
    analysis.document.communicators = [*inspector.rows]
    _complain_of(analysis.document.warnings)
    return analysis if analysis.document.traces else None


def _complain_of(warnings: Sequence[TraceWarning]) -> None:
    for warning in warnings:
        complain(warning.message)


def _print(document: TraceDocument, options: AnalyzeOptions) -> None:
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    for part in _parts(document, options, console):
        console.print(part)


def _parts(document: TraceDocument, options: AnalyzeOptions, console: Console) -> Iterator[Any]:
    from pacecar.analysis.output.text import document_text

    if options.tables:
        from pacecar.analysis.output.tabletext import tables_text

        return tables_text(document, options.tables, console, options.by)
    if document.comparison is None:
        return document_text(document, console)
    from pacecar.analysis.output.comparetext import comparison_text

    return comparison_text(document, console)


@contextmanager
def _progress(is_quiet: bool, stream: TextIO) -> Iterator[Progress | None]:
    """Yield the engine's progress callback, which draws a bar once work takes long; None without a terminal."""
    if is_quiet or not stream.isatty():
        yield None
        return
    started = time.monotonic()
    bar: Any = None
    task: Any = None

    def show(done_bytes: int, all_bytes: int, files: int, all_files: int) -> None:
        nonlocal bar, task
        if bar is None:
            if time.monotonic() - started < SHOW_PROGRESS_SECONDS:
                return
            bar, task = _bar()
        words = f"reading {all_files} traces, {files} done" if all_files > 1 else "reading"
        bar.update(task, completed=done_bytes, total=all_bytes, description=words)

    try:
        yield show
    finally:
        if bar is not None:
            bar.stop()


def _bar() -> tuple[Any, Any]:
    """Start a transient progress bar on stderr."""
    from importlib.util import find_spec

    if find_spec("rich") is None:
        return _NoBar(), None
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    bar = Bar(*columns, console=Console(stderr=True), transient=True)
    task = bar.add_task("reading", total=None)
    bar.start()
    return bar, task


class _NoBar:
    """Replaces the bar if rich is not installed, since `--json` works without it."""

    def update(self, *_: object, **__: object) -> None: ...

    def stop(self) -> None: ...
