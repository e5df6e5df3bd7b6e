"""Trace files as torch writes them, drawn: `write_trace(path, "cc..AAcc", rank=0)` is one rank on one stream.

One character is a millisecond.  c compute, m copy, d waiting for data (on the host), o optimizer (on the host), `.`
nothing; a run of A is an all-reduce, of G an all-gather.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["BEAT_NS", "document", "write_trace"]

BEAT_NS = 1_000_000
START_US = 5_000_000.25

_KERNELS = {
    "c": ("kernel", "ampere_sgemm_128x64_nn"),
    "m": ("gpu_memcpy", "Memcpy HtoD (Pageable -> Device)"),
    "A": ("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*)"),
    "G": ("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevComm*)"),
}
_HOST = {
    "d": "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__",
    "o": "Optimizer.step#AdamW.step",
}
_COLLECTIVES = {"A": "allreduce", "G": "_allgather_base"}


def document(
    drawing: str | Sequence[str],
    *,
    rank: int | None = None,
    world_size: int | None = None,
    steps: Sequence[tuple[int, int]] = (),
    offset_beats: int = 0,
    names: dict[str, str] | None = None,
) -> dict[str, Any]:
    """Return the trace of one rank; lanes of `drawing` are streams, `steps` are beats [first, last)."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, first: int, last: int, pid: int, tid: int, **args: object) -> None:
        where = {"ts": START_US + (first + offset_beats) * 1000, "dur": (last - first) * 1000, "pid": pid, "tid": tid}
        events.append({"ph": "X", "cat": category, "name": name, **where, "args": args})

    for stream, lane in enumerate([drawing] if isinstance(drawing, str) else drawing, start=7):
        for run in re.finditer(r"([^.])\1*", lane):
            letter, (first, last) = run.group(1), run.span()
            if letter in _HOST:
                add("user_annotation", _HOST[letter], first, last, 100, 100)
                continue
            category, name = _KERNELS[letter]
            extra: dict[str, object] = {"device": 0, "stream": stream, "correlation": len(events) + 1}
            if letter in _COLLECTIVES:
                extra |= {"Collective name": _COLLECTIVES[letter], "In msg nelems": 1_000_000, "dtype": "Float"}
                extra |= {"Out msg nelems": 1_000_000, "Group size": world_size or 2, "Process Group Name": "0"}
            add(category, (names or {}).get(letter, name), first, last, 0, stream, **extra)
    for number, (first, last) in enumerate(steps, start=3):
        add("user_annotation", f"ProfilerStep#{number}", first, last, 100, 100)
    found: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}]}
    if rank is not None:
        found["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size or 2}
    return {**found, "baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events}


def write_trace(path: Path, drawing: str | Sequence[str], **options: Any) -> Path:
    """Write the trace, gzipped if `path` says so, and return the path."""
    data = json.dumps(document(drawing, **options)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
