"""Writes every list of the document as a CSV file of its own, for spreadsheets and data frames.

`kernels.csv` has a line for each kernel of each trace, `operators.csv` for each operator, and so on.  A line begins
with its file and rank.  Columns are the fields of the document with their names and order; lists inside a row have
files of their own, with a reference to the row; an empty cell is unknown.  UTF-8, one header line, Unix line ends.

Left out: everything except lists and traces.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import get_args, get_origin

import msgspec

from pacecar.safe_files import FOLDER_MODE, open_folder, output

from ..document.report import TraceDocument, TraceReport
from ..document.report_tables import TraceTables

__all__ = ["csv_tables", "write_csv"]

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]


def write_csv(document: TraceDocument, folder: Path) -> list[Path]:
    """Write the lists of `document` that have rows into `folder`, which is made, and return the files.

    Raises OSError.
    """
    os.close(open_folder(folder, make_mode=FOLDER_MODE))
    paths = []
    for name, rows in csv_tables(document).items():
        path = folder / f"{name}.csv"
        with output(path) as file:
            file.write(_text(rows).encode())
        paths.append(path)
    return paths


def csv_tables(document: TraceDocument) -> dict[str, list[Row]]:
    """Return the rows of each file by name; files without rows are left out."""
    found: dict[str, list[Row]] = {}

    def add(name: str, where: Row, items: Iterable[object]) -> None:
        found.setdefault(name, []).extend(_row(where, item) for item in items)

    for report in document.traces:
        where: Row = {"file": report.file, "rank": report.rank}
        found.setdefault("traces", []).append(_row({}, report))
        for name in ("steps", "collectives", "families", "gaps", "what_if", "warnings"):
            add(name, where, getattr(report, name))
        _add_tables(found, report, where)
    job = document.job
    if job is not None:
        found["job"] = [_row({}, job)]
        for name in ("clocks", "shares", "stragglers", "critical_path", "what_if", "incidents", "all_to_all"):
            add(f"job_{name}", {}, getattr(job, name))
        add("job_collectives", {}, job.collectives)
        for number, instance in enumerate(job.instances):
            add("job_instances", {"number": number}, [instance])
            add("job_arrivals", {"number": number, "operation": instance.operation}, instance.arrivals)
    add("communicators", {}, document.communicators)
    comparison = document.comparison
    if comparison is not None:
        for name in ("headings", "families", "collectives", "kernels", "operators", "operators_host"):
            add(f"compared_{name}", {"per": comparison.per}, getattr(comparison, name))
    return {name: rows for name, rows in found.items() if rows}


def _add_tables(found: dict[str, list[Row]], report: TraceReport, where: Row) -> None:
    tables = report.tables
    if tables is None:
        return
    for name in ("kernels", "operators", "roofline", "memory", "annotations"):
        found.setdefault(name, []).extend(_row(where, item) for item in getattr(tables, name))
    for kernel in tables.kernels:
        of = {**where, "name": kernel.name, "work": kernel.work}
        found.setdefault("kernel_launchers", []).extend(_row(of, item) for item in kernel.launchers)
    for device in tables.memory:
        of = {**where, "device": device.device}
        found.setdefault("memory_points", []).extend(_row(of, item) for item in device.points)
    if tables.launches is not None:
        found.setdefault("launches", []).append(_row(where, tables.launches))
        found.setdefault("launch_queues", []).extend(_row(where, queue) for queue in tables.launches.queues)


def _row(where: Row, item: object) -> Row:
    """Return the single-valued fields of a struct; those of nested structs as "field.field"."""
    return {**where, **dict(_cells(item, ""))}


def _cells(item: object, prefix: str) -> Iterator[tuple[str, Cell]]:
    assert isinstance(item, msgspec.Struct)
    for field, is_list in _columns(type(item)):
        value = getattr(item, field)
        if isinstance(value, msgspec.Struct):
            if not isinstance(value, TraceTables):  # they have files of their own
                yield from _cells(value, f"{prefix}{field}.")
        elif is_list:
            yield f"{prefix}{field}", " ".join("" if each is None else str(each) for each in value)
        else:
            yield f"{prefix}{field}", value


@cache
def _columns(kind: type[msgspec.Struct]) -> list[tuple[str, bool]]:
    """Return the fields that fit a cell, and which of them are lists of strings or numbers."""
    found = []
    for field in msgspec.structs.fields(kind):
        is_list = get_origin(field.type) is list
        if not is_list or not _holds_structs(get_args(field.type)[0]):
            found.append((field.name, is_list))
    return found


def _holds_structs(kind: object) -> bool:
    return any(isinstance(one, type) and issubclass(one, msgspec.Struct) for one in (kind, *get_args(kind)))


def _text(rows: Sequence[Row]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    stream = io.StringIO()
    writer = csv.DictWriter(stream, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()
