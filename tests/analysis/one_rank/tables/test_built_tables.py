"""Tables of traces that are built for a case: nesting, charging, backward modules, windows, queues, relative memory."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.one_rank.origins.grouping import Groups
from pacecar.analysis.one_rank.origins.nesting import Nesting
from pacecar.analysis.one_rank.origins.window import charged_ns
from pacecar.analysis.one_rank.tables.all_tables import tables_of
from pacecar.analysis.trace.columns import NONE, WORKS, HostKind
from pacecar.analysis.trace.reader import read_trace
from pacecar.ledger.attribution import Work
from tests.analysis.built import build
from tests.analysis.one_rank.tables.brute import ORDER, RawRow, charged

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(0, 3)), max_size=12)


@pytest.mark.slow
@given(rows=SPANS)
def test_every_instant_is_charged_once_by_the_ledgers_order(rows):
    rows.sort(key=lambda row: row[0])
    start = np.array([row[0] for row in rows], dtype=np.int64)
    end = start + np.array([row[1] for row in rows], dtype=np.int64)
    found = charged_ns(start, end, np.array([row[2] for row in rows], dtype=np.uint8))
    raw = [
        RawRow(str(at), row[0], row[0] + row[1], ("", ""), {}, ORDER[row[2]], at) for at, row in enumerate(rows)
    ]  # fmt: skip
    assert [str(work) for work in WORKS] == list(ORDER)
    expected = charged(raw)
    assert found.tolist() == [expected[str(at)] for at in range(len(rows))]


@pytest.mark.slow
@given(
    rows=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10), st.integers(0, 1)), max_size=10),
    instants=st.lists(st.tuples(st.integers(-1, 31), st.integers(0, 2)), max_size=6),
)
def test_the_innermost_row_is_the_last_opened_of_those_open(rows, instants):
    """Also where rows do not nest: of two that overlap the later one."""
    start, length, thread = (np.array([row[at] for row in rows], dtype=np.int64) for at in range(3))
    nesting = Nesting(start, start + length, thread.astype(np.int32))
    at = np.array([instant for instant, _ in instants], dtype=np.int64)
    where = np.array([where for _, where in instants], dtype=np.int32)
    order = sorted(range(len(rows)), key=lambda row: (start[row], -length[row], row))
    for found, (instant, on) in zip(nesting.innermost(where, at).tolist(), instants, strict=True):
        seen = [row for row in order if thread[row] == on and start[row] <= instant < start[row] + length[row]]
        if is_nested(rows, order):
            assert found == (seen[-1] if seen else NONE)
        elif found != NONE:
            assert found in seen


def is_nested(rows, order) -> bool:
    ends = {row: rows[row][0] + rows[row][1] for row in order}
    return all(
        ends[b] <= ends[a] or rows[b][0] >= ends[a]
        for place, a in enumerate(order) for b in order[place + 1 :] if rows[a][2] == rows[b][2]
    )  # fmt: skip


@pytest.mark.slow
@given(columns=st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2)), max_size=20))
def test_groups_are_the_rows_with_equal_values(columns):
    one, two = (np.array([row[at] for row in columns], dtype=np.int64) for at in range(2))
    groups = Groups.of(one, two)
    assert list(zip(*groups.keys, strict=True)) == sorted(set(columns))
    for group in range(groups.count):
        key = (groups.keys[0][group], groups.keys[1][group])
        assert sorted(groups.rows(group).tolist()) == [at for at, row in enumerate(columns) if row == key]


def event(name, start, length, category="cpu_op", tid=1, **args):
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": length, "args": args,
    }  # fmt: skip


def launched(number, start, length, at, tid=1, name="sgemm"):
    """Return a call that launches and its kernel."""
    return [
        event("cudaLaunchKernel", at, 1, "cuda_runtime", tid, correlation=number),
        event(name, start, length, "kernel", 7, device=0, stream=7, correlation=number),
    ]


def read(path: Path, events, **members):
    path.write_text(json.dumps({"traceEvents": events, **members}))
    trace = read_trace(path, details=True)
    report = analyze_trace(trace, window="steps" if trace.steps else "trace")
    return report, tables_of(trace, report)[0]


FORWARD = [
    event("train.py(7): step", 0, 200, "python_function"),
    event("nn.Module: Net_0", 10, 80, "python_function"),
    event("nn.Module: Linear_3", 20, 30, "python_function"),
    event("torch/nn/functional.py(9): linear", 21, 20, "python_function"),
    event("aten::linear", 22, 10, **{"Sequence number": 5, "Fwd thread id": 0}),
    event("aten::addmm", 23, 8, **{"Sequence number": 6, "Fwd thread id": 0, "Input Dims": [[2, 3]]}),
    *launched(1, 40, 20, 24),
]


def test_the_module_of_a_backward_is_that_of_its_forward(tmp_path):
    backward = [
        event("autograd::engine::evaluate_function: AddmmBackward0", 100, 30, tid=2, **{
            "Sequence number": 6, "Fwd thread id": 1,
        }),
        event("aten::mm", 105, 10, tid=2),
        *launched(2, 120, 40, 106, tid=2, name="sgemm_backward"),
        event("autograd::engine::evaluate_function: Strange", 140, 10, tid=2, **{
            "Sequence number": 77, "Fwd thread id": 1,
        }),
        event("aten::add", 141, 5, tid=2),
    ]  # fmt: skip
    _, tables = read(tmp_path / "t.json", [*FORWARD, *backward])
    found = {row.name: (row.module, row.source) for row in tables.operators}
    assert found["aten::linear"] == found["aten::addmm"] == ("Net/Linear", "train.py(7): step")
    assert found["aten::mm"] == ("Net/Linear", None)
    assert found["aten::add"] == (None, None)
    launchers = {row.name: row.launchers[0] for row in tables.kernels}
    assert (launchers["sgemm"].operator, launchers["sgemm"].module) == ("aten::addmm", "Net/Linear")
    assert (launchers["sgemm_backward"].operator, launchers["sgemm_backward"].module) == ("aten::mm", "Net/Linear")


def test_a_sequence_number_of_two_threads_tells_no_module(tmp_path):
    twice = [
        event("nn.Module: Other_0", 10, 80, "python_function", tid=3),
        event("aten::mul", 22, 10, tid=3, **{"Sequence number": 6, "Fwd thread id": 0}),
        event("MulBackward0", 100, 30, tid=2, **{"Sequence number": 6, "Fwd thread id": 1}),
    ]
    _, tables = read(tmp_path / "t.json", [*FORWARD, *twice])
    assert {row.name: row.module for row in tables.operators}["MulBackward0"] is None


def test_own_and_total_times_of_operators_that_contain_others(tmp_path):
    _, tables = read(tmp_path / "t.json", FORWARD)
    by = {row.name: row for row in tables.operators}
    outer, inner = by["aten::linear"], by["aten::addmm"]
    assert (outer.host_ns, outer.host_self_ns, inner.host_ns) == (10_000, 2_000, 8_000)
    assert (outer.device_ns, outer.device_total_ns, outer.kernels) == (0, 20_000, 0)
    assert (inner.device_ns, inner.device_total_ns, inner.kernels, inner.exposed_ns) == (20_000, 20_000, 1, 20_000)


def test_torchs_own_flops_go_before_the_formula(tmp_path):
    call = {"Input Dims": [[2, 3], [3, 4]], "Input type": ["float", "float"]}
    events = [event("aten::mm", 0, 10, flops=999, **call), *launched(1, 5, 4, 1), event("aten::mm", 20, 10, **call)]
    _, tables = read(tmp_path / "t.json", events)
    (row,) = tables.roofline
    assert (row.flops, row.flops_source, row.count, row.launched) == (999, "with_flops", 2, 1)
    events[0]["args"].pop("flops")
    _, tables = read(tmp_path / "t.json", events)
    assert (tables.roofline[0].flops, tables.roofline[0].flops_source) == (48, "2 m n k")


def test_in_a_window_of_steps_rows_are_cut_and_calls_count_where_they_begin(tmp_path):
    mark = {"category": "user_annotation"}
    events = [
        event("ProfilerStep#3", 100, 100, **mark), event("ProfilerStep#4", 200, 100, **mark),
        event("aten::before", 10, 20), *launched(1, 80, 40, 11),
        event("aten::inside", 150, 20), *launched(2, 180, 40, 151),
        event("forward", 90, 20, **mark), event("forward", 210, 30, **mark), event("forward", 215, 5, **mark),
    ]  # fmt: skip
    report, tables = read(tmp_path / "t.json", events)
    assert report.window == "steps"
    (kernel,) = tables.kernels
    assert kernel.duration_ns == 20_000 + 40_000
    assert {(row.name, row.count, row.device_ns) for row in tables.operators} == {
        ("aten::inside", 1, 40_000), ("aten::before", 0, 20_000),
    }  # fmt: skip
    (forward,) = tables.annotations
    assert (forward.count, forward.host_ns, forward.min_ns, forward.max_ns) == (1, 30_000, 30_000, 30_000)


def test_a_queue_holds_what_was_launched_and_has_not_begun(tmp_path):
    events = [*launched(1, 10, 30, 2), *launched(2, 40, 5, 4), *launched(3, 100, 5, 90)]
    launches = read(tmp_path / "t.json", events)[1].launches
    (queue,) = launches.queues
    assert (queue.launches, queue.max) == (3, 2)
    assert queue.mean == pytest.approx((8 + 36 + 10) / 98)
    assert queue.empty_ns == 50_000
    assert (launches.delay.min_ns, launches.delay.median_ns, launches.delay.max_ns) == (7_000, 9_000, 35_000)


def test_kernels_of_a_graph_have_no_call_of_their_own(tmp_path):
    graph = [
        event("cudaGraphLaunch", 0, 20, "cuda_runtime", correlation=9),
        *(event("k", 30 + 10 * at, 5, "kernel", 7, device=0, stream=7, correlation=9) for at in range(3)),
    ]
    launches = read(tmp_path / "t.json", [*graph, *launched(1, 5, 0.5, 2, name="short")])[1].launches
    assert (launches.calls, launches.rows, launches.graph_rows, launches.kernels) == (2, 4, 3, 1)
    assert (launches.short_kernels, launches.short_kernels_ns) == (1, 500)


def memory(at, size, **args):
    where = {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": at}
    return {**where, "args": {"Bytes": size, "Device Type": 1, "Device Id": 0, **args}}


def test_zero_bytes_are_a_measurement_and_changes_alone_are_relative(tmp_path):
    work = [event("aten::mm", 0, 50), event("aten::empty", 9, 4), *launched(1, 60, 5, 20)]
    totals = [(10, 100, 600), (20, -100, 500), (30, 0, 500)]
    known = [memory(at, size, **{"Total Allocated": all_, "Total Reserved": 0}) for at, size, all_ in totals]
    (row,) = read(tmp_path / "t.json", [*work, *known])[1].memory
    assert (row.first_bytes, row.peak_bytes, row.last_bytes, row.is_relative) == (600, 600, 500, False)
    assert (row.allocated_bytes, row.freed_bytes, row.events, row.device) == (100, 100, 3, "cuda:0")
    assert (row.peak_ns, row.peak_operator) == (10_000, "aten::mm")
    old = [memory(at, size) for at, size, _ in totals]
    (row,) = read(tmp_path / "t.json", [*work, *old])[1].memory
    assert (row.first_bytes, row.peak_bytes, row.last_bytes, row.is_relative) == (100, 100, 0, True)
    assert row.reserved_peak_bytes is None


def test_a_trace_without_anything_has_empty_tables():
    trace = build()
    report = analyze_trace(trace)
    tables, _ = tables_of(trace, report)
    lists = (tables.kernels, tables.operators, tables.roofline, tables.memory, tables.annotations)
    assert (lists, tables.launches) == (([], [], [], [], []), None)


def test_without_details_there_are_names_and_times_all_the_same():
    trace = build(
        [(20, 40, Work.COMPUTE, "k")],
        [(0, 15, HostKind.OPERATOR, "aten::mm"), (2, 9, HostKind.OPERATOR, "aten::mm")],
    )
    tables, _ = tables_of(trace, analyze_trace(trace))
    (row,) = tables.operators
    assert (row.count, row.host_ns, row.host_self_ns, row.shapes, row.module) == (2, 15, 15, None, None)
    assert tables.kernels[0].launchers[0].operator is None
