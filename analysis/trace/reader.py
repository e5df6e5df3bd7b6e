"""Reads a trace file into a `Trace` of columns, in memory bounded by the rows that are kept.

    file -> compressed_source -> event_stream -> rows -> assemble -> Trace
            bytes                events          numbers             columns

`json.load` needs fifty times the file in memory and a second for ten megabytes, so the file is streamed in pieces.  A
damaged file gives what precedes the damage, with a warning that locates it.  A file that is not a trace raises an error
with the reason.

Left out: what is computed from the rows (`pacecar.analysis`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import numpy as np

from .assemble import device_rows, host_rows, sync_rows
from .column_parts import Numbers
from .columns import NONE, CollectiveColumns, DeviceRows, HostRows, Notes, Trace
from .decoding.compressed_source import TraceError, TraceSource
from .decoding.event_stream import EventStreamReader
from .decoding.header import TraceHeader, read_header
from .decoding.remote_file import TracePlace
from .rows import Rows
from .steps import steps_of
from .times import ImpreciseTimesError

__all__ = ["TraceError", "read_trace"]


def read_trace(
    path: TracePlace, *, progress: Callable[[int, int | None], None] | None = None, details: bool = False
) -> Trace:
    """Return the trace in `path`: Chrome JSON as kineto writes it, plain, gzip or zstd (told by its first bytes).

    `progress` is called with how many bytes of the file were read and its size.  `details` adds the columns
    that only tables need (shapes, modules, stacks, memory), which takes up to twice as long.  Raises TraceError if the
    file is not a trace; smaller problems are in `Trace.warnings`.
    """
    notes = Notes()
    document, rows = _beginning(TraceSource(path, progress), notes, details=details)
    for batch in document.batches():
        try:
            rows.add(batch)
        except ImpreciseTimesError:
            rows.add(document.exactly())
    rows.finish()
    if document.is_array and not rows.has_phases and (document.read or notes.warnings()):
        raise TraceError(f"{path}: not a trace: a list, but not of events")
    header = read_header(document.before, document.after, path, notes)
    return _build(path, document, rows, header, notes)


def _beginning(source: TraceSource, notes: Notes, *, details: bool) -> tuple[EventStreamReader, Rows]:
    if not details:
        return EventStreamReader(source, notes), Rows(notes)
    # Imported here: decoders take milliseconds to make, and most calls do not need these.
    from .details.detail_events import DETAILED
    from .details.detail_rows import DetailRows

    return EventStreamReader(source, notes, DETAILED), Rows(notes, DetailRows())


def _build(path: TracePlace, document: EventStreamReader, rows: Rows, header: TraceHeader, notes: Notes) -> Trace:
    if document.read == 0:
        notes.add("no_events", "the trace has no events")
    host, launches = host_rows(rows)
    device, grids = device_rows(rows, launches)
    collectives = [_with_ranks(collective, header) for collective in rows.collectives]
    threads = tuple((str(pid), str(tid)) for pid, tid in rows.threads)
    device, host, collectives = _only_used(device, host, collectives)
    return Trace(
        file=str(path),
        rank=header.rank,
        world_size=header.world_size,
        backend=header.backend,
        host=header.host,
        gpus=header.gpus,
        names=tuple(rows.names.texts),
        threads=threads,
        collectives=tuple(collectives),
        grids=grids,
        device=device,
        host_rows=host,
        syncs=sync_rows(rows),
        steps=steps_of(rows.names.texts, host),
        start_ns=rows.low,
        end_ns=rows.high,
        wall_offset_ns=header.wall_offset_ns,
        has_integer_microseconds=rows.low is not None and not rows.has_fractions,
        is_truncated=document.is_truncated,
        events=document.read,
        warnings=notes.warnings(),
        details=None if rows.details is None else rows.details.finish(threads),
    )


def _with_ranks(collective: CollectiveColumns, header: TraceHeader) -> CollectiveColumns:
    """Return the collective with its group's data from the header where the event lacks it.

    If the header lists a single group of all ranks, it must be the collective's.
    """
    group = collective.group
    if group is None and len(header.groups) == 1 and header.world_size == len(next(iter(header.groups.values()))):
        group = next(iter(header.groups))
    ranks = header.groups.get(group) if group is not None else None
    if ranks is None or collective.group_size not in (None, len(ranks)):
        return collective
    return msgspec.structs.replace(
        collective, group=group, ranks=ranks if collective.ranks is None else collective.ranks, group_size=len(ranks)
    )


def _only_used(
    device: DeviceRows, host: HostRows, collectives: list[CollectiveColumns]
) -> tuple[DeviceRows, HostRows, list[CollectiveColumns]]:
    """Return the rows and the distinct collectives that they refer to, renumbered.

    Annotations added collectives that no row uses, and ranks from the header made some collectives equal.
    """
    numbers: Numbers[CollectiveColumns] = Numbers()
    renumbered = np.full(len(collectives) + 1, NONE, dtype=np.int32)  # the last place is for NONE
    for number in np.unique(np.concatenate((device.collective, host.collective))).tolist():
        if number != NONE:
            renumbered[number] = numbers[collectives[number]]
    return (
        replace(device, collective=renumbered[device.collective]),
        replace(host, collective=renumbered[host.collective]),
        list(numbers),
    )
