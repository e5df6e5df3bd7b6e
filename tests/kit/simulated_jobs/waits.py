"""Lists the calls by which a collective waits and is waited for, and the waits that CUPTI records of such calls.

torch lets the stream of a collective wait for the current stream, and records an event after it for whoever waits for
it.  NCCL does the same once more with a stream of its own, on which nothing ever runs: these waits order nothing that
a trace shows, and yet the calls stand in every real trace.  A collective on the current stream needs only NCCL's.

A wait that CUPTI records (`enable_cuda_sync_events`) is as long as its runtime call: cudaStreamWaitEvent returns at
once, a synchronization when it is over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE, SyncKind, SyncRows

from .instructions import ALL, Code, Instruction, Program

__all__ = [
    "CALL_NS",
    "END_RECORD",
    "NCCL_STREAM",
    "START_RECORD",
    "START_WAIT",
    "ExchangeCall",
    "calls_of",
    "sync_rows",
]

START_RECORD, START_WAIT, END_RECORD = 1, 2, 7
"""Numbers of torch's calls among those of an exchange, of which the launch is 0; a wait follows its record."""

CALL_NS = 900
"""How long each of these calls takes."""

NCCL_STREAM = 101
"""NCCL's own stream."""

Times = NDArray[np.int64]


class ExchangeCall(NamedTuple):
    """A call beside the launch of a collective, so far into the time before the launch or after it."""

    number: int
    name: str
    is_after: bool
    share: float
    is_nccl: bool = True

    def start_ns(self, row: Times, inside: Times, called: Times, after: Times) -> Times:
        begin, part = (called, after) if self.is_after else (row, inside)
        start: Times = begin + np.rint(self.share * part).astype(np.int64)
        return start


_CALLS = (
    ExchangeCall(START_RECORD, "cudaEventRecord", is_after=False, share=0.4, is_nccl=False),
    ExchangeCall(START_WAIT, "cudaStreamWaitEvent", is_after=False, share=0.5, is_nccl=False),
    ExchangeCall(3, "cudaEventRecord", is_after=False, share=0.85),
    ExchangeCall(4, "cudaStreamWaitEvent", is_after=False, share=0.9),
    ExchangeCall(5, "cudaEventRecord", is_after=True, share=0.05),
    ExchangeCall(6, "cudaStreamWaitEvent", is_after=True, share=0.1),
    ExchangeCall(END_RECORD, "cudaEventRecord", is_after=True, share=0.3, is_nccl=False),
)


def calls_of(one: Instruction, *, has_nccl_events: bool) -> list[ExchangeCall]:
    """Return the calls of a collective, a send or a receive."""
    own = (START_RECORD, START_WAIT)
    if one.is_batched:  # only torch's, before the launch of the batch
        return [call for call in _CALLS if call.number in own]
    has_own = one.stream != one.on_stream and one.code != Code.BATCH  # what is in a batch had them before
    calls = [call for call in _CALLS if has_nccl_events or not call.is_nccl]
    return [call for call in calls if has_own or call.number not in own]


class _Wait(NamedTuple):
    """A wait of one instruction: which call it is, who waits, for which stream and for which record."""

    offset: int
    kind: SyncKind
    stream: int
    on_stream: int = NONE
    on_record: int = NONE


def sync_rows(
    program: Program, place: Times, correlations: int, starts: dict[int, Times], ends: Times, device: int, *, nccl: bool
) -> SyncRows:
    """Return the waits of the recorded instructions at `place`, for each of which `correlations` are set aside.

    `starts` has when each call began, by its number among those of its instruction; launches and plain calls end at
    `ends`.
    """
    n = len(program)
    rows: list[tuple[int, ...]] = []
    for at, waits in _waits(program, correlations, nccl=nccl).items():
        for wait in waits:
            for row in range(at, len(place), n):
                start = int(starts[wait.offset][row])
                end = start + CALL_NS if wait.offset else int(ends[row])
                first = (int(place[row]) - at) * correlations
                record = NONE if wait.on_record == NONE else first + wait.on_record
                number = int(place[row]) * correlations + wait.offset
                rows.append((start, end, wait.kind, device, wait.stream, number, wait.on_stream, record))
    rows.sort()
    columns = np.array(rows, dtype=np.int64).reshape(-1, 8).T
    return SyncRows(columns[0], columns[1], columns[2].astype(np.uint8), columns[3].astype(np.int32), *columns[4:])


def _waits(program: Program, correlations: int, *, nccl: bool) -> dict[int, list[_Wait]]:
    """Return the waits by place in the program; correlations as in the first step."""
    recorded = {one.event: (at, one) for at, one in enumerate(program.instructions) if one.code in _RECORDING}
    found: dict[int, list[_Wait]] = {}
    for at, one in enumerate(program.instructions):
        number = at * correlations
        if one.code == Code.WAIT and one.event in recorded:
            source, recorder = recorded[one.event]
            record = source * correlations + (0 if recorder.code == Code.RECORD else END_RECORD)
            found[at] = [_Wait(0, SyncKind.STREAM_WAIT, one.stream, recorder.stream, record)]
        elif one.code == Code.SYNC:
            kind, stream = (SyncKind.CONTEXT, NONE) if one.stream == ALL else (SyncKind.STREAM, one.stream)
            found[at] = [_Wait(0, kind, stream)]
        elif Code.COLLECTIVE <= one.code <= Code.BATCH:
            streams = {
                START_WAIT: (one.stream, one.on_stream),
                4: (one.stream, NCCL_STREAM),
                6: (NCCL_STREAM, one.stream),
            }
            found[at] = [
                _Wait(call.number, SyncKind.STREAM_WAIT, *streams[call.number], number + call.number - 1)
                for call in calls_of(one, has_nccl_events=nccl)
                if call.number in streams
            ]
    return found


_RECORDING = (Code.RECORD, Code.COLLECTIVE, Code.SEND, Code.RECV, Code.BATCH)
