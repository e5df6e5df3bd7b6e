"""Condensed and sent as bytes, the traces of all ranks give the verdict that the whole traces give."""

from __future__ import annotations

import zlib

import pytest

from pacecar.analysis.one_rank.condensed_trace import condensed
from pacecar.analysis.one_rank.trace_bytes import BYTES_MAX, TraceBytesError, decode_trace, encode_trace
from pacecar.analysis.trace.columns import HostKind
from tests.analysis.models import analyzed
from tests.analysis.verdict.test_verdict import LAYOUTS
from tests.kit.simulated_jobs import Fault, FaultKind, Job, simulate

BYTES_OF_A_STEP_MAX = 3 * 1024


def traces_of(layout: str, *faults: Fault):
    return simulate(Job(**LAYOUTS[layout], faults=faults, seed=4)).traces()


def sent(trace):
    return decode_trace(encode_trace(condensed(trace)), trace.file)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("gloo", FaultKind.SLOW_COMPUTE),
        ("ddp", FaultKind.SLOW_HOST),
        ("fsdp", FaultKind.SLOW_COMPUTE),
        ("pipeline", FaultKind.SLOW_COMPUTE),
        *(pytest.param(layout, None, marks=pytest.mark.full) for layout in LAYOUTS),
    ],
)
def test_the_verdict_is_that_of_the_whole_traces(layout: str, kind: FaultKind | None) -> None:
    whole = traces_of(layout, *([] if kind is None else [Fault(kind, (3,), 0.3)]))
    expected, found = analyzed(whole), analyzed([sent(trace) for trace in whole])
    assert [(one.ranks, one.cause) for one in found.stragglers] == [
        (one.ranks, one.cause) for one in expected.stragglers
    ]
    for one, other in zip(found.stragglers, expected.stragglers, strict=True):
        assert one.saved_ns == pytest.approx(other.saved_ns, rel=0.2)
        assert "it ran" not in one.evidence, "rows are not kernels here"


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["ddp", "gloo", "pipeline"])
def test_a_part_is_small_and_keeps_all_compute_and_collectives(layout: str) -> None:
    whole = traces_of(layout)[0]
    part = condensed(whole)
    assert len(encode_trace(part)) < BYTES_OF_A_STEP_MAX * len(whole.steps)

    def compute(trace) -> int:
        host, device = trace.host_rows, trace.device
        rows = device.work == device.work if trace.has_device else host.kind == HostKind.OPERATOR
        some = device if trace.has_device else host
        return int((some.end_ns - some.start_ns)[rows].sum())

    if whole.has_device:
        assert compute(part) == pytest.approx(compute(whole), rel=0.01)
    assert len(part.collectives) == len(whole.collectives)
    assert (part.host_rows.kind == HostKind.COLLECTIVE_WORK).sum() == (
        whole.host_rows.kind == HostKind.COLLECTIVE_WORK
    ).sum()


@pytest.mark.slow
def test_bytes_that_are_no_trace_are_refused() -> None:
    data = encode_trace(condensed(traces_of("ddp")[0]))
    plain = zlib.decompress(data)
    wrong = [
        b"", b"nonsense", data[: len(data) // 2], zlib.compress(plain[:-9]), zlib.compress(plain[:40]),
        bytes(BYTES_MAX + 1),
    ]  # fmt: skip
    for each in wrong:
        with pytest.raises(TraceBytesError):
            decode_trace(each, "a file")
