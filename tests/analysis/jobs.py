"""Jobs of several ranks, drawn: `{0: "ccAAAA..", 1: "ccccAA.."}` is two ranks of which the second comes late.

One character is one beat.  c compute, m copy, d waiting for data, o optimizer, k checkpoint, `.` nothing; a run of one
capital letter is one collective, what it means stands in `COLLECTIVES`.  Two lanes of one rank are two streams:
`{0: ("cccc..", "..AAAA")}`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import (
    NONE,
    WORKS,
    CollectiveColumns,
    DeviceRows,
    HostKind,
    HostRows,
    StepMark,
    Trace,
)
from pacecar.ledger.attribution import Work

__all__ = ["BEAT_NS", "COLLECTIVES", "collective_places", "keep_rows", "make_job", "make_trace", "play"]

BEAT_NS = 1_000_000

COLLECTIVES = {
    "A": CollectiveColumns(operation="all_reduce", bytes=4_000_000, dtype="float"),
    "B": CollectiveColumns(operation="all_reduce", bytes=8_000_000, dtype="float"),
    "G": CollectiveColumns(operation="all_gather", bytes=2_000_000, dtype="float"),
    "R": CollectiveColumns(operation="reduce_scatter", bytes=2_000_000, dtype="float"),
    "T": CollectiveColumns(operation="all_to_all", bytes=1_000_000, dtype="float"),
    "P": CollectiveColumns(operation="send_recv"),
    "S": CollectiveColumns(operation="send", bytes=1_000_000),
    "X": CollectiveColumns(operation="broadcast", bytes=1_000_000),
}

_HOST = {"d": HostKind.LOADER, "o": HostKind.OPTIMIZER, "k": HostKind.CHECKPOINT}
_DEVICE = {"c": Work.COMPUTE, "m": Work.COPY}

Drawing = str | Sequence[str]


def make_job(drawings: Mapping[int, Drawing], **options: Any) -> list[Trace]:
    """Return one trace a rank; `options` are those of `make_trace`, each a value for all or a mapping by rank."""
    return [
        make_trace(drawing, rank=rank, **{k: v[rank] if isinstance(v, dict) else v for k, v in options.items()})
        for rank, drawing in drawings.items()
    ]


def make_trace(
    drawing: Drawing,
    *,
    rank: int,
    world_size: int | None = None,
    clock_ns: int = 0,
    host: str | None = None,
    wall_offset_ns: int | None = None,
    group: str | None = None,
    ranks: tuple[int, ...] | None = None,
    has_sequence: bool = False,
    steps: Sequence[tuple[int, int]] = (),
    beat_ns: int = BEAT_NS,
    on_host: bool = False,
) -> Trace:
    """Return the trace of one rank.

    `clock_ns` is what this rank's clock shows when the common one shows zero; `steps` are beats [first, last) of step
    marks; `on_host` makes the collectives a host group's (gloo) and compute operators.
    """
    device: list[tuple[int, int, int, int, int]] = []  # start, end, work, name, collective
    host_rows: list[tuple[int, int, int, int, int]] = []  # start, end, kind, name, collective
    collectives: list[CollectiveColumns] = []
    names = ["kernel", "copy", "collective", "host"]
    lanes = [drawing] if isinstance(drawing, str) else list(drawing)
    for lane in lanes:
        for run in re.finditer(r"(.)\1*", lane):
            start, end = (clock_ns + beat * beat_ns for beat in run.span())
            letter = run.group(1)
            if letter in _HOST:
                host_rows.append((start, end, _HOST[letter], 3, NONE))
            elif letter in _DEVICE and on_host:
                host_rows.append((start, end, HostKind.OPERATOR, 0, NONE))
            elif letter in _DEVICE:
                device.append((start, end, WORKS.index(_DEVICE[letter]), list(_DEVICE).index(letter), NONE))
            elif letter in COLLECTIVES:
                size = len(ranks) if ranks else None
                meta = msgspec.structs.replace(COLLECTIVES[letter], group=group, ranks=ranks, group_size=size)
                if has_sequence:
                    meta = msgspec.structs.replace(meta, sequence=len(collectives))
                collectives.append(meta)
                work = WORKS.index(Work.COMMUNICATION)
                if on_host:
                    host_rows.append((start, end, HostKind.COLLECTIVE_WORK, 2, len(collectives) - 1))
                else:
                    device.append((start, end, work, 2, len(collectives) - 1))
    device.sort(key=lambda row: row[:2])
    host_rows.sort(key=lambda row: row[:2])
    d = np.array(device, dtype=np.int64).reshape(-1, 5).T
    h = np.array(host_rows, dtype=np.int64).reshape(-1, 5).T
    nothing = np.full(d.shape[1], NONE, dtype=np.int64)
    return Trace(
        file=f"rank{rank}.json",
        rank=rank,
        world_size=world_size,
        host=host,
        names=tuple(names),
        threads=(("1", "1"),),
        collectives=tuple(collectives),
        device=DeviceRows(
            start_ns=d[0],
            end_ns=d[1],
            work=d[2].astype(np.uint8),
            name=d[3].astype(np.int32),
            device=np.zeros(d.shape[1], dtype=np.int32),
            stream=nothing,
            correlation=nothing,
            launch_ns=nothing,
            collective=d[4].astype(np.int32),
            grid=np.full(d.shape[1], NONE, dtype=np.int32),
        ),
        host_rows=HostRows(
            start_ns=h[0],
            end_ns=h[1],
            kind=h[2].astype(np.uint8),
            name=h[3].astype(np.int32),
            thread=np.zeros(h.shape[1], dtype=np.int32),
            correlation=np.full(h.shape[1], NONE, dtype=np.int64),
            collective=h[4].astype(np.int32),
        ),
        steps=tuple(StepMark(n, clock_ns + a * beat_ns, clock_ns + b * beat_ns) for n, (a, b) in enumerate(steps)),
        start_ns=clock_ns,
        end_ns=clock_ns + max((len(lane) for lane in lanes), default=0) * beat_ns,
        wall_offset_ns=wall_offset_ns,
        events=len(device) + len(host_rows),
    )


def play(letters: str, works: Sequence[Sequence[int]], *, wire: int = 2, fill: str = "c") -> dict[int, str]:
    """Return the drawings of a job: each rank works `works[rank][i]` beats (at least one) before collective i.

    A collective lasts `wire` beats from the last rank's coming, and all leave it together.
    """
    drawings = dict.fromkeys(range(len(works)), "")
    for index, letter in enumerate(letters):
        for rank, beats in enumerate(works):
            drawings[rank] += fill * beats[index]
        end = max(map(len, drawings.values())) + wire
        drawings = {rank: drawing.ljust(end, letter) for rank, drawing in drawings.items()}
    return drawings


def keep_rows(trace: Trace, keep: NDArray[np.bool_]) -> Trace:
    """Return `trace` with only those device rows: a profiler that began late, ended early or lost some."""
    rows = {column: getattr(trace.device, column)[keep] for column in DeviceRows.__dataclass_fields__}
    return replace(trace, device=DeviceRows(**rows))


def collective_places(trace: Trace) -> NDArray[np.int64]:
    """Return the places of the collectives among the device rows."""
    return np.flatnonzero(trace.device.collective != NONE)
