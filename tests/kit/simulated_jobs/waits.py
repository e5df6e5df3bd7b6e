"""Writes the waits that CUPTI records where `enable_cuda_sync_events` is set.

A row is as long as the runtime call that it belongs to: cudaStreamWaitEvent returns at once, a synchronization when it
is over.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.profiler.trace.columns import NONE, SyncKind, SyncRows

from .instructions import ALL, Code, Program

__all__ = ["END_RECORD", "START_RECORD", "START_WAIT", "sync_rows"]

START_RECORD, START_WAIT, END_RECORD = 1, 2, 3
"""Of an exchange's calls: the record of the event that its stream waits for, that wait, and the record of its end."""

Times = NDArray[np.int64]


def sync_rows(program: Program, place: Times, correlations: int, call: Times, called: Times, device: int) -> SyncRows:
    """Return the rows of the recorded instructions at `place`, whose calls last from `call` to `called`.

    `correlations` are set aside for each instruction.
    """
    n = len(program)
    rows: list[tuple[int, ...]] = []
    recorded = {one.event: (at, one) for at, one in enumerate(program.instructions) if one.code in _RECORDING}
    for at, one in enumerate(program.instructions):
        kind = _KINDS.get(one.code)
        if kind is None:
            continue
        offset, on_stream, on_record, stream = 0, NONE, NONE, one.stream
        if one.code == Code.WAIT:
            if one.event not in recorded:
                continue
            source, recorder = recorded[one.event]
            on_stream = recorder.stream
            on_record = source * correlations + (0 if recorder.code == Code.RECORD else END_RECORD)
        elif one.code != Code.SYNC:
            offset, on_stream, on_record = START_WAIT, one.on_stream, at * correlations + START_RECORD
        elif one.stream == ALL:
            kind, stream = SyncKind.CONTEXT, NONE
        for row in range(at, len(place), n):
            start, end = int(call[row]), int(called[row])
            if offset:
                start, end = start - 4_000, start - 3_100
            first = (int(place[row]) - at) * correlations
            record = on_record if on_record == NONE else first + on_record
            number = int(place[row]) * correlations + offset
            rows.append((start, end, kind, device, stream, number, on_stream, record))
    rows.sort()
    columns = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    return SyncRows(columns[0], columns[1], columns[2].astype(np.uint8), columns[3].astype(np.int32), *columns[4:])


_RECORDING = (Code.RECORD, Code.COLLECTIVE, Code.SEND, Code.RECV)
_KINDS = {
    Code.WAIT: SyncKind.STREAM_WAIT,
    Code.COLLECTIVE: SyncKind.STREAM_WAIT,
    Code.SEND: SyncKind.STREAM_WAIT,
    Code.RECV: SyncKind.STREAM_WAIT,
    Code.SYNC: SyncKind.STREAM,
}
