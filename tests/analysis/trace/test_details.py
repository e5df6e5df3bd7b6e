"""Details lie beside the rows that a plain reading gives, row by row, and change nothing about them."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pytest

from pacecar.analysis.trace.columns import NONE, DeviceRows, HostRows, SyncRows
from pacecar.analysis.trace.details.detail_columns import Signature
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.trace.plain_reader import nanoseconds
from tests.analysis.trace.traces import each_kind, trace_file

BIG = ("kineto_tb_nw4", "tl_b200", "hta_nccl", "tl_inf", "tl_mi300")


def small_of_each_kind():
    """Return `each_kind()` with the larger ones left to `full`."""
    return [
        pytest.param(one, marks=pytest.mark.full) if isinstance(one, str) and one.startswith(BIG) else one
        for one in each_kind()
    ]


@pytest.mark.parametrize("name", small_of_each_kind())
def test_reading_with_details_gives_the_same_rows(name):
    plain, full = read_trace(trace_file(name)), read_trace(trace_file(name), details=True)
    assert plain.details is None
    for rows, kind in (("device", DeviceRows), ("host_rows", HostRows), ("syncs", SyncRows)):
        for column in kind.__dataclass_fields__:
            one, other = (getattr(getattr(trace, rows), column) for trace in (plain, full))
            assert np.array_equal(one, other), (rows, column)
            assert one.dtype == other.dtype
    for field in ("names", "threads", "collectives", "grids", "steps", "events", "warnings", "start_ns", "end_ns"):
        assert getattr(plain, field) == getattr(full, field)
    details = full.details
    for column in ("signature", "sequence", "forward_thread", "flops", "stack", "hierarchy"):
        assert len(getattr(details, column)) == len(full.host_rows.start_ns)


@pytest.mark.parametrize("name", small_of_each_kind())
def test_shapes_types_and_values_are_the_files_at_each_host_row(name):
    trace = read_trace(trace_file(name), details=True)
    data = trace_file(name).read_bytes()
    document = json.loads(gzip.decompress(data) if name.endswith(".gz") else data, parse_float=str)
    rows = {}
    for event in document["traceEvents"]:
        args = event.get("args") or {}
        if event.get("ph") == "X" and "Input Dims" in args:
            key = (event["name"], nanoseconds(event["ts"]), str(event["tid"]))
            rows.setdefault(key, []).append((args["Input Dims"], args.get("Input type"), args.get("Concrete Inputs")))
    host, details = trace.host_rows, trace.details
    seen = 0
    for row in np.flatnonzero(details.signature != NONE).tolist():
        key = (trace.names[host.name[row]], int(host.start_ns[row]), trace.threads[host.thread[row]][1])
        signature = details.signatures[details.signature[row]]
        decoded = tuple(json.loads(text, parse_float=str) if text else None for text in signature)
        assert decoded in rows[key]
        seen += 1
    assert seen == sum(len(its) for its in rows.values())


def row(name, start, length, category="cpu_op", **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": length, "args": args}


def test_details_that_have_the_wrong_type_cost_themselves_and_no_row(read):
    odd = {"Input Dims": "no", "Input type": 7, "Call stack": 5, "Sequence number": "6", "flops": [1]}
    trace = read(row("a", 1, 2, **odd), row("b", 3, 4, **{"Input Dims": [[1]]}), details=True)
    details = trace.details
    assert [trace.names[name] for name in trace.host_rows.name] == ["a", "b"]
    assert details.sequence.tolist() == [6, NONE]
    assert details.flops.tolist() == [NONE, NONE]
    assert details.signatures[details.signature[1]] == Signature(b"[[1]]", b"", b"")
    assert details.stacks == ("5",)


def test_times_that_floats_cannot_hold_are_read_from_their_digits_in_details_too(read):
    start = 1694128201436255.123
    memory = {"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "ts": start, "args": {"Bytes": 8}}
    frame = row("train.py(1): f", start, 0.5, "python_function")
    trace = read(row("a", start, 0.25), frame, memory, details=True)
    details = trace.details
    exact = nanoseconds(json.dumps(start))
    assert trace.host_rows.start_ns.tolist() == details.frames.start_ns.tolist() == details.memory.time_ns.tolist()
    assert trace.host_rows.start_ns.tolist() == [exact]
    assert len(details.memory.bytes) == 1, "the batch that was read twice counts once"
    assert details.frames.thread.tolist() == details.memory.thread.tolist() == [0]
    assert details.frames.names == ("train.py(1): f",)


def test_memory_events_without_a_time_are_left_out(read):
    events = [{"ph": "i", "name": "[memory]", "pid": 1, "tid": 1, "args": {"Bytes": 8}}, row("a", 1, 2)]
    assert len(read(*events, details=True).details.memory.bytes) == 0
