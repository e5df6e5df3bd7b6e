"""Collectives of a window: counted and timed by operation, with bandwidth only where each of them says its size."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.profiler.windows.collective_stats import UNNAMED, SeenCollective, sum_collectives
from pacecar.profiler.windows.trace_spans import read_rows
from pacecar.records import CollectiveSum


def nccl(operation="allreduce", elements=1000, start=0, end=2000, ranks=4, dtype="Float"):
    metadata = (
        f'"Collective name": "{operation}", "In msg nelems": {elements}, "Out msg nelems": {elements // 2},'
        f' "Group size": {ranks}, "dtype": "{dtype}", "Process Group Name": "0", "Seq": 4'
    )
    return SeenCollective(
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", start, end, metadata
    )


def test_bus_bandwidth_is_by_nccl_tests_factor_over_all_of_the_step():
    (total,) = sum_collectives([nccl(), nccl(start=5000, end=7000, elements=3000)], (0, 10_000))
    assert total == CollectiveSum(operation="all_reduce", count=2, duration_ns=4000, bytes=16_000, bus_bytes=24_000)
    assert total.bus_bandwidth == 24_000 / 4000e-9


def test_gloo_is_counted_and_timed_and_has_no_size():
    rows = [SeenCollective("gloo:all_reduce", 0, 10), SeenCollective("gloo:broadcast", 20, 25)]
    assert sum_collectives(rows, (0, 100)) == (
        CollectiveSum(operation="all_reduce", count=1, duration_ns=10),
        CollectiveSum(operation="broadcast", count=1, duration_ns=5),
    )
    assert sum_collectives(rows, (0, 100))[0].bus_bandwidth is None


def test_one_that_does_not_say_its_size_leaves_the_operation_without_bandwidth():
    (total,) = sum_collectives([nccl(), nccl(dtype="Nibble")], (0, 10_000))
    assert (total.count, total.bytes, total.bus_bytes) == (2, None, None)


def test_what_began_outside_of_the_step_is_not_its():
    rows = [nccl(start=-1, end=5), nccl(start=10, end=30)]
    assert sum_collectives(rows, (0, 10)) == ()
    assert sum_collectives(rows, (10, 20))[0].duration_ns == 20


@pytest.mark.parametrize("metadata", ["", "{", '"Collective name": 5', '"a": ' + "[" * 5000, '"\ud800": 1', '"x": 1'])
def test_metadata_that_is_no_metadata_says_nothing(metadata):
    (total,) = sum_collectives([SeenCollective("gloo:all_reduce", 0, 9, metadata)], (0, 10))
    assert total == CollectiveSum(operation="all_reduce", count=1, duration_ns=9)


def test_operations_are_bounded_and_no_time_is_lost_by_it():
    rows = [nccl(operation=f"odd_{'x' * n}", start=n, end=n + 10) for n in range(60)]
    sums = sum_collectives(rows, (0, 1000))
    assert [one.operation for one in sums] == [UNNAMED], "a word that is not ours is no label"
    assert sum(one.count for one in sums) == 60
    assert sum(one.duration_ns for one in sums) == 600


spans = st.tuples(st.integers(0, 100), st.integers(0, 100), st.sampled_from(["gloo:all_reduce", "gloo:gather", "odd"]))


@pytest.mark.slow
@given(st.lists(spans, max_size=20), st.integers(0, 100))
def test_a_split_window_adds_up(rows, cut):
    seen = [SeenCollective(name, start, start + length) for start, length, name in rows]

    def totals(*windows):
        found = {}
        for one in (one for window in windows for one in sum_collectives(seen, window)):
            count, duration = found.get(one.operation, (0, 0))
            found[one.operation] = count + one.count, duration + one.duration_ns
        return found

    assert totals((0, cut), (cut, 101)) == totals((0, 101))


class Row:
    def __init__(self, row_type, name, start, end, linked=None, metadata=""):
        self.row_type, self.text, self.start, self.end, self.linked, self.metadata = (
            row_type, name, start, end, linked, metadata,
        )  # fmt: skip

    type = lambda self: self.row_type  # noqa: E731
    name = lambda self: self.text  # noqa: E731
    timestamp = lambda self: self.start  # noqa: E731
    duration = lambda self: self.end - self.start  # noqa: E731
    resource_id = lambda self: 7  # noqa: E731
    linked_activity = lambda self: self.linked  # noqa: E731
    metadata_json = lambda self: self.metadata  # noqa: E731


def test_a_device_window_reads_size_and_launch_of_a_collective_from_the_row_that_launched_it():
    says = Row("cpu_op", "record_param_comms", 5, 6, metadata=nccl().metadata)
    rows = [
        Row("kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL()", 10, 40, says),
        Row("kernel", "gemm", 12, 20, Row("cpu_op", "aten::mm", 8, 9)),
        Row("kernel", "ncclDevKernel_Broadcast_RING_LL()", 50, 60),
    ]
    reading = read_rows(rows, training_thread=1, on_device=True)
    assert sum_collectives(reading.collectives, (0, 100)) == (
        CollectiveSum(operation="all_reduce", count=1, duration_ns=30, bytes=4000, bus_bytes=6000),
        CollectiveSum(operation="broadcast", count=1, duration_ns=10),
    )
    assert reading.launches == [(5, 40, 7), (8, 20, 7)]
