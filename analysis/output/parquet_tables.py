"""Writes the document's lists and the rows of its traces as Parquet, for SQL (DuckDB, Spark, pandas).

    kernels.parquet, job_shares.parquet, ...   the tables of `csv_tables`
    device_rows/, host_rows/                   the traces themselves, a file for each

The rows have the names of `trace.columns` instead of numbers, no value where it is unknown, and times in nanoseconds on
the clock of the job's first trace if ranks were compared, else on the file's own.  `step` is the mark within which a
row was issued.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from pacecar.safe_files import FOLDER_MODE, open_folder, replacing

from ..reading.parallel_reading import Analysis
from ..trace.columns import NONE, WORKS, DeviceRows, HostKind, HostRows, Trace
from ..trace.steps import step_numbers
from .csv_tables import csv_tables

__all__ = ["write_parquet"]

Columns = Mapping[str, Any]

_OURS = re.compile(r"(?:rank|trace)\d{6,}\.parquet")


def write_parquet(analysis: Analysis, folder: Path) -> None:
    """Write the lists of the document that have rows, and the rows of its traces, into `folder`, which is made.

    Rows of other traces, which an earlier run left there, are removed: a query takes all files.  Raises OSError.
    """
    os.close(open_folder(folder, make_mode=FOLDER_MODE))
    for name, rows in csv_tables(analysis.document).items():
        columns = dict.fromkeys(column for row in rows for column in row)
        _write(folder / f"{name}.parquet", {column: pa.array([row.get(column) for row in rows]) for column in columns})
    clocks = {} if analysis.times is None else analysis.times.clocks
    taken: set[int] = set()
    written: set[Path] = set()
    for number, (report, trace) in enumerate(zip(analysis.document.traces, analysis.tables, strict=True)):
        if trace is None:
            continue
        own, name = None, f"trace{number:06}.parquet"
        if report.rank is not None and report.rank not in taken:  # of two traces of a rank, the first is compared
            own, name = clocks.get(report.rank), f"rank{report.rank:06}.parquet"
            taken.add(report.rank)
        for part, columns in (("device_rows", _device_rows(trace)), ("host_rows", _host_rows(trace))):
            if own is not None:
                columns |= {each: own.common(columns[each]) for each in ("start_ns", "end_ns")}
            os.close(open_folder(folder / part, make_mode=FOLDER_MODE))
            count = len(columns["start_ns"])
            who = {"file": _words([report.file], np.zeros(count, dtype=np.int32)), "rank": _same(report.rank, count)}
            _write(folder / part / name, who | columns)
            written.add(folder / part / name)
    for part in ("device_rows", "host_rows"):
        for path in (folder / part).glob("*.parquet"):
            if path not in written and _OURS.fullmatch(path.name):
                path.unlink()


def _device_rows(trace: Trace) -> dict[str, Any]:
    rows = trace.device
    issued = np.where(rows.launch_ns == NONE, rows.start_ns, rows.launch_ns)
    return {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "launch_latency_ns": _known(rows.start_ns - rows.launch_ns, rows.launch_ns),
        "work": _words(WORKS, rows.work),
        "name": _words(trace.names, rows.name),
        "device": _known(rows.device),
        "stream": _known(rows.stream),
        "correlation": _known(rows.correlation),
        "grid": _words([" ".join(map(str, grid)) for grid in trace.grids], rows.grid),
        "step": _known(step_numbers(trace, issued)),
        **_collective(trace, rows),
    }


def _host_rows(trace: Trace) -> dict[str, Any]:
    rows = trace.host_rows
    return {
        "start_ns": rows.start_ns,
        "end_ns": rows.end_ns,
        "kind": _words([kind.name.lower() for kind in HostKind], rows.kind),
        "name": _words(trace.names, rows.name),
        "thread": _words([" ".join(thread) for thread in trace.threads], rows.thread),
        "correlation": _known(rows.correlation),
        "step": _known(step_numbers(trace, rows.start_ns)),
        **_collective(trace, rows),
    }


def _collective(trace: Trace, rows: DeviceRows | HostRows) -> dict[str, Any]:
    found = trace.collectives
    sizes = np.array([NONE if each.bytes is None else each.bytes for each in found] or [NONE], dtype=np.int64)
    return {
        "collective": _words([each.operation for each in found], rows.collective),
        "bytes": _known(np.where(rows.collective == NONE, NONE, sizes[rows.collective])),
        "group": _words([each.group for each in found], rows.collective),
    }


def _known(values: NDArray[np.integer], of: NDArray[np.integer] | None = None) -> pa.Array:
    """Return the values, none where they (or `of`) are NONE."""
    return pa.array(values, mask=(values if of is None else of) == NONE)


def _same(value: int | None, count: int) -> pa.Array:
    return pa.array(
        np.full(count, NONE if value is None else value, dtype=np.int64), mask=np.full(count, value is None)
    )


def _words(words: Sequence[str | None], numbers: NDArray[np.integer]) -> pa.Array:
    """Return the word of each number, none for NONE."""
    unique = {word: at for at, word in enumerate(dict.fromkeys(word for word in words if word is not None))}
    place = np.array([*(NONE if word is None else unique[word] for word in words), NONE], dtype=np.int32)[numbers]
    return pa.DictionaryArray.from_arrays(pa.array(place, mask=place == NONE), pa.array(list(unique), pa.string()))


def _write(path: Path, columns: Columns) -> None:
    with replacing(path) as file:
        parquet.write_table(pa.table(dict(columns)), file, compression="zstd")
