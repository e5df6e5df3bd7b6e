"""The simplest reader there could be: the whole file by `json`, one row after the other.

Slow and without bounds on purpose.  It exists so that the fast reader has something to agree with.
"""

from __future__ import annotations

import gzip
import json
from fractions import Fraction
from pathlib import Path
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
    SyncRows,
    Trace,
)
from pacecar.ledger.classification import classify_device

__all__ = ["plain_read"]

OLD_CATEGORIES = {
    "kernel": "kernel",
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime",
    "operator": "cpu_op",
}
"""torch 1.8 and 1.9 wrote "Kernel", "Memcpy", ..."""


WAITS = ("device", "stream", "correlation", "wait_on_stream", "wait_on_cuda_event_record_corr_id")
SYNCS = ["Event Sync", "Stream Wait Event", "Stream Sync", "Context Sync"]


def nanoseconds(number: str | float) -> int:
    """Return microseconds as whole nanoseconds, from the digits in the file."""
    return round(Fraction(str(number)) * 1000)


def plain_read(path: Path) -> Trace:
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    document = json.loads(data, parse_float=str, parse_int=str)
    events: list[dict[str, Any]] = document["traceEvents"] if isinstance(document, dict) else document
    header: dict[str, Any] = document if isinstance(document, dict) else {}
    distributed = header.get("distributedInfo") or {}
    names: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    collectives: dict[CollectiveColumns, int] = {}
    grids: dict[tuple[int, ...], int] = {}
    syncs: list[tuple[int, ...]] = []
    device: list[tuple[int, ...]] = []
    host: list[tuple[int, ...]] = []
    steps: list[StepMark] = []
    launches: dict[int, int] = {}
    low: int | None = None
    high: int | None = None
    for event in events:
        if event.get("ph") != "X" or "ts" not in event:
            continue
        category = str(event.get("cat", "")).lower()
        category = OLD_CATEGORIES.get(category, category)
        if category in ("trace", ""):
            continue
        name, args = str(event.get("name", "")), event.get("args") or {}
        start = nanoseconds(event["ts"])
        end = start + nanoseconds(event.get("dur", 0))
        low, high = min(low or start, start), max(high or end, end)
        correlation = int(args.get("correlation", NONE))
        collective = NONE
        if "Collective name" in args:
            meta = _collective(args)
            collective = collectives.setdefault(meta, len(collectives))
        linked = "record_param_comms" if collective != NONE else None
        work = classify_device(category, name, linked)
        if work is not None:
            row = (start, end, WORKS.index(work), names.setdefault(name, len(names)))
            where = (int(args.get("device", 0)), int(args.get("stream", event.get("tid", 0))))
            shape = tuple(int(size) for size in args["grid"]) if isinstance(args.get("grid"), list) else None
            grid = NONE if shape is None else grids.setdefault(shape, len(grids))
            device.append((*row, *where, correlation, collective, grid))
            continue
        if category == "cuda_sync":
            waits = (int(args.get(key, NONE)) for key in WAITS)
            syncs.append((start, end, SYNCS.index(name), *waits))
            continue
        kind = _host_kind(category, name)
        if kind is None:
            continue
        if kind is HostKind.LAUNCH:
            launches.setdefault(correlation, start)
        if name.startswith("ProfilerStep#") and kind is HostKind.ANNOTATION:
            steps.append(StepMark(int(name.partition("#")[2]), start, end))
        thread = threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(threads))
        host.append((start, end, kind, names.setdefault(name, len(names)), thread, correlation, collective))
    device.sort(key=lambda row: row[:2])
    host.sort(key=lambda row: row[:2])
    d = np.array(device, dtype=np.int64).reshape(-1, 9).T
    h = np.array(host, dtype=np.int64).reshape(-1, 7).T
    s = np.array(sorted(syncs, key=lambda row: row[0]), dtype=np.int64).reshape(-1, 8).T
    launched = [launches.get(int(c), NONE) if c != NONE else NONE for c in d[6]]
    return Trace(
        file=str(path),
        rank=_whole(distributed.get("rank")),
        world_size=_whole(distributed.get("world_size")),
        backend=distributed.get("backend"),
        gpus=tuple(str(p.get("name")) for p in header.get("deviceProperties") or []),
        names=tuple(names),
        threads=tuple(threads),
        collectives=tuple(collectives),
        grids=tuple(grids),
        device=DeviceRows(
            start_ns=d[0],
            end_ns=d[1],
            work=d[2].astype(np.uint8),
            name=d[3].astype(np.int32),
            device=d[4].astype(np.int32),
            stream=d[5],
            correlation=d[6],
            launch_ns=np.array(launched, dtype=np.int64),
            collective=d[7].astype(np.int32),
            grid=d[8].astype(np.int32),
        ),
        host_rows=HostRows(
            start_ns=h[0],
            end_ns=h[1],
            kind=h[2].astype(np.uint8),
            name=h[3].astype(np.int32),
            thread=h[4].astype(np.int32),
            correlation=h[5],
            collective=h[6].astype(np.int32),
        ),
        syncs=SyncRows(s[0], s[1], s[2].astype(np.uint8), s[3].astype(np.int32), s[4], s[5], s[6], s[7]),
        steps=tuple(sorted(steps, key=lambda step: step.start_ns)),
        start_ns=low,
        end_ns=high,
        wall_offset_ns=_whole(header.get("baseTimeNanoseconds")),
        events=len(events),
    )


def _whole(text: object) -> int | None:
    return None if text is None else int(str(text))


def _collective(args: dict[str, Any]) -> CollectiveColumns:
    ranks = str(args.get("Process Group Ranks", "")).strip("[]")
    return CollectiveColumns(
        operation=str(args["Collective name"]),
        bytes=None,  # the fast reader's tests look at the conversion of types
        dtype=args.get("dtype"),
        group=args.get("Process Group Name"),
        group_size=_whole(args.get("Group size")),
        ranks=None if not ranks or "..." in ranks else tuple(int(r) for r in ranks.split(",")),
        sequence=_whole(args.get("Seq")),
        source_rank=_whole(args.get("Src Rank")),
        destination_rank=_whole(args.get("Dst Rank")),
    )


def _host_kind(category: str, name: str) -> HostKind | None:
    if category in ("cpu_op", "user_annotation"):
        if name.startswith("enumerate(DataLoader)#"):
            return HostKind.LOADER
        if name.startswith("Optimizer."):
            return HostKind.OPTIMIZER
        if name.startswith(("gloo:", "ucc:", "mpi:")):
            return HostKind.COLLECTIVE_WORK
        if category == "user_annotation" or name.startswith("ProfilerStep#"):  # torch 1.8 called everything an operator
            return HostKind.ANNOTATION
        if name.startswith(("c10d::", "_c10d_functional::", "c10d_functional::")) or name == "record_param_comms":
            return HostKind.COLLECTIVE_CALL
        return HostKind.OPERATOR
    if category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
        if "Synchronize" in name or "EventQuery" in name:
            return HostKind.SYNC
        return HostKind.LAUNCH if "Launch" in name or "Memcpy" in name or "Memset" in name else HostKind.RUNTIME
    return None
