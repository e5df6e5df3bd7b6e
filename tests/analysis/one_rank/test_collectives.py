"""Collectives that are alike are one line, with nccl-tests' bandwidths."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.analysis.one_rank.collectives import bus_bandwidth_factor, coverage
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.columns import CollectiveColumns
from pacecar.ledger.attribution import Work
from pacecar.ledger.intervals import intervals, union
from tests.analysis.built import build

COMM = Work.COMMUNICATION


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 8, 1.75),
        ("all_reduce", 2, 1.0),
        ("all_reduce", 1, 0.0),
        ("all_gather", 8, 0.875),
        ("reduce_scatter", 4, 0.75),
        ("all_to_all", 4, 0.75),
        ("gather", 4, 0.75),
        ("scatter", 4, 0.75),
        ("broadcast", 8, 1.0),
        ("reduce", 8, 1.0),
        ("send_recv", 8, 1.0),
        ("all_reduce", None, None),
        ("all_reduce", 0, None),
        ("barrier", 8, None),
        ("dispatch", 8, None),
    ],
)
def test_factors_of_nccl_tests(operation, ranks, factor):
    assert bus_bandwidth_factor(operation, ranks) == factor


def test_alike_means_operation_size_type_group_and_number_of_ranks_but_not_sequence():
    def make(operation, size, sequence):
        return CollectiveColumns(
            operation=operation, bytes=size, dtype="Float", group="0", group_size=4, sequence=sequence
        )

    metas = [
        make("all_reduce", 4000, 1),
        make("all_reduce", 4000, 2),
        make("all_gather", 4000, 3),
        make("all_reduce", 8, 4),
    ]
    device = [
        (0, 100, COMM, "a", -1, 0),
        (200, 500, COMM, "b", -1, 1),
        (600, 610, COMM, "c", -1, 2),
        (700, 701, COMM, "a", -1, 3),
    ]
    device += [(50, 250, Work.COMPUTE)]
    first, second, third = analyze_trace(build(device, collectives=metas)).collectives
    assert (first.operation, first.bytes, first.dtype, first.group, first.group_size) == (
        "all_reduce",
        4000,
        "Float",
        "0",
        4,
    )
    assert (first.count, first.duration_ns, first.median_ns, first.min_ns, first.max_ns) == (2, 400, 200, 100, 300)
    assert first.exposed_ns == 50 + 250
    assert first.algorithm_bandwidth == pytest.approx(4000 / 200e-9)
    assert first.bus_bandwidth == pytest.approx(4000 / 200e-9 * 1.5)
    assert (second.operation, second.count, second.exposed_ns) == ("all_gather", 1, 10)
    assert second.bus_bandwidth == pytest.approx(4000 / 10e-9 * 0.75)
    assert (third.bytes, third.count) == (8, 1)


def test_what_is_not_known_is_none_and_the_operation_comes_from_the_kernel():
    device = [
        (0, 10, COMM, "ncclDevKernel_SendRecv()"),
        (10, 20, COMM, "ncclDevKernel_Generic_4()"),
        (20, 20, COMM, "x"),
    ]
    totals = {total.operation: total for total in analyze_trace(build(device)).collectives}
    assert set(totals) == {"send_recv", "unknown"}, "a row of no duration is none"
    for total in totals.values():
        assert (total.bytes, total.algorithm_bandwidth, total.bus_bandwidth, total.wait_ns, total.wire_ns) == (
            None,
        ) * 5


def test_the_number_of_ranks_may_come_from_their_list_and_zero_bytes_are_a_measurement():
    meta = CollectiveColumns(operation="all_gather", bytes=0, ranks=(0, 3))
    (total,) = analyze_trace(build([(0, 10, COMM, "x", -1, 0)], collectives=[meta])).collectives
    assert (total.group_size, total.bytes, total.algorithm_bandwidth, total.bus_bandwidth) == (2, 0, 0.0, 0.0)


def test_collectives_at_the_same_time_on_two_streams_hide_once():
    device = [(0, 100, COMM, "ncclKernel_AllReduce"), (50, 150, COMM, "ncclKernel_AllReduce"), (140, 200, Work.COMPUTE)]
    (total,) = analyze_trace(build(device)).collectives
    assert (total.duration_ns, total.exposed_ns) == (200, 140)


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda p: (p[0], p[0] + p[1])), max_size=8),
    st.lists(st.integers(-10, 90), max_size=8),
)
def test_coverage_counts_covered_nanoseconds(pairs, instants):
    covered = {n for start, end in pairs for n in range(start, end)}
    found = coverage(union(intervals(pairs)), np.array(instants, dtype=np.int64))
    assert found.tolist() == [sum(n < instant for n in covered) for instant in instants]
