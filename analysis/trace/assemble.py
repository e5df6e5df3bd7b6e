"""Assembles the device and host rows of a trace from the columns of all its batches.

Only after every event has been read is it known which call launched a kernel, which collective the kernel belongs to,
and so whether it is communication.  Rows are sorted by start at the end.  Each pair of name and category is classified
once, not each row.

Left out: how events become columns (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work
from pacecar.ledger.classification import classify_device

from .collectives import from_kernel
from .column_parts import Column, Numbers
from .columns import NONE, WORKS, DeviceRows, HostKind, HostRows, SyncRows
from .decoding.events import grid_of
from .kernel_links import are_external_ids_sound, first_at, innermost
from .row_kinds import host_kind
from .rows import Rows

__all__ = ["Launches", "device_rows", "host_rows", "sync_rows"]

_NO_WORK = 255
_LINKED = "record_param_comms"
_COMMUNICATION = WORKS.index(Work.COMMUNICATION)

Codes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Launches:
    """The calls that put work on a device, in the order of the file."""

    correlation: Column
    start_ns: Column
    thread: Column


def host_rows(rows: Rows) -> tuple[HostRows, Launches]:
    """Return the rows of host threads, sorted by start, and the calls among them that launch work."""
    columns = rows.host
    category, name = columns.pop("category", np.uint8), columns.pop("name", np.int32)
    kind = _classified(rows, category, name, lambda word, text: int(host_kind(word, text)))
    start, thread = columns.pop("start"), columns.pop("thread", np.int32)
    correlation = columns.pop("correlation")
    is_launch = np.flatnonzero(kind == HostKind.LAUNCH)
    launches = Launches(correlation[is_launch], start[is_launch], thread[is_launch])
    order = np.argsort(start, kind="stable")
    sorted_rows = HostRows(
        start_ns=start[order],
        end_ns=columns.pop("end")[order],
        kind=kind[order],
        name=name[order].astype(np.int32),
        thread=thread[order].astype(np.int32),
        correlation=correlation[order],
        collective=columns.pop("collective", np.int32)[order].astype(np.int32),
    )
    return sorted_rows, launches


def device_rows(rows: Rows, launches: Launches) -> tuple[DeviceRows, tuple[tuple[int, ...], ...]]:
    """Return the work on devices, sorted by start, each with its launch and its collective; and `Trace.grids`."""
    columns = rows.device
    category, name = columns.pop("category", np.uint8), columns.pop("name", np.int32)
    correlation, external = columns.pop("correlation"), columns.pop("external")
    collective = columns.pop("collective", np.int32).astype(np.int64)
    linked = _linked(rows, external, correlation)
    described = (collective != NONE) | (linked != NONE)
    work = _classified(rows, category, name, lambda word, text: _work(word, text, None))
    work[described] = _classified(
        rows, category[described], name[described], lambda word, text: _work(word, text, _LINKED)
    )
    launch = first_at(launches.correlation, correlation)
    launched = launch != NONE
    launch_ns, thread = (np.full(len(launch), NONE, dtype=np.int64) for _ in range(2))
    launch_ns[launched] = launches.start_ns[launch[launched]]
    thread[launched] = launches.thread[launch[launched]]
    unsaid = np.flatnonzero((work == _COMMUNICATION) & (collective == NONE))
    collective[unsaid] = _collectives(rows, name[unsaid], linked[unsaid], thread[unsaid], launch_ns[unsaid])
    start = columns.pop("start")
    order = np.argsort(start, kind="stable")
    order = order[work[order] != _NO_WORK]
    grid, grids = _grids(rows, columns.pop("grid", np.int32).astype(np.int32))
    sorted_rows = DeviceRows(
        start_ns=start[order],
        end_ns=columns.pop("end")[order],
        work=work[order],
        name=name[order].astype(np.int32),
        device=columns.pop("device", np.int32)[order].astype(np.int32),
        stream=columns.pop("stream")[order],
        correlation=correlation[order],
        launch_ns=launch_ns[order],
        collective=collective[order].astype(np.int32),
        grid=grid[order],
    )
    return sorted_rows, grids


def sync_rows(rows: Rows) -> SyncRows:
    """Return the waits, sorted by start; a negative stream or correlation, as CUPTI's "invalid", is NONE."""
    columns = rows.syncs
    start = columns.pop("start_ns")
    order = np.argsort(start, kind="stable")
    stream, correlation, on_stream, on_record = (
        np.maximum(columns.pop(name)[order], NONE) for name in ("stream", "correlation", "on_stream", "on_record")
    )
    return SyncRows(
        start_ns=start[order],
        end_ns=columns.pop("end_ns")[order],
        kind=columns.pop("kind", np.uint8)[order].astype(np.uint8),
        device=columns.pop("device", np.int32)[order].astype(np.int32),
        stream=stream,
        correlation=correlation,
        on_stream=on_stream,
        on_record=on_record,
    )


def _grids(rows: Rows, number: NDArray[np.int32]) -> tuple[NDArray[np.int32], tuple[tuple[int, ...], ...]]:
    """Return the rows' indices into the grids that are lists of whole numbers, and those grids."""
    numbers: Numbers[tuple[int, ...]] = Numbers()
    table = np.array([NONE if (grid := grid_of(raw)) is None else numbers[grid] for raw in rows.grids], dtype=np.int32)
    return table[number] if len(table) else number, tuple(numbers)


def _work(category: str, name: str, linked: str | None) -> int:
    work = classify_device(category, name, linked)
    return _NO_WORK if work is None else WORKS.index(work)


def _classified(rows: Rows, category: Column, name: Column, kind: Callable[[str, str], int]) -> Codes:
    """Return `kind` of each row's category and name, called once for each pair that occurs."""
    table = np.zeros((len(rows.names.texts), len(rows.categories.canonical)), dtype=np.uint8)
    table[name, category] = 1
    for text, code in np.argwhere(table).tolist():
        table[text, code] = kind(rows.categories.canonical[code], rows.names.texts[text])
    codes: Codes = table[name, category]
    return codes


def _linked(rows: Rows, external: Column, correlation: Column) -> Column:
    """For each row, return the index of the `record_param_comms` row that it was launched in, NONE for none."""
    if not rows.metadata_rows or not are_external_ids_sound(external, correlation):
        return np.full(len(external), NONE, dtype=np.int64)
    return first_at(np.array(list(rows.metadata_rows), dtype=np.int64), external)


def _collectives(rows: Rows, name: Column, linked: Column, thread: Column, launch_ns: Column) -> Column:
    """Return the collectives of communication rows that do not name their own, each from the best source.

    An annotation has only the bytes of the input.  The operator around it (`c10d::alltoall_base_`) has the output too,
    and the larger one counts.
    """
    numbers = np.array(list(rows.metadata_rows.values()), dtype=np.int64)
    found = np.full(len(name), NONE, dtype=np.int64)
    if len(numbers):
        found = np.where(linked != NONE, numbers[linked], NONE)
    for calls in (rows.described, rows.annotations):
        missing = found == NONE
        found[missing] = innermost(calls, thread[missing], launch_ns[missing])
    for row in np.flatnonzero(found == NONE).tolist():
        found[row] = rows.collectives[from_kernel(rows.names.texts[int(name[row])])]
    known = list(rows.collectives)
    moved = innermost(rows.operators, thread, launch_ns)
    for row in np.flatnonzero((moved != NONE) & (found != NONE)).tolist():
        size, collective = int(moved[row]), known[int(found[row])]
        if collective.group is None and size > (collective.bytes or 0):
            found[row] = rows.collectives[msgspec.structs.replace(collective, bytes=size)]
    return found
