"""Traces built row by row, for what no real trace shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

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

__all__ = ["build"]


def build(
    device: Sequence[tuple[Any, ...]] = (),
    host: Sequence[tuple[Any, ...]] = (),
    steps: Sequence[tuple[int, int, int]] = (),
    collectives: Sequence[CollectiveColumns] = (),
    **fields: Any,
) -> Trace:
    """Return a trace.

    Device rows are (start, end, work[, name[, launch[, collective[, device]]]]), host rows (start, end, kind[, name
    [, thread[, collective]]]), steps (number, start, end).
    """
    names: dict[str, int] = {}
    threads: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    def device_row(start: int, end: int, work: Work, name: str = "k", launch: int = NONE, collective: int = NONE, at=0):
        return start, end, WORKS.index(work), number(name), launch, collective, at

    def host_row(start: int, end: int, kind: HostKind, name: str = "h", thread: str = "main", collective: int = NONE):
        return start, end, int(kind), number(name), threads.setdefault(thread, len(threads)), collective

    d = np.array(sorted(device_row(*row) for row in device), dtype=np.int64).reshape(-1, 7).T
    h = np.array(sorted(host_row(*row) for row in host), dtype=np.int64).reshape(-1, 6).T
    return Trace(
        file="built.json",
        names=tuple(names),
        threads=tuple(("1", thread) for thread in threads),
        collectives=tuple(collectives),
        device=DeviceRows(
            start_ns=d[0],
            end_ns=d[1],
            work=d[2].astype(np.uint8),
            name=d[3].astype(np.int32),
            device=d[6].astype(np.int32),
            stream=np.zeros(d.shape[1], dtype=np.int64),
            correlation=np.full(d.shape[1], NONE, dtype=np.int64),
            launch_ns=d[4],
            collective=d[5].astype(np.int32),
            grid=np.full(d.shape[1], NONE, dtype=np.int32),
        ),
        host_rows=HostRows(
            start_ns=h[0],
            end_ns=h[1],
            kind=h[2].astype(np.uint8),
            name=h[3].astype(np.int32),
            thread=h[4].astype(np.int32),
            correlation=np.full(h.shape[1], NONE, dtype=np.int64),
            collective=h[5].astype(np.int32),
        ),
        steps=tuple(StepMark(*step) for step in steps),
        **fields,
    )
