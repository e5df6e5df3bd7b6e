"""Waits of streams and hosts, as `enable_cuda_sync_events` records them, and the grids of kernels."""

import pytest

from pacecar.analysis.trace.columns import NONE, SyncKind
from tests.analysis.trace.writing import codes, kernel


def sync(start, name, stream=-1, correlation=1, **args):
    """Return a row as kineto's CudaSyncActivity writes it."""
    where = {"cuda_sync_kind": name, "stream": stream, "correlation": correlation, "device": 0, "context": 1}
    place = {"pid": 0, "tid": stream, "ts": start, "dur": 2}
    return {"ph": "X", "cat": "cuda_sync", "name": name, "args": args | where} | place


def on_event(stream=7, record=33):
    return {"wait_on_stream": stream, "wait_on_cuda_event_record_corr_id": record, "wait_on_cuda_event_id": 8}


def test_each_kind_of_wait_says_who_waits_for_what(read):
    trace = read(
        sync(400, "Context Sync", correlation=44),
        sync(100, "Event Sync", correlation=41, **on_event(7, 33)),
        sync(200, "Stream Wait Event", stream=20, correlation=42, **on_event(0, 0)),
        sync(300, "Stream Sync", stream=0, correlation=43),
    )
    rows = trace.syncs
    assert rows.kind.tolist() == [SyncKind.EVENT, SyncKind.STREAM_WAIT, SyncKind.STREAM, SyncKind.CONTEXT]
    assert rows.start_ns.tolist() == [100_000, 200_000, 300_000, 400_000]
    assert (rows.end_ns - rows.start_ns).tolist() == [2000] * 4
    assert rows.stream.tolist() == [NONE, 20, 0, NONE]
    assert rows.correlation.tolist() == [41, 42, 43, 44]
    assert rows.on_stream.tolist() == [7, 0, NONE, NONE]
    assert rows.on_record.tolist() == [33, 0, NONE, NONE]
    assert rows.device.tolist() == [0] * 4


def test_waits_are_no_work_and_yet_bound_the_trace(read):
    trace = read(kernel(100, 10), sync(200, "Context Sync"))
    assert (len(trace.device.start_ns), trace.end_ns) == (1, 202_000)


def test_what_cuda_12_9_and_older_kinetos_do_not_say_is_missing(read):
    trace = read(
        sync(100, "Stream Wait Event", stream=20, wait_on_stream=-1, wait_on_cuda_event_record_corr_id=33),
        sync(200, "Stream Wait Event", stream=20, wait_on_stream=7, wait_on_cuda_event_id=8),
        sync(300, "Stream Wait Event", stream=20, wait_on_stream=4294967295 - (1 << 32)),
    )
    assert trace.syncs.on_stream.tolist() == [NONE, 7, NONE]
    assert trace.syncs.on_record.tolist() == [33, NONE, NONE]


def test_a_wait_of_a_kind_that_is_not_said_is_left_out(read):
    trace = read(sync(100, "<unknown>"), sync(200, "Stream Sync", stream=7))
    assert trace.syncs.kind.tolist() == [SyncKind.STREAM]
    assert codes(trace) == {}


def test_a_trace_without_waits_has_none(read):
    assert len(read(kernel()).syncs.start_ns) == 0


def test_equal_grids_are_kept_once_and_a_copy_has_none(read):
    trace = read(
        kernel(100, grid=[128, 1, 1]),
        kernel(200, grid=[1, 2, 3]),
        kernel(300, grid=[128, 1, 1]),
        kernel(400, cat="gpu_memcpy", name="Memcpy HtoD"),
    )
    assert trace.grids == ((128, 1, 1), (1, 2, 3))
    assert trace.device.grid.tolist() == [0, 1, 0, NONE]


@pytest.mark.parametrize("grid", [[1, 2], "128", None, [1, 1, 1, 1], [1.5, 1, 1], ["1", "1", "1"], [9] * 5000, {}])
def test_what_is_no_grid_is_none_and_costs_no_row(read, grid):
    trace = read(kernel(100, grid=grid), kernel(200, grid=[4, 1, 1]))
    assert (trace.device.grid.tolist(), trace.grids) == ([NONE, 0], ((4, 1, 1),))
