"""Every metric of hosts and GPUs has a range that excludes numbers for "unknown"."""

import pytest

from pacecar.metrics.catalog import CATALOG, MetricKind, MetricSubject, MetricUnit, by_name
from pacecar.metrics.value_ranges import RANGES, WHOLES

SUBJECTS = {MetricSubject.HOST, MetricSubject.RDMA, MetricSubject.CGROUP, MetricSubject.GPU}
UNKNOWN = {
    MetricUnit.RATIO: (4294967295 / 100, float("nan"), -0.01),
    MetricUnit.MILLIWATTS: (4294967295, 2147483647, -1),
    MetricUnit.CELSIUS: (4294967295, 2147483647, 255, -273 * 2),
    MetricUnit.MILLICELSIUS: (4294967295, 65261850, 2**31 - 1),
    MetricUnit.MEGAHERTZ: (4294967295, 2**31 - 1, -1),
    MetricUnit.KILOHERTZ: (4294967295, -1),
    MetricUnit.BYTES: (2**64 - 1, (2**64 - 128) * 1024, -1),
    MetricUnit.NANOSECONDS: ((2**64 - 1) * 10_000_000,),
    MetricUnit.MILLIJOULES: (2**64 - 1, -1),
    MetricUnit.BYTES_PER_SECOND: (4294967295 * 1_000_000, -125_000),
    MetricUnit.COUNT: (2**64 - 1,),
}
"""What drivers, kernels and containers report for unknown values, in the inside unit."""


def test_every_metric_of_hosts_and_gpus_has_a_row_and_no_other():
    listed = {metric.name for metric in CATALOG if metric.subject in SUBJECTS and "_window_" not in metric.name}
    assert listed == RANGES.keys()


@pytest.mark.parametrize("name", sorted(RANGES))
def test_no_number_that_stands_for_unknown_is_in_range_and_zero_is(name):
    limits = RANGES[name]
    for value in UNKNOWN[by_name(name).unit]:
        assert not limits.low <= value <= limits.high, value
    assert limits.low <= 0 <= limits.high


def test_gauges_that_count_things_are_below_what_a_counter_of_32_bits_shows_after_minus_one():
    gauges = {name for name in RANGES if by_name(name).kind is MetricKind.GAUGE}
    counts = {name for name in gauges if by_name(name).unit is MetricUnit.COUNT}
    roomy = {name for name in counts if RANGES[name].high >= 2**32 - 1}
    assert roomy == {
        "pacecar_gpu_consecutive_failures", "pacecar_gpu_ecc_uncorrected_errors",
        "pacecar_host_filesystem_files", "pacecar_host_filesystem_files_free",
        "pacecar_host_open_files", "pacecar_host_open_files_limit", "pacecar_host_threads_limit",
        "pacecar_host_tracked_connections", "pacecar_host_tracked_connections_limit",
    }  # fmt: skip


def test_a_whole_is_a_metric_with_the_same_labels():
    assert all(by_name(part).unit is by_name(whole).unit for part, whole in WHOLES.items())
