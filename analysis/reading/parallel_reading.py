"""Reads and analyzes many trace files, then compares the ranks.

Reading all files before analyzing them would need the memory of all at once.  So each file is read, analyzed and
reduced to its columns in one place: in this process for one file, in parallel processes for many, on a dask cluster if
they do not fit one machine.  All three give the same document, to the byte: a file's result depends only on the file,
and ranks are combined in the order of the files.

A file that cannot be read, or whose process dies, is left out with a warning.

Bounds: `TABLES_BYTES_MAX` for the columns that are kept to compare ranks, in a file beyond the first of them; one
file's columns for each process.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from ..document.report import TraceDocument
from ..shelf import Shelf
from ..trace.columns import Trace, TraceWarning
from ..trace.decoding.remote_file import TracePlace, Url
from .one_file import EngineError, FileTask, Window, WorkerAnswer, read_one

if TYPE_CHECKING:
    from ..all_ranks.job_times import JobTimes

__all__ = ["Analysis", "Options", "Progress", "analyze", "analyze_files"]

TABLES_BYTES_MAX = 32 * 2**30
"""The most bytes of columns kept to compare ranks, as `_tasks` estimates them: 10 000 ranks of 20 000 events fit.  Most
lie in a file (`shelf`)."""

PARALLEL_BYTES_MIN = 128 * 2**20
"""With fewer bytes of JSON, starting processes costs more than it saves: a third of a second, at 200 MB/s."""

COMPRESSION_RATIO = 20
"""The assumed compression ratio of gzip on a trace; 13 to 30 were measured."""

COMPRESSED_HEADS = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd")
"""The first bytes of gzip (RFC 1952) and zstd (RFC 8878)."""

COLUMNS_SHARE = 0.25
"""Size of the columns relative to their JSON: at most 55 bytes for an event of 220 to 500."""

RANKS_NAMED = 8
"""How many missing ranks are named."""

Progress = Callable[[int, int, int, int], None]
"""Called with bytes done, bytes in all, files done, files in all."""


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How to analyze.  `steps` are the first and the last step; `jobs` None means one a core."""

    window: Window = "trace"
    steps: tuple[int, int] | None = None
    engine: Literal["local", "dask"] = "local"
    dask_address: str | None = None
    jobs: int | None = None
    cache: Path | None = None
    """Where the answers of files are kept for another run of the same `version`."""
    version: str = ""
    ranks: frozenset[int] | None = None
    """Only these ranks, as the traces or their names tell them."""
    compares_ranks: bool = True
    keeps_tables: bool = False
    """Whether columns are kept for a picture, a page or another trace."""
    makes_tables: bool = False
    """Whether the reports have tables of kernels, operators and others."""


@dataclass(frozen=True, slots=True)
class Analysis:
    """The document, and the columns of its traces if they were kept, in the same order.

    `times` has the clocks and the critical path of the job; None if ranks were not compared.
    """

    document: TraceDocument
    tables: tuple[Trace | None, ...]
    times: JobTimes | None = None


def analyze_files(
    paths: Sequence[TracePlace], options: Options | None = None, progress: Progress | None = None
) -> TraceDocument:
    """Return the document of `paths`; see `analyze`."""
    return analyze(paths, options, progress).document


def analyze(paths: Sequence[TracePlace], options: Options | None = None, progress: Progress | None = None) -> Analysis:
    """Read and analyze `paths` and compare the ranks.  Raises EngineError; a bad file is a warning."""
    options = options or Options()
    if options.engine == "dask":
        paths = [
            path.absolute() if isinstance(path, Path) else path for path in paths
        ]  # the workers have another working directory
    sizes = [_size(path) for path in paths]
    tasks = _tasks(paths, sizes, options)
    kept = None
    if options.cache is not None:
        from .kept_answers import AnswerCache

        kept = AnswerCache(options.cache, options.version)
    shelf = Shelf()
    answers = [None if kept is None else shelf.put(kept.get(task)) for task in tasks]
    left = [index for index, answer in enumerate(answers) if answer is None]
    sizes = [sizes[index] for index in left]
    meter = _Meter(sizes, progress)
    for place, answer in _engine([tasks[index] for index in left], sizes, options, meter):
        answers[left[place]] = shelf.put(answer)
        meter.finish(place)
        if kept is not None:
            kept.keep(tasks[left[place]], answer)
    if kept is not None and kept.failed is not None:
        answers.append(WorkerAnswer(error=TraceWarning("not_kept", kept.failed)))
    known = [answer for answer in answers if answer is not None]
    return _assemble(_chosen(known, options.ranks), tasks, options, shelf)


def _chosen(answers: Sequence[WorkerAnswer], ranks: frozenset[int] | None) -> list[WorkerAnswer]:
    """Return the answers of `ranks` with a warning if some are missing; a trace without a rank is not of them."""
    if ranks is None:
        return list(answers)
    chosen = [answer for answer in answers if answer.report is None or answer.report.rank in ranks]
    if missing := sorted(ranks - {answer.report.rank for answer in chosen if answer.report is not None}):
        words = ", ".join(map(str, missing[:RANKS_NAMED])) + (", ..." if len(missing) > RANKS_NAMED else "")
        message = f"no trace of {len(missing)} of the {len(ranks)} ranks asked for: {words}"
        chosen.append(WorkerAnswer(error=TraceWarning("ranks_missing", message, len(missing))))
    return chosen


def _engine(
    tasks: Sequence[FileTask], sizes: Sequence[int], options: Options, meter: _Meter
) -> Iterator[tuple[int, WorkerAnswer]]:
    """Return the answers as they arrive, with the index of their task."""
    if not tasks:
        return iter(())
    if options.engine == "dask":
        from .cluster import run_on_cluster

        if options.dask_address is None:
            raise EngineError("--engine dask needs --dask-address, for example tcp://scheduler:8786")
        return run_on_cluster(tasks, options.dask_address)
    jobs = min(len(tasks), options.jobs or _cores())
    plain = sum(_plain_bytes(task.path, size) for task, size in zip(tasks, sizes, strict=True))
    if jobs > 1 and (plain >= PARALLEL_BYTES_MIN or options.jobs is not None):
        from .workers import run_in_processes

        # Big files first, so that none of them runs alone at the end.
        order = sorted(range(len(tasks)), key=lambda index: -sizes[index])
        return run_in_processes(tasks, order, jobs, meter.advance)
    return ((index, read_one(task, meter.of(index))) for index, task in enumerate(tasks))


def _tasks(paths: Sequence[TracePlace], sizes: Sequence[int], options: Options) -> list[FileTask]:
    """Return a task for each file; columns are requested while their estimated size fits."""
    wants = options.keeps_tables or (options.compares_ranks and (len(paths) > 1 or options.makes_tables))
    room: float = TABLES_BYTES_MAX
    tasks = []
    for path, size in zip(paths, sizes, strict=True):
        room -= _plain_bytes(path, size) * COLUMNS_SHARE
        tasks.append(FileTask(path, options.window, options.steps, wants and room >= 0, options.makes_tables))
    return tasks


def _assemble(answers: Sequence[WorkerAnswer], tasks: Sequence[FileTask], options: Options, shelf: Shelf) -> Analysis:
    reports = [answer.report for answer in answers if answer.report is not None]
    tables = tuple(answer.table for answer in answers if answer.report is not None)
    warnings = [answer.error for answer in answers if answer.error is not None]
    pairs = [(table, report) for table, report in zip(tables, reports, strict=True) if table is not None]
    left_out = sum(not task.returns_table for task in tasks) if options.compares_ranks and len(tasks) > 1 else 0
    if left_out:
        message = (
            f"{left_out} of {len(tasks)} traces are too big to compare with the others; each is analyzed by itself"
        )
        warnings.append(TraceWarning("job_incomplete", message, left_out))
    job, times = None, None
    if options.compares_ranks and len(pairs) > 1:
        from ..all_ranks.rank_comparison import compare_ranks

        places = [answer.places for answer in answers if answer.report is not None and answer.table is not None]
        traces = shelf.keep(table for table, _ in pairs)
        job, times = compare_ranks(traces, [report for _, report in pairs], places, shelf)
        if job.what_if:
            for report in reports:
                if report.rank in job.ranks:
                    report.what_if = []  # a bound is not shown beside a replay's answer
    if options.compares_ranks and options.makes_tables:
        _add_critical_time(answers, set() if job is None else set(job.ranks))
    return Analysis(TraceDocument(traces=reports, job=job, warnings=warnings), tables, times)


def _add_critical_time(answers: Sequence[WorkerAnswer], ranks: set[int]) -> None:
    """Add the critical path's time to the tables of traces outside the job of these ranks, each by itself."""
    from ..all_ranks.critical_tables import add_own_critical_time

    for answer in answers:
        report, table, places = answer.report, answer.table, answer.places
        if report is None or report.tables is None or table is None or places is None or report.rank in ranks:
            continue
        add_own_critical_time(table, report.tables, places)


class _Meter:
    """The progress of reading, over all files."""

    def __init__(self, sizes: Sequence[int], progress: Progress | None) -> None:
        self._sizes = sizes
        self._done = [0] * len(sizes)
        self._done_bytes, self._all_bytes = 0, sum(sizes)
        self._files = 0
        self._progress = progress

    def of(self, index: int) -> Callable[[int, int | None], None] | None:
        """Return the progress callback for one file; None when progress is not shown."""
        if self._progress is None:
            return None
        return lambda done, total: self.advance(index, done, total)

    def advance(self, index: int, done: int, total: int | None) -> None:
        if total:
            self._show(index, min(self._sizes[index], self._sizes[index] * done // total))

    def finish(self, index: int) -> None:
        self._files += 1
        self._show(index, self._sizes[index])

    def _show(self, index: int, done: int) -> None:
        self._done_bytes += done - self._done[index]
        self._done[index] = done
        if self._progress is not None:
            self._progress(self._done_bytes, self._all_bytes, self._files, len(self._sizes))


def _size(path: TracePlace) -> int:
    if isinstance(path, Url):
        return path.size
    try:
        return path.stat().st_size
    except OSError:
        return 0  # reading it will report the problem


def _plain_bytes(path: TracePlace, size: int) -> int:
    """Return the estimated bytes of JSON in a file; a remote one's name is believed, since opening it takes long."""
    if size == 0:
        return 0  # a pipe has no size, and bytes read from it here would be missing later
    if isinstance(path, Url):
        return size * COMPRESSION_RATIO if path.name.endswith((".gz", ".zst")) else size
    try:
        with path.open("rb") as file:
            head = file.read(4)
    except OSError:
        return 0
    return size * COMPRESSION_RATIO if head.startswith(COMPRESSED_HEADS) else size


def _cores() -> int:
    return len(os.sched_getaffinity(0))
