"""Defines the columns that hold a trace file in memory: `Trace`, `DeviceRows`, `HostRows` and `SyncRows`.

A trace of four gigabytes contains a few hundred megabytes of numbers and a few thousand strings that repeat.  So an
event is a row of integers here, and each string is kept once.  Everything that no analysis needs (flow arrows, python
frames, counters, arguments) is dropped while the file is read.  Times are integers of nanoseconds on the file's own
axis; `Trace.wall_offset_ns` converts them to the epoch if the file says how.

Left out: how files are read (`reader`), and what is computed from the rows (`pacecar.analysis`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import Work

from .details.detail_columns import TraceDetails

__all__ = [
    "NONE",
    "WORKS",
    "CollectiveColumns",
    "DeviceRows",
    "Effect",
    "HostKind",
    "HostRows",
    "Notes",
    "StepMark",
    "SyncKind",
    "SyncRows",
    "Trace",
    "TraceWarning",
]

NONE = -1
"""A missing value in a column of integers; no time or name is ever -1."""

WORKS: tuple[Work, ...] = tuple(Work)
"""The column `DeviceRows.work` holds indices into this."""


class HostKind(IntEnum):
    """The kind of a host row, in `HostRows.kind`."""

    OPERATOR = 0  # cpu_op
    COLLECTIVE_CALL = 1  # the call that starts a collective: c10d::..., record_param_comms
    COLLECTIVE_WORK = 2  # the work of a host process group (gloo, ucc, mpi) on its own threads
    LOADER = 3  # enumerate(DataLoader)#...__next__
    OPTIMIZER = 4  # Optimizer.step#..., Optimizer.zero_grad#...
    CHECKPOINT = 5  # an annotation that names a checkpoint
    ANNOTATION = 6  # any other user_annotation
    LAUNCH = 7  # a runtime or driver call that puts work on a device (cudaLaunchKernel, cudaMemcpyAsync, hipLaunch...)
    SYNC = 8  # a runtime or driver call that waits for a device (cudaStreamSynchronize, cudaDeviceSynchronize, ...)
    RUNTIME = 9  # any other runtime or driver call


class SyncKind(IntEnum):
    """CUPTI's four types of synchronization, in `SyncRows.kind`."""

    EVENT = 0  # the host waits for an event: cudaEventSynchronize, cudaEventQuery
    STREAM_WAIT = 1  # a stream waits for an event: cudaStreamWaitEvent
    STREAM = 2  # the host waits for a stream
    CONTEXT = 3  # the host waits for all streams of the device


class CollectiveColumns(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a collective, as far as the trace has it; equal ones are kept once.

    `operation` is normalized (all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
    send, recv, send_recv, barrier, or the trace's own word).  `bytes` is what nccl-tests calls the size: the larger of
    input and output for one rank.  `ranks` are global ranks, as are `source_rank` of a recv and `destination_rank` of
    a send.  `sequence` counts the group's collectives; sends and receives count separately on each rank, for all
    peers together, so the two sides differ.
    """

    operation: str
    bytes: int | None = None
    dtype: str | None = None
    group: str | None = None
    group_size: int | None = None
    ranks: tuple[int, ...] | None = None
    sequence: int | None = None
    source_rank: int | None = None
    destination_rank: int | None = None


class StepMark(msgspec.Struct, frozen=True):
    """A step as the trace marks it (ProfilerStep#N on a host thread); [start_ns, end_ns)."""

    number: int
    start_ns: int
    end_ns: int


Effect = Literal["said", "left_out", "cut", "unknown", "refused"]
"""The effect on the figures: none; rows were left out; rows or the record were cut short; a part of the figures is
unknown; or the file was not analyzed."""


class TraceWarning(msgspec.Struct, frozen=True):
    """A problem that the numbers do not show.  `code` is stable and in lower_case; `message` is for people."""

    code: str
    message: str
    count: int = 1
    effect: Effect = "said"

    @property
    def line(self) -> str:
        """The message, with the count if it is more than one and not in the message."""
        is_said = self.count == 1 or re.search(rf"\b{self.count}\b", self.message) is not None
        return self.message if is_said else f"{self.message} ({self.count} in all)"


class Notes:
    """Counts the problems of a trace: one warning for each code, in the order of first occurrence.

    A list of every bad event would be as long as a broken file.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[str, Effect]] = {}

    def add(self, code: str, message: str, count: int = 1, effect: Effect = "said") -> None:
        """Count `code`; the first message and effect stay."""
        if count:
            self._counts[code] = self._counts.get(code, 0) + count
            self._first.setdefault(code, (message, effect))

    def warnings(self) -> tuple[TraceWarning, ...]:
        """Return one warning for each code."""
        return tuple(
            TraceWarning(code, message, self._counts[code], effect) for code, (message, effect) in self._first.items()
        )


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Work on devices, sorted by start.  All columns have the same length n.

    `work` indexes WORKS.  `name` indexes `Trace.names`.  `launch_ns` is when the host began to launch the row, NONE
    if unknown.  `collective` indexes `Trace.collectives`, NONE for none.  `correlation` is the
    trace's own number, NONE for none.  `grid` indexes `Trace.grids`, the blocks of threads that a kernel was launched
    with, NONE if unknown and for copies.  Rows with no duration are kept; rows that are not work
    (annotations, synchronization) are not.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    work: NDArray[np.uint8]
    name: NDArray[np.int32]
    device: NDArray[np.int32]
    stream: NDArray[np.int64]
    correlation: NDArray[np.int64]
    launch_ns: NDArray[np.int64]
    collective: NDArray[np.int32]
    grid: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class HostRows:
    """Rows of host threads, sorted by start.  `kind` holds HostKind, `thread` indexes `Trace.threads`."""

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    kind: NDArray[np.uint8]
    name: NDArray[np.int32]
    thread: NDArray[np.int32]
    correlation: NDArray[np.int64]
    collective: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class SyncRows:
    """Waits for events, streams and devices as CUPTI recorded them, sorted by start.  They are not work.

    torch writes them only with `enable_cuda_sync_events`.  `kind` holds SyncKind.  `stream` is the stream that
    waits (STREAM_WAIT) or is waited for (STREAM).  `correlation` is that of the runtime call.  For an
    event, `on_stream` is the stream that recorded it and `on_record` the correlation of its cudaEventRecord.  Each is
    NONE if unknown: kineto before September 2023 wrote no `on_record`, and CUDA 12.9 and later give no `on_stream`.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    kind: NDArray[np.uint8]
    device: NDArray[np.int32]
    stream: NDArray[np.int64]
    correlation: NDArray[np.int64]
    on_stream: NDArray[np.int64]
    on_record: NDArray[np.int64]

    @classmethod
    def empty(cls) -> SyncRows:
        """Return no rows, as of a trace that was recorded without them."""
        none = np.empty(0, dtype=np.int64)
        return cls(none, none, none.astype(np.uint8), none.astype(np.int32), none, none, none, none)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One rank's trace file.

    `gpus` are the device names of the header.  `threads` are (pid, tid) as the file spells them.  `start_ns` and
    `end_ns` bound every complete event that was read, kept or not; None when there was none.  `events` counts what
    was read.
    """

    file: str
    rank: int | None = None
    world_size: int | None = None
    backend: str | None = None
    host: str | None = None
    gpus: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    threads: tuple[tuple[str, str], ...] = ()
    collectives: tuple[CollectiveColumns, ...] = ()
    grids: tuple[tuple[int, ...], ...] = ()
    device: DeviceRows
    host_rows: HostRows
    syncs: SyncRows = field(default_factory=SyncRows.empty)
    steps: tuple[StepMark, ...] = ()
    start_ns: int | None = None
    end_ns: int | None = None
    wall_offset_ns: int | None = None
    has_integer_microseconds: bool = False
    is_truncated: bool = False
    is_condensed: bool = False
    """Whether a row stands for many kernels or operators (`condensed_trace`)."""
    is_device_complete: bool = True
    """Whether at most single rows of device work are missing; otherwise idle time may be lost work."""
    events: int = 0
    warnings: tuple[TraceWarning, ...] = field(default=())
    details: TraceDetails | None = None
    """The columns that only tables need; None unless requested."""

    @property
    def has_device(self) -> bool:
        """Whether any work ran on a device; else this is a CPU job and its operators are the work."""
        return len(self.device.start_ns) > 0
