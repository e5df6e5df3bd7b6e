"""Writes a trace of columns as the file that torch.profiler would have written: Chrome JSON of kineto.

What the reader drops is written too, as far as a real file is full of it: names of threads, arrows from launches to
kernels, the frame of the whole trace.  Times are written with three decimals of a microsecond, digit by digit.

Sources: kineto's output_json.cpp and torch/csrc/profiler/util.cpp (saveNcclMeta), and the files of torch 2.13.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from pacecar.analysis.trace.columns import NONE, WORKS, CollectiveColumns, HostKind, SyncKind, Trace
from pacecar.ledger.attribution import Work

from .collectives import BATCH, CPU_DTYPE, ELEMENT_BYTES
from .kernels import NCCL
from .layout import Layout

__all__ = ["document_of", "write_job", "write_trace"]

RANKS_LISTED_MAX = 30
"""torch cuts longer lists of ranks in an event's arguments (kTruncatLength); the header has all of them."""

_CATEGORIES = {
    HostKind.OPERATOR: "cpu_op",
    HostKind.COLLECTIVE_CALL: "cpu_op",
    HostKind.COLLECTIVE_WORK: "user_annotation",
    HostKind.LOADER: "user_annotation",
    HostKind.OPTIMIZER: "user_annotation",
    HostKind.CHECKPOINT: "user_annotation",
    HostKind.ANNOTATION: "user_annotation",
    HostKind.LAUNCH: "cuda_runtime",
    HostKind.SYNC: "cuda_runtime",
    HostKind.RUNTIME: "cuda_runtime",
}
_SYNCS = {
    SyncKind.EVENT: "Event Sync",
    SyncKind.STREAM_WAIT: "Stream Wait Event",
    SyncKind.STREAM: "Stream Sync",
    SyncKind.CONTEXT: "Context Sync",
}


def write_job(folder: Path, traces: list[Trace], layout: Layout) -> list[Path]:
    """Write the traces of a job as `rank<r>.pt.trace.json.gz` and return their paths."""
    return [write_trace(folder / f"rank{trace.rank}.pt.trace.json.gz", trace, layout) for trace in traces]


def write_trace(path: Path, trace: Trace, layout: Layout) -> Path:
    """Write one rank's trace, gzipped if `path` says so, and return the path."""
    data = document_of(trace, layout).encode()
    path.write_bytes(gzip.compress(data, compresslevel=1) if path.suffix == ".gz" else data)
    return path


def document_of(trace: Trace, layout: Layout) -> str:
    """Return the text of the file; `layout` has the process groups of the header."""
    before = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": number, "name": name} for number, name in enumerate(trace.gpus)],
        "distributedInfo": _distributed(trace, layout),
        "host_name": trace.host,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": trace.wall_offset_ns,
    }
    members = ",\n".join(f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in before.items())
    events = ",\n  ".join(_events(trace))
    name = json.dumps(f"/tmp/{trace.file}")
    return "{\n" + members + ',\n  "traceEvents": [\n  ' + events + f'\n  ],\n  "traceName": {name}\n}}\n'


def _distributed(trace: Trace, layout: Layout) -> dict[str, object]:
    mine = {group.name: group for group in layout.groups if trace.rank in group.ranks}
    backend = "cpu:gloo" if trace.backend == "gloo" else "cuda:nccl"
    config = [
        {
            "pg_name": name,
            "pg_desc": "default_pg" if name == "0" else "undefined",
            "backend_config": backend,
            "pg_size": len(group.ranks),
            "ranks": list(group.ranks),
        }
        for name, group in sorted(mine.items(), key=lambda item: int(item[0]))
    ]
    facts = {"backend": trace.backend, "rank": trace.rank, "world_size": trace.world_size}
    return facts | {"pg_count": len(config), "pg_config": config}


def _events(trace: Trace) -> Iterator[str]:
    for pid in sorted({pid for pid, _ in trace.threads}):
        name = {"name": "process_name", "ph": "M", "ts": 0, "pid": int(pid), "tid": 0, "args": {"name": "python"}}
        yield json.dumps(name)
    yield from _host_events(trace)
    yield from _device_events(trace)
    yield from _sync_events(trace)
    if trace.start_ns is not None and trace.end_ns is not None:
        yield _event("Trace", "PyTorch Profiler (0)", "Spans", "PyTorch Profiler", trace.start_ns, trace.end_ns, {})


def _event(category: str, name: str, pid: object, tid: object, start: int, end: int, args: dict[str, object]) -> str:
    head = f'"ph": "X", "cat": "{category}", "name": {json.dumps(name)}, "pid": {json.dumps(pid)}'
    times = f'"tid": {json.dumps(tid)}, "ts": {_us(start)}, "dur": {_us(end - start)}'
    return f'{{{head}, {times}, "args": {json.dumps(args)}}}'


def _arrow(phase: str, number: int, pid: int, tid: int, at: int) -> str:
    """Return one end of the arrow from a launch to its kernel."""
    place = f'"pid": {pid}, "tid": {tid}, "ts": {_us(at)}'
    return f'{{"ph": "{phase}", "id": {number}, {place}, "cat": "ac2g", "name": "ac2g", "bp": "e"}}'


def _us(ns: int) -> str:
    whole, rest = divmod(ns, 1_000)
    return f"{whole}.{rest:03d}"


def _host_events(trace: Trace) -> Iterator[str]:
    rows = trace.host_rows
    columns = (rows.start_ns, rows.end_ns, rows.kind, rows.name, rows.thread, rows.correlation, rows.collective)
    for number, (start, end, kind, name, thread, correlation, collective) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True), start=1
    ):
        category = _CATEGORIES[HostKind(kind)]
        args: dict[str, object] = {"External id": number, "Record function id": 0, "Ev Idx": number - 1}
        if category == "cuda_runtime":
            args = {"cbid": 211, "correlation": correlation}
        elif collective != NONE:
            meta = trace.collectives[collective]
            args |= _shapes(meta) if kind == HostKind.COLLECTIVE_WORK else _described(trace, meta)
        pid, tid = (int(part) for part in trace.threads[thread])
        yield _event(category, trace.names[name], pid, tid, start, end, args)
        if kind == HostKind.LAUNCH:
            yield _arrow("s", correlation, pid, tid, start)


def _device_events(trace: Trace) -> Iterator[str]:
    rows = trace.device
    external = _external_ids(trace)
    columns = (rows.start_ns, rows.end_ns, rows.work, rows.name, rows.device, rows.stream, rows.correlation)
    more = (rows.collective, rows.grid, external)
    for start, end, work, name, device, stream, correlation, collective, grid, outer in zip(
        *(column.tolist() for column in (*columns, *more)), strict=True
    ):
        where = {"device": device, "context": 1, "stream": stream, "correlation": correlation}
        args: dict[str, object] = {"External id": outer, **where}
        category = "gpu_memcpy" if WORKS[work] is Work.COPY else "kernel"
        if grid != NONE:
            args |= {"grid": list(trace.grids[grid]), "block": [128, 1, 1]}
        if collective != NONE and trace.collectives[collective] != BATCH:
            args |= _described(trace, trace.collectives[collective])
        yield _event(category, trace.names[name], device, stream, start, end, args)
        yield _arrow("f", correlation, device, stream, start)


def _external_ids(trace: Trace) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """Return for each device row the id of the operator or call that was open innermost when it was launched."""
    host, device = trace.host_rows, trace.device
    found = np.zeros(len(device.start_ns), dtype=np.int64)
    calls = np.flatnonzero(host.kind == HostKind.LAUNCH)
    by_number = dict(zip(host.correlation[calls].tolist(), calls.tolist(), strict=True))
    outer = np.flatnonzero(np.isin(host.kind, (HostKind.OPERATOR, HostKind.COLLECTIVE_CALL)))
    for row, number in enumerate(device.correlation.tolist()):
        call = by_number.get(number)
        if call is not None:  # rows nest, so the innermost open one is the latest to begin
            before = int(np.searchsorted(host.start_ns[outer], host.start_ns[call], side="right"))
            is_open = before > 0 and host.end_ns[outer[before - 1]] >= host.end_ns[call]
            found[row] = outer[before - 1] + 1 if is_open else 0
    return found


def _described(trace: Trace, meta: CollectiveColumns) -> dict[str, object]:
    """Return the arguments of a collective's kernel and of its `record_param_comms`."""
    elements = (meta.bytes or 0) // ELEMENT_BYTES
    ranks = meta.ranks or ()
    share = elements // max(len(ranks), 1)
    args: dict[str, object] = {
        "Collective name": NCCL[meta.operation][1],
        "In msg nelems": share if meta.operation == "all_gather" else elements,
        "Out msg nelems": share if meta.operation == "reduce_scatter" else elements,
        "Group size": meta.group_size,
        "dtype": meta.dtype,
        "In split size": "[]",
        "Out split size": "[]",
        "Process Group Name": meta.group,
        "Process Group Description": "default_pg" if meta.group == "0" else "undefined",
        "Process Group Ranks": _ranks(ranks),
    }
    peer = meta.source_rank if meta.operation == "recv" else meta.destination_rank
    args["Rank"] = ranks.index(trace.rank if peer is None else peer) if trace.rank is not None else NONE
    if meta.source_rank is not None:
        args["Src Rank"] = meta.source_rank
    if meta.destination_rank is not None:
        args["Dst Rank"] = meta.destination_rank
    if meta.sequence is not None:
        args["Seq"] = meta.sequence
    return args


def _ranks(ranks: tuple[int, ...]) -> str:
    listed = ", ".join(map(str, ranks[:RANKS_LISTED_MAX]))
    return f"[{listed}]" if len(ranks) <= RANKS_LISTED_MAX else f"[{listed}, ...]"


def _shapes(meta: CollectiveColumns) -> dict[str, object]:
    """Return the arguments of gloo's row where shapes were recorded."""
    assert meta.dtype == CPU_DTYPE
    return {"Input Dims": [[(meta.bytes or 0) // 4], []], "Input type": ["float", "Scalar"]}


def _sync_events(trace: Trace) -> Iterator[str]:
    rows = trace.syncs
    columns = (rows.start_ns, rows.end_ns, rows.kind, rows.device, rows.stream, rows.correlation)
    for start, end, kind, device, stream, correlation, on_stream, on_record in zip(
        *(column.tolist() for column in (*columns, rows.on_stream, rows.on_record)), strict=True
    ):
        word = _SYNCS[SyncKind(kind)]
        args: dict[str, object] = {"cuda_sync_kind": word}
        if kind in (SyncKind.EVENT, SyncKind.STREAM_WAIT):
            args |= {"wait_on_stream": on_stream, "wait_on_cuda_event_record_corr_id": on_record}
        args |= {"stream": stream, "correlation": correlation, "device": device, "context": 1}
        yield _event("cuda_sync", word, device, stream, start, end, args)
