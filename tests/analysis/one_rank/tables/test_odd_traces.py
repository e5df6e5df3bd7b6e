"""Tables of traces in which anything may be anything: no crash, and what is charged still adds up."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from pacecar.analysis.document.report import TraceDocument
from pacecar.analysis.document.report_tables import TABLE_NAMES
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.one_rank.tables.all_tables import tables_of
from pacecar.analysis.output.csv_tables import csv_tables
from pacecar.analysis.output.tabletext import tables_text
from pacecar.analysis.reading.parallel_reading import Options, analyze
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.tracefiles import write_trace

pytestmark = pytest.mark.slow

NUMBERS = st.one_of(
    st.integers(-2, 40), st.floats(allow_nan=False), st.just(1 << 62), st.just(1e300), st.none(), st.just("7")
)
SHAPES = st.one_of(
    st.just([[2, 3], [3, 4]]), st.just([[], 5, "x"]), st.just([[-1], [[1, 2], [3]]]), st.none(), st.text(max_size=3),
    st.just([[1 << 47] * 20] * 3),
)  # fmt: skip
EVENTS = st.fixed_dictionaries(
    {
        "ph": st.sampled_from(["X", "X", "X", "i", "B", "E"]),
        "cat": st.sampled_from(
            ["cpu_op", "kernel", "gpu_memcpy", "cuda_runtime", "python_function", "user_annotation"]
        ),
        "name": st.sampled_from([
            "aten::mm", "aten::convolution", "aten::_scaled_dot_product_flash_attention", "cudaLaunchKernel",
            "nn.Module: Net_0", "train.py(3): f", "[memory]", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "k",
        ]),
        "pid": st.integers(0, 1), "tid": st.sampled_from([0, 1, "0"]), "ts": NUMBERS, "dur": NUMBERS,
        "args": st.fixed_dictionaries({}, optional={
            "correlation": st.integers(-1, 3), "stream": st.integers(-1, 2), "device": st.integers(-1, 9),
            "Input Dims": SHAPES, "Input type": st.one_of(st.just(["float", "float", "Scalar"]), st.none(), st.just(3)),
            "Concrete Inputs": st.one_of(st.just(["", "", "[1]", "True", "[0, 0]"]), st.just({"a": 1})),
            "Bytes": NUMBERS, "Device Type": NUMBERS, "Total Allocated": NUMBERS, "flops": NUMBERS,
            "Sequence number": st.integers(-1, 3), "Fwd thread id": st.integers(0, 2),
            "Call stack": st.one_of(st.text(max_size=8), st.integers()), "Module Hierarchy": st.text(max_size=5),
        }),
    }
)  # fmt: skip


def check(path: Path, events) -> None:
    path.write_text(json.dumps({"traceEvents": events}))
    document = analyze([path], Options(makes_tables=True)).document
    if not document.traces:  # nothing in it is plausible; what takes it all the same must not fail either
        assert [warning.effect for warning in document.warnings] == ["refused"]
        trace = read_trace(path, details=True)
        report = analyze_trace(trace)
        report.tables, _ = tables_of(trace, report)
        document = TraceDocument(traces=[report])
    for report in document.traces:
        assert sum(row.exposed_ns for row in report.tables.kernels) == (
            report.span_ns - report.idle_ns if report.tables.launches is not None else 0
        )
    csv_tables(document)
    console = Console(file=io.StringIO(), width=80)
    for part in tables_text(document, TABLE_NAMES, console):
        console.print(part)


@settings(max_examples=10, deadline=None)
@given(events=st.lists(EVENTS, max_size=12))
def test_anything_has_tables(tmp_path_factory, events):
    check(tmp_path_factory.mktemp("odd") / "t.json", events)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@given(events=st.lists(EVENTS, max_size=14))
def test_anything_at_all_has_tables(tmp_path_factory, events):
    check(tmp_path_factory.mktemp("odd") / "t.json", events)


@pytest.mark.slow
def test_tables_are_the_same_from_processes_of_their_own(tmp_path):
    paths = [
        write_trace(tmp_path / f"rank{rank}.json", drawing, rank=rank, steps=[(0, 10)])
        for rank, drawing in enumerate(("cccc..AAcc", "cc....AAcc"))
    ]
    here = analyze(paths, Options(makes_tables=True)).document
    there = analyze(paths, Options(makes_tables=True, jobs=2)).document
    assert here == there
    assert here.traces[0].tables.kernels[0].critical_ns is not None
