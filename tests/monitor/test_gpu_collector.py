"""The GPU collector and the real pynvml on a stand-in driver library."""

import json
import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pacecar.metrics.catalog import CATALOG, WINDOW_NAMES, MetricSubject, by_name
from pacecar.monitor.collectors.gpu import REINIT_AFTER_SECONDS, REOPEN_SECONDS, GpuCollector
from pacecar.monitor.gpu.call_deadlines import CALL_SECONDS_MIN
from pacecar.monitor.gpu.device import CALLS_PER_TICK_MAX, LINKS_MAX
from pacecar.monitor.gpu.gpu_state import REASONS
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.gpu.queries.field_numbers import DEFINED
from pacecar.monitor.gpu.queries.fields import LINK_COUNT, fields_of
from pacecar.monitor.gpu.xid import KNOWN_XIDS
from pacecar.records import Absent, Failed, Ok
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import BEFORE, FUNCTION, GPUS, MIG_H100, NEW, OLD

pytestmark = pytest.mark.slow

SECOND = 1_000_000_000
DEADLINE_SECONDS = 0.4
WINDOWED = {name for names in WINDOW_NAMES.values() for name in names}
ALWAYS_CHANGING = (
    "energy", "power_mean", "process_sm", "driver_calls", "driver_call_seconds", "read_interval", "last_success",
)  # fmt: skip
UNSTABLE = (*ALWAYS_CHANGING, "clock_event", "driver_slow", "fail", "down", "gpu_up", "refused_numbers")
CODES = [*range(1, 31), 999]
STRIDE = len(CODES)
"""Calls between two failures, where not all calls fail; each code starts at another call, so that each call fails
once."""

DRIVER_CALLS = 12
"""Calls of the first tick that belong to no GPU."""


@pytest.fixture
def make(standin, clock, tmp_path):
    """A function that makes a collector over the stand-in; all are closed at the end."""
    made = []

    def collector(**options):
        given = {"deadline_seconds": 5.0, "kernel_log": str(tmp_path / "kmsg")} | options
        made.append(GpuCollector(PyNvml(), clock, **given))
        return made[-1]

    yield collector
    standin.release()
    for each in made:
        each.close()


def tick(collector, clock, seconds=1.0):
    """Collect a second after the last time."""
    clock.advance(int(seconds * SECOND))
    return collector.collect()


def settled(collector, clock, ticks=4):
    """Collect until everything that needs two readings has them."""
    outcomes = [tick(collector, clock) for _ in range(ticks)]
    return outcomes[-1]


def of_gpu(outcome, gpu):
    return {(s.metric, *s.labels[1:]): s.value for s in outcome.samples if s.labels[:1] == (str(gpu),)}


def up(outcome):
    return sorted(int(s.labels[0]) for s in outcome.samples if s.metric == "pacecar_gpu_up" and s.value == 1)


def health(outcome, gpu, metric, *labels):
    return of_gpu(outcome, gpu)[("pacecar_gpu_" + metric, *labels)]


# --- what is read ---------------------------------------------------------------------------------


def test_without_details_the_same_series_stand_in_the_same_order_at_fewer_calls(standin, make, clock):
    collector = make()
    whole = settled(collector, clock, ticks=12)
    before = standin.calls(0)
    clock.advance(SECOND)
    fast = collector.collect_fast()
    made = {name for name, count in standin.calls(0).items() if count > before.get(name, 0)}
    assert [(s.metric, s.labels) for s in fast.samples] == [(s.metric, s.labels) for s in whole.samples]
    assert not made & {"nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperature"}
    standin.page.lost[0] = 1
    clock.advance(SECOND)
    assert 0 not in up(collector.collect_fast()), "what stands does not hide a GPU that is lost"


def test_values_of_each_gpu(standin, make, clock, values):
    standin.page.reasons[1] = 0x8
    standin.page.c2c = 10
    read = values(settled(make(), clock))
    assert (
        read[("gpu_info", "1", "GPU-1", "Stand-in", "599.77", "00000000:1B:00.0", "hopper", "13.1", "96.00.01", "off")]
        == 1
    )
    plain = {
        "utilization_ratio": 0.82, "memory_utilization_ratio": 0.32, "encoder_utilization_ratio": 0.42,
        "decoder_utilization_ratio": 0.52, "memory_size_bytes": 151010, "memory_reserved_bytes": 11020,
        "memory_free_bytes": 61030, "memory_used_bytes": 81040, "bar1_size_bytes": 263101, "bar1_used_bytes": 1102,
        "power_watts": 651103, "power_limit_watts": 701104, "temperature_celsius": 62, "memory_temperature_celsius": 72,
        "temperature_margin_celsius": 24, "power_limit_min_watts": 201304, "power_limit_max_watts": 751404,
        "power_limit_default_watts": 701204, "ecc_enabled": 1, "ecc_enabled_after_reset": 1,
        "sram_ecc_threshold_exceeded": 0, "c2c_enabled": 1, "c2c_links": 10, "c2c_links_up": 10,
        "c2c_bytes_per_second": 447120000000, "graphics_active_ratio": 0.0225, "mps_processes": 2,
        "mig_enabled_after_reset": 0, "mig_instances": 0, "performance_state": 2, "pcie_generation": 4,
        "pcie_generation_max": 5, "pcie_width": 8, "pcie_width_max": 16, "pcie_replays_total": 5009401000,
        "pcie_transmit_bytes_total": 5019701000, "pcie_receive_bytes_total": 5019801000, "retired_pages_pending": 31,
        "row_remap_pending": 144, "row_remap_failed": 145, "nvlink_transmit_bytes_total": 5013801000 * 1024,
        "nvlink_receive_bytes_total": 5013901000 * 1024, "sm_active_ratio": 0.0325, "sm_occupancy_ratio": 0.0425,
        "tensor_active_ratio": 0.0625, "dram_bandwidth_ratio": 0.1125,
        "pcie_transmit_bytes_per_second": 21.25 * 1048576, "pcie_receive_bytes_per_second": 22.25 * 1048576,
        "nvlink_receive_bytes_per_second": 61.25 * 1048576, "nvlink_transmit_bytes_per_second": 62.25 * 1048576,
        "fabric_status": 21, "processes": 2, "mig_enabled": 0, "up": 1, "consecutive_failures": 0,
    }  # fmt: skip
    labelled = {
        ("temperature_threshold_celsius", "shutdown"): 91, ("temperature_threshold_celsius", "gpu_max"): 121,
        ("temperature_margin_threshold_celsius", "shutdown"): -5,
        ("temperature_margin_threshold_celsius", "slowdown"): 2,
        ("temperature_margin_threshold_celsius", "memory_max"): 3,
        ("temperature_margin_threshold_celsius", "gpu_max"): 4,
        ("sram_ecc_errors_total", "uncorrected_parity", "aggregate"): 1311,
        ("sram_ecc_errors_total", "uncorrected_sec_ded", "aggregate"): 1312,
        ("sram_ecc_errors_total", "corrected", "aggregate"): 1313,
        ("sram_ecc_errors_total", "uncorrected_parity", "volatile"): 1314,
        ("sram_ecc_errors_total", "uncorrected_sec_ded", "volatile"): 1315,
        ("sram_ecc_errors_total", "corrected", "volatile"): 1316, ("row_remap_banks", "all"): 1640,
        ("row_remap_banks", "most"): 1639, ("row_remap_banks", "some"): 1638, ("row_remap_banks", "few"): 1637,
        ("row_remap_banks", "none"): 1636, ("platform_info", "1821425190001", "9", "4", "1", "2"): 1,
        ("c2c_errors_total", "interrupt"): sum(5023101000 + link for link in range(10)),
        ("c2c_errors_total", "replay_back_to_back"): sum(5023301000 + link for link in range(10)),
        ("fabric_info", "a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", "5", "incorrect_system_guid"): 1,
        ("fabric_health", "healthy"): 1, ("fabric_health", "unhealthy"): 0,
        ("fabric_condition", "no_partition_assigned"): 1, ("fabric_condition", "fabric_manager_disconnected"): 1,
        ("clock_hertz", "graphics"): 2101, ("clock_hertz", "sm"): 2111, ("clock_hertz", "memory"): 2121,
        ("clock_hertz", "video"): 2131, ("clock_max_hertz", "memory"): 2921,
        ("clock_event_seconds_total", "sw_power_cap", "driver"): 5007401000,
        ("clock_event_seconds_total", "hw_slowdown", "sampled"): 3 * SECOND,
        ("clock_event_seconds_total", "gpu_idle", "sampled"): 0,
        ("ecc_errors_total", "corrected", "volatile"): 5000301000,
        ("ecc_errors_total", "uncorrected", "volatile"): 5000401000,
        ("ecc_errors_total", "corrected", "aggregate"): 5000501000,
        ("ecc_errors_total", "uncorrected", "aggregate"): 5000601000, ("retired_pages", "single_bit"): 29,
        ("retired_pages", "double_bit"): 30, ("remapped_rows", "corrected"): 142, ("remapped_rows", "uncorrected"): 143,
        ("nvlink_link_transmit_bytes_total", "17"): 5013801017 * 1024,
        ("nvlink_link_receive_bytes_total", "3"): 5013901003 * 1024,
        ("nvlink_link_errors_total", "2", "replay"): 5016101002,
        ("nvlink_link_errors_total", "2", "recovery"): 5016201002, ("nvlink_link_errors_total", "2", "crc"): 5016301002,
        ("nvlink_link_state", "9"): 1, ("nvlink_link_bytes_per_second", "9"): 26562000000,
        ("nvlink_info", "5", "4.0", "switch", "00000000:C1:00.0"): 1, ("pipe_active_ratio", "fp64"): 0.1225,
        ("pipe_active_ratio", "fp16"): 0.1425, ("fabric_state", "completed"): 1, ("fabric_state", "in_progress"): 0,
        ("fabric_condition", "degraded_bandwidth"): 1, ("fabric_condition", "incorrect_configuration"): 1,
        ("process_memory_bytes", "4010"): 8000, ("process_sm_ratio", "4011"): 0.32,
    }  # fmt: skip
    expected = {("gpu_" + name, "1"): value for name, value in plain.items()}
    expected |= {("gpu_" + name, "1", *labels): value for (name, *labels), value in labelled.items()}
    expected |= {("gpu_temperature_margin_celsius", "3"): -3, ("gpu_sram_ecc_threshold_exceeded", "2"): 1}
    assert {key: read.get(key) for key in expected} == pytest.approx(expected)
    assert ("gpu_pipe_active_ratio", "1", "tensor_dmma") not in read  # the stand-in lacks that one metric
    assert ("gpu_clock_event_seconds_total", "1", "sw_power_cap", "sampled") not in read  # counted once


def everything(standin, make, clock, tmp_path):
    """Collect from two machines (NVLink 4 and 5, MIG) and return all samples, healthy or not."""
    (tmp_path / "kmsg").touch()
    standin.page.mig = 1
    outcomes = [settled(make(), clock)]
    collector = make()
    tick(collector, clock)
    standin.page.lost[2] = 15
    outcomes.append(tick(collector, clock))
    standin.page.lost[2] = 0
    standin.page.nvlink5 = 1
    collector = make()
    outcomes += [tick(collector, clock) for _ in range(12)]
    return [s for outcome in outcomes for s in outcome.samples]


VERDICTS = {"pacecar_gpu_health", "pacecar_gpu_health_reason", "pacecar_gpu_missing"}
"""What the daemon concludes from the collectors; tested in `test_health_source` and `test_known_gpus`."""
GPU_METRICS = [m.name for m in CATALOG if m.subject is MetricSubject.GPU and m.name not in {*WINDOWED, *VERDICTS}]
CONSTANT = {name for name in GPU_METRICS if name.endswith("_info")} | {
    "pacecar_gpu_last_success_time_seconds",
    "pacecar_gpu_driver_calls_total",
    "pacecar_gpu_driver_openings_total",
    "pacecar_gpu_read_interval_seconds",
    "pacecar_gpu_c2c_links",
}
"""1 by definition, or never zero once there is a GPU."""

IN_REAL_TIME = {
    "pacecar_gpu_driver_call_seconds_total", "pacecar_gpu_driver_slow", "pacecar_gpu_xid_errors_total",
}  # fmt: skip
"""What threads beside the test decide; tested in `test_gpu_slow`, and Xid errors below."""


@pytest.mark.slow
def test_every_metric_reads_a_zero_and_a_non_zero_value(standin, make, clock, tmp_path):
    for gpu in range(GPUS):
        standin.page.reasons[gpu] = 0xFF
    standin.page.fans, standin.page.c2c = 2, 2
    standin.fail("POWER", 999, gpu=4, after=1, times=1)
    numbers = {name: set() for name in GPU_METRICS}
    for sample in everything(standin, make, clock, tmp_path):
        assert len(sample.labels) == len(by_name(sample.metric).labels), sample
        numbers[sample.metric].add(sample.value)
    standin.page.zero = 1
    zeros = {name: set() for name in GPU_METRICS}
    for sample in everything(standin, make, clock, tmp_path):
        zeros[sample.metric].add(sample.value)
    assert {name for name, seen in numbers.items() if not seen - {0}} <= IN_REAL_TIME
    assert [name for name, seen in zeros.items() if 0 not in seen and name not in CONSTANT | IN_REAL_TIME] == []


@pytest.mark.slow
def test_zero_is_a_measurement(standin, make, clock):
    before = {key for gpu in range(GPUS) for key in of_gpu(settled(make(), clock), gpu) if "process_" not in key[0]}
    standin.page.zero = 1
    outcome = settled(make(), clock)
    after = {key for gpu in range(GPUS) for key in of_gpu(outcome, gpu) if "process_" not in key[0]}
    assert {key for key in before - after if "fabric_" not in key[0]} == set()
    assert health(outcome, 0, "utilization_ratio") == 0
    assert health(outcome, 0, "power_watts") == 0


def test_a_board_outside_a_chassis_has_no_place_in_one(standin, make, clock):
    """The driver of a plain H200 reports slot 0, tray 0 and host 1, and nvidia-smi prints "N/A"."""
    standin.page.links = 0
    assert ("pacecar_gpu_platform_info", "", "", "", "", "2") in of_gpu(settled(make(), clock), 1)


FABRIC = ("pacecar_gpu_fabric_info", "a1a1a1a1-a1a1-a1a1-a1a1-a1a1a1a1a1a1", "5")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("newest", "problem", "conditions", "healths"),
    [(0, "incorrect_system_guid", 7, 3), (2, "incorrect_system_guid", 7, 0), (1, "", 0, 0)],
)
def test_a_driver_with_older_structures_says_less(standin, make, clock, newest, problem, conditions, healths):
    standin.page.structures = newest
    collector = make()
    read = of_gpu(settled(collector, clock, ticks=12), 1)  # on a busy machine a call looks dear and is put off
    assert read[(*FABRIC, problem)] == 1
    assert len([key for key in read if key[0] == "pacecar_gpu_fabric_condition"]) == conditions
    assert len([key for key in read if key[0] == "pacecar_gpu_fabric_health"]) == healths
    assert ("pacecar_gpu_platform_info", "1821425190001", "9", "4", "1", "2") in read
    before = standin.calls(1)["FABRIC"]
    for _ in range(90):
        tick(collector, clock)
    assert standin.calls(1)["FABRIC"] - before <= 4 * 3, "all three structures, each half minute"


def test_before_hopper_there_is_no_performance_monitor_rather_than_zero(standin, make, clock):
    standin.page.gpm = 0
    outcome = settled(make(), clock)
    assert isinstance(outcome, Ok)
    assert not [
        s
        for s in outcome.samples
        if "active_ratio" in s.metric or ("bytes_per_second" in s.metric and "link_b" not in s.metric)
    ]


@pytest.mark.slow
def test_nvlink_5_counts_by_its_own_fields_and_totals_are_their_sum(standin, make, clock):
    standin.page.nvlink5 = 1
    standin.page.links = 3
    read = of_gpu(settled(make(), clock, 8), 0)
    assert read[("pacecar_gpu_nvlink_link_transmit_bytes_total", "2")] == 5020200002
    assert read[("pacecar_gpu_nvlink_link_receive_packets_total", "1")] == 5020300001
    assert read[("pacecar_gpu_nvlink_transmit_bytes_total",)] == sum(5020200000 + link for link in range(3))
    assert read[("pacecar_gpu_nvlink_link_errors_total", "1", "symbol")] == 5022100001


def test_mig_instances_have_memory_processes_and_their_share_of_the_monitor(standin, make, clock, values):
    standin.page.mig = 1
    collector = make()
    read = values(settled(collector, clock, 8))
    assert read[("gpu_mig_enabled", "7")] == 1
    assert read[("gpu_mig_instances", "7")] == 2
    assert read[("gpu_instance_info", "7", "2", "0", "MIG-7-2", "Stand-in MIG 3g.71gb")] == 1
    assert read[("gpu_instance_memory_used_bytes", "7", "1", "0")] == 87540
    assert read[("gpu_instance_processes", "7", "2", "0")] == 2
    assert read[("gpu_instance_active_ratio", "7", "1", "sm")] == pytest.approx(0.1025)
    assert ("gpu_utilization_ratio", "7") not in read
    assert ("gpu_memory_used_bytes", "7") in read
    standin.page.mig = 0  # found out by the query for the mode, within half a minute
    read = values(settled(collector, clock, 40))
    assert read[("gpu_mig_enabled", "7")] == 0
    assert ("gpu_utilization_ratio", "7") in read
    assert not [key for key in read if key[0].startswith("gpu_instance")]


@pytest.mark.parametrize(("code", "mig"), [(3, "off"), (13, "off"), (4, ""), (999, "")])
def test_a_mig_mode_that_could_not_be_read_is_off_only_where_there_is_none(standin, make, clock, code, mig):
    """A GPU or a driver without MIG does not support the query, or does not know it."""
    standin.page.count, standin.page.links = 1, 0
    standin.fail("MIGMODE", code)
    collector = make()
    assert {s.labels[-1] for s in tick(collector, clock).samples if s.metric == "pacecar_gpu_info"} == {mig}
    standin.fail("MIGMODE", 0)
    outcome = settled(collector, clock, 60)
    assert {s.labels[-1] for s in outcome.samples if s.metric == "pacecar_gpu_info"} == {"off"}


def nvlink(outcome, gpu, link):
    """Return the state of a link and the labels of what it leads to."""
    read = of_gpu(outcome, gpu)
    ends = [key[2:] for key in read if key[:2] == ("pacecar_gpu_nvlink_info", str(link))]
    return read.get(("pacecar_gpu_nvlink_link_state", str(link))), *ends


@pytest.mark.slow
@pytest.mark.parametrize("says_where_to", [True, False])
def test_what_a_link_leads_to_is_known_while_it_is_down(standin, make, clock, says_where_to):
    """The driver does not report it for a link that is down, but the alert needs it."""
    standin.page.links = 2
    end = ("4.0", "switch", "00000000:C1:00.0") if says_where_to else ("", "", "")
    collector = make()
    if not says_where_to:
        standin.fail("LINK_TYPE", 3)
        standin.page.missing[FUNCTION["LINK_PCI"]] = 1
    assert nvlink(settled(collector, clock, 8), 1, 1) == (1, end)
    standin.page.link_down[1] = 2
    for _ in range(60):
        outcome = tick(collector, clock)
    assert nvlink(outcome, 1, 1) == (0, end)
    standin.page.link_down[1] = 0
    for _ in range(60):
        outcome = tick(collector, clock)
    assert nvlink(outcome, 1, 1) == (1, end)


def test_a_link_that_never_led_anywhere_has_a_state_and_no_other_end(standin, make, clock):
    standin.page.links, standin.page.link_down[1] = 2, 2
    outcome = settled(make(), clock, 8)
    assert nvlink(outcome, 1, 1) == (0,)
    assert nvlink(outcome, 1, 0) == (1, ("4.0", "switch", "00000000:C0:00.0"))


class Link:
    """GPU 0 moves this many bytes a second over PCIe, with a 32-bit counter and ten glances a second."""

    def __init__(self, standin, collector, clock, rate):
        self.standin, self.collector, self.clock, self.rate, self.moved = standin, collector, clock, rate, 1

    def go_on(self, seconds, *, glances=10):
        """Return what the tick after that time reads."""
        for _ in range(max(1, round(seconds * glances))):
            step = seconds / max(1, round(seconds * glances))
            self.clock.advance(round(step * SECOND))
            self.moved += round(self.rate * step)
            self.standin.page.pcie_bytes[0] = self.moved % (1 << 32) or 1
            if glances:
                self.collector.glance()
                self.collector._wait_for_glances(10.0)  # on a busy machine longer than a tick would
        return of_gpu(self.collector.collect(), 0)


SENT = ("pacecar_gpu_pcie_transmit_bytes_total",)
RELIABLE = ("pacecar_gpu_pcie_counters_reliable",)


@pytest.mark.slow
@pytest.mark.parametrize(("generation", "gigabytes"), [(4, 0), (4, 1), (4, 20), (4, 31), (3, 15)])
def test_a_pcie_counter_that_goes_round_several_times_a_second_is_followed_by_glances(
    standin, make, clock, generation, gigabytes
):
    """At 20 GB/s it wraps five times a second; one reading a second counted 23.6 of 200 GB."""
    standin.page.pcie_generation_max = generation
    link = Link(standin, make(), clock, gigabytes * 10**9)
    for _ in range(3):
        before = link.go_on(1.0)
    read = [link.go_on(1.0) for _ in range(10)]
    assert read[-1][SENT] - before[SENT] == pytest.approx(10 * gigabytes * 10**9, abs=10)
    assert all(one[RELIABLE] == 1 for one in read)


def test_a_pcie_link_too_fast_for_its_counter_has_no_total_and_says_so(standin, make, clock):
    link = Link(standin, make(), clock, 64 * 10**9)  # generation 5, 16 lanes
    for _ in range(10):
        read = link.go_on(1.0)
        assert SENT not in read
        assert read[RELIABLE] == 0
    assert standin.calls(0)["FIELDS"] < 20, "no glance is spent on what cannot be known"


def test_a_late_tick_and_a_glance_that_did_not_come_make_a_gap_and_no_wrong_number(standin, make, clock):
    standin.page.pcie_generation_max = 4
    link = Link(standin, make(), clock, 20 * 10**9)
    for _ in range(3):
        link.go_on(1.0)
    assert SENT in link.go_on(1.0)
    late = link.go_on(3.0, glances=0)
    assert SENT not in late
    assert late[RELIABLE] == 0
    link.clock.advance(SECOND // 2)  # five glances are left out, and the next ones come in time
    link.moved += 10 * 10**9
    read = link.go_on(0.5)
    assert SENT not in read
    assert SENT in link.go_on(1.0)


def test_a_counter_with_64_bits_is_right_at_any_rate(standin, make, clock):
    read = of_gpu(tick(make(), clock), 0)  # the first reading is above what 32 bits hold
    assert read[SENT] == 5019700000
    assert read[RELIABLE] == 1


@pytest.mark.slow
def test_fans_are_read_each_and_a_gpu_that_the_chassis_cools_has_none(standin, make, clock):
    assert not [key for key in of_gpu(settled(make(), clock), 1) if "fan" in key[0]]
    standin.page.fans = 2
    read = of_gpu(settled(make(), clock), 1)
    fans = {key[1:]: value for key, value in read.items() if "fan" in key[0]}
    assert {key: value for key, value in read.items() if "fan" in key[0]} == {
        ("pacecar_gpu_fan_speed_ratio", "0"): 0.46,
        ("pacecar_gpu_fan_speed_ratio", "1"): 0.56,
        ("pacecar_gpu_fan_rpm", "0"): 2500,
        ("pacecar_gpu_fan_rpm", "1"): 2600,
    }, fans
    standin.page.missing[FUNCTION["FAN_RPM"]] = 1  # an older driver
    read = of_gpu(settled(make(), clock), 1)
    assert sorted({key[0] for key in read if "fan" in key[0]}) == ["pacecar_gpu_fan_speed_ratio"]


# --- fields whose numbers were moved --------------------------------------------------------------


HELD = "pacecar_gpu_clock_event_seconds_total"
HEAT = 0x20 | 0x40


@pytest.mark.slow
@pytest.mark.parametrize(
    ("driver", "numbering", "source"),
    [
        (550_163, BEFORE, "sampled"),
        (570_172, BEFORE, "sampled"),
        (575_057, OLD, "driver"),
        (580_065, OLD, "driver"),
        (580_076, OLD, "sampled"),  # no header is known
        (580_076, NEW, "sampled"),
        (580_082, NEW, "driver"),
        (590_048, NEW, "driver"),
        (0, NEW, "driver"),
        (620_010, NEW, "driver"),  # newer than all headers known
        (620_010, OLD, "sampled"),  # whose answers mean something else
        (575_057, NEW, "sampled"),
    ],
)
def test_thirty_seconds_of_heat_are_thirty_seconds_with_each_driver(
    standin, make, clock, caplog, driver, numbering, source
):
    """Fields 269 to 271 mean power smoothing in drivers around 575, where 30 s once became 80 ns."""
    standin.page.count, standin.page.links = 1, 0
    standin.page.driver, standin.page.numbering = driver, numbering
    collector = make()
    standin.page.reasons[0] = 1
    before = of_gpu(settled(collector, clock, 20), 0)
    standin.page.reasons[0] = HEAT
    for second in range(1, 31):
        standin.page.held_ns[0] = second * SECOND
        outcome = tick(collector, clock)
    read = of_gpu(outcome, 0)
    for reason in ("sw_thermal_slowdown", "hw_thermal_slowdown"):
        (served,) = [key for key in read if key[:2] == (HELD, reason)]
        assert served[2] == source
        assert (read[served] - before.get(served, 0)) / SECOND == pytest.approx(30, abs=0.5)
    is_contradicted = source == "sampled" and driver >= 575_057 and driver != 580_076
    assert ("samples are served" in caplog.text) == is_contradicted


def test_every_field_that_is_asked_is_the_newest_headers():
    """And no driver is asked for a field that it numbers differently or does not know."""
    import pynvml

    newest = fields_of("", LINKS_MAX)
    asked = {field.field.number for field in newest} | {LINK_COUNT.number}
    assert asked <= DEFINED.keys()
    for number, defined in DEFINED.items():
        if defined.until is None:
            assert getattr(pynvml, f"NVML_FI_{defined.name}") == number
        else:
            assert getattr(pynvml, f"NVML_FI_{defined.name}") != number
            assert number not in asked
    series = [field.series for field in fields_of("580.65.06", 0)]
    assert len(series) == len(set(series)), "one number for each meaning"


# --- what it costs --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("mig", "cheaper"), [(0, 2), (MIG_H100, 20)])
def test_no_tick_makes_more_than_twelve_calls_a_gpu_glances_included(standin, make, clock, mig, cheaper):
    standin.page.mig, standin.page.c2c = mig, 2
    collector = make()
    outcome = tick(collector, clock)
    most = 0
    for _ in range(80):
        before = standin.calls_in_all()
        clock.advance(SECOND // 2)
        collector.glance()
        clock.advance(SECOND // 2)
        collector.glance()
        outcome = collector.collect()
        spent = [after - was for was, after in zip(before, standin.calls_in_all(), strict=True)]
        most = max(most, *spent[:GPUS])
        assert most <= CALLS_PER_TICK_MAX
        assert spent[GPUS] <= 1  # the event set, for all GPUs together
    assert most > 9  # the slow queries were asked, or this says nothing
    assert isinstance(outcome, Ok)
    # A query is counted at its price; the first of each monitor, and a list of nobody, is one call cheaper.
    for gpu in range(GPUS):
        opening = ("HANDLE", "UUID", "NAME", "PCI", "VBIOS", "EVENT_REGISTER")
        made = sum(calls for function, calls in standin.calls(gpu).items() if function not in opening)
        assert 0 <= health(outcome, gpu, "driver_calls_total") - made <= cheaper  # and UUIDs and names of instances


def test_fields_are_one_call_and_unsupported_ones_are_asked_once(standin, make, clock):
    collector = make()
    settled(collector, clock)
    before = standin.calls(0)["FIELDS"]
    settled(collector, clock, 10)
    assert standin.calls(0)["FIELDS"] == before + 10
    standin.fail("ENC", 3, gpu=1)
    outcome = settled(make(), clock)
    assert isinstance(outcome, Ok)
    assert ("pacecar_gpu_encoder_utilization_ratio",) not in of_gpu(outcome, 1)
    assert ("pacecar_gpu_encoder_utilization_ratio",) in of_gpu(outcome, 2)


def test_a_glance_reads_power_and_utilization_in_turn(standin, make, clock):
    collector = make()
    settled(collector, clock)
    seen = set()
    for _ in range(2):
        clock.advance(SECOND // 2)
        seen |= {(s.metric, s.labels, s.value) for s in collector.glance()}
        tick(collector, clock, 0.5)
    assert ("pacecar_gpu_power_watts", ("2",), 652103) in seen
    assert ("pacecar_gpu_utilization_ratio", ("2",), 0.83) in seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", ["MEMORY", "ENERGY", "FIELDS", "FABRIC", "CUDA", "EVENT_CREATE", "GPM_GET", "VBIOS"]
)
def test_a_driver_that_lacks_a_function_lacks_its_numbers_only(standin, make, clock, function):
    standin.page.missing[FUNCTION[function]] = 1
    outcome = settled(make(), clock)
    assert up(outcome) == list(range(GPUS))
    assert health(outcome, 0, "power_watts") == 650103
    if function == "FIELDS":
        assert health(outcome, 0, "energy_joules_total") == 9000000105  # by the call of its own


# --- Xid errors -----------------------------------------------------------------------------------


def xids(outcome):
    counts = {s.labels: s.value for s in outcome.samples if s.metric == "pacecar_gpu_xid_errors_total"}
    return {labels: count for labels, count in counts.items() if count or int(labels[1]) not in KNOWN_XIDS}


def test_an_xid_of_the_event_set_and_of_the_kernel_log_counts_once(standin, make, clock, tmp_path):
    log = tmp_path / "kmsg"
    log.touch()
    collector = make()
    until(lambda: xids(tick(collector, clock)) == {} and "EVENT_REGISTER" in standin.calls(2), "its events are watched")
    standin.xid(2, 79)
    until(lambda: xids(tick(collector, clock, 0.1)) == {("2", "79"): 1}, "the thread that listens has heard the event")
    with log.open("a") as file:
        file.write("3,9,1,-;NVRM: Xid (PCI:0000:1c:00): 79, GPU has fallen off the bus.\n")
        file.write("3,9,1,-;NVRM: Xid (PCI:0000:1d:00): 13, something.\n")
        file.write("3,9,1,-;NVRM: Xid (PCI:0000:ff:00): 62, of no GPU of ours.\n")
    said = {("2", "79"): 1, ("3", "13"): 1, ("unknown", "62"): 1}
    until(lambda: xids(tick(collector, clock, 0.1)) == said, "it has read the log, where one of three is known")


def test_an_xid_that_is_heard_after_its_tick_is_counted_in_the_next(standin, make, clock):
    """On a busy machine reading the event set outlasts the tick; what it had read was dropped, for good."""
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    until(lambda: xids(tick(collector, clock)) == {} and "EVENT_REGISTER" in standin.calls(2), "its events are watched")
    standin.hold(GPUS)
    standin.xid(2, 79)
    until(lambda: xids(tick(collector, clock)) == {} and standin.page.hanging == 1, "the read does not return")
    standin.release()
    until(lambda: collector._listener.busy_since_ns is None, "it has returned")
    assert xids(tick(collector, clock)) == {("2", "79"): 1}


def test_without_a_kernel_log_the_event_set_counts_and_without_both_there_is_no_count(standin, make, clock):
    collector = make()
    tick(collector, clock)
    standin.xid(0, 31)
    until(lambda: xids(tick(collector, clock)) == {("0", "31"): 1}, "the thread that listens has heard the event")
    standin.page.missing[FUNCTION["EVENT_CREATE"]] = 1
    outcome = tick(make(), clock)
    assert isinstance(outcome, Ok)
    assert not [s for s in outcome.samples if s.metric == "pacecar_gpu_xid_errors_total"]


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_hanging_gpu_is_reported_when_its_call_is_overdue_and_costs_its_own_series_only(standin, make, clock, caplog):
    """The others keep their rate: only the first tick waits for the deadline, and none for longer."""
    caplog.set_level(logging.INFO)
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    settled(collector, clock)
    before = health(tick(collector, clock), 5, "failures_total", "hung")
    standin.hold(5)
    begun_ns = clock.monotonic_ns() + SECOND
    assert 5 in up(tick(collector, clock)), "it may only be slow"
    collector._deadline_seconds = patience = 60.0  # what a tick would take that waits for the call again
    while 5 in up(tick(collector, clock)):
        pass
    assert clock.monotonic_ns() - begun_ns == CALL_SECONDS_MIN * SECOND
    began = time.monotonic()
    for _ in range(4):
        outcome = tick(collector, clock)
        assert up(outcome) == [0, 1, 2, 3, 4, 6, 7]
        assert health(outcome, 5, "down", "hung") == 1
        assert ("pacecar_gpu_power_watts",) not in of_gpu(outcome, 5)
        assert health(outcome, 6, "power_watts") == 656103
        assert isinstance(outcome, Failed)
    assert time.monotonic() - began < patience
    assert health(outcome, 5, "consecutive_failures") == 5
    assert health(outcome, 5, "failures_total", "hung") - before == 5
    assert health(outcome, 5, "last_success_time_seconds") < clock.wall_ns()
    standin.release()
    until(lambda: up(tick(collector, clock)) == list(range(GPUS)), "the call returned, and it is up again")
    lines = [record.message for record in caplog.records if record.message.startswith("gpu 5")]
    assert len(lines) == 2, lines  # down once, back once
    assert standin.page.inits == 1  # nobody shut the driver down under the hanging call


def test_a_gpu_that_answers_is_read_though_more_hang_than_one_tick_finds(standin, make, clock):
    """When all GPUs but the last hang at once, a tick ends before a thread has started on the last."""
    collector = make(deadline_seconds=0.03)
    until(lambda: up(tick(collector, clock)) == list(range(GPUS)), "all are up")
    for gpu in range(GPUS - 1):
        standin.hold(gpu)
    until(lambda: tick(collector, clock) and standin.page.hanging == GPUS - 1, "all that hang were begun")
    last = collector._gpus[str(GPUS - 1)].worker
    # Its job may still wait for a thread, and only a tick starts one.
    until(lambda: tick(collector, clock) and last.busy_since_ns is None, "the last one answered")
    calls = standin.calls_in_all()[GPUS - 1]
    until(lambda: tick(collector, clock) and standin.calls_in_all()[GPUS - 1] > calls, "it is read again")


@pytest.mark.slow
def test_a_driver_that_is_reloaded_while_a_call_hangs_is_opened_without_waiting_for_it(standin, make, clock):
    """A shutdown would wait for the hung call; it is made up for when no call hangs."""
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    settled(collector, clock)
    standin.hold(1)
    tick(collector, clock)
    standin.page.driver_life += 1
    until(lambda: up(tick(collector, clock)) == [0, 2, 3, 4, 5, 6, 7], "the others are up in the new session")
    assert (standin.page.inits, standin.page.shutdowns) == (2, 0)
    standin.release()
    until(lambda: up(tick(collector, clock)) == list(range(GPUS)), "the hung call returned")


@pytest.mark.slow
def test_a_driver_that_is_only_slow_is_served_a_tick_late_rather_than_called_dead(standin, make, clock):
    standin.page.count = 2
    collector = make(deadline_seconds=0.05)
    settled(collector, clock)
    standin.page.latency_us = 10_000
    seen = []
    for _ in range(6):
        outcome = tick(collector, clock)
        seen.append(up(outcome))
        until(lambda: all(unit.worker.busy_since_ns is None for unit in collector._gpus.values()), "the answers came")
    assert seen == [[0, 1]] * 6
    assert health(outcome, 1, "power_watts") == 651103


@pytest.mark.slow
@pytest.mark.parametrize("hangs_from_the_start", [False, True])
def test_closing_beside_a_hanging_call_does_not_wait_for_it(standin, make, clock, hangs_from_the_start):
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    if not hangs_from_the_start:
        settled(collector, clock)
    standin.hold(0)
    until(lambda: 0 not in up(tick(collector, clock)) and standin.page.hanging == 1, "its call hangs")
    collector.close()
    assert standin.page.hanging == 1  # it is over before the call is
    assert standin.page.shutdowns == 0


@pytest.mark.slow
def test_a_gpu_that_hangs_from_the_start_is_reported_and_comes_later(standin, make, clock):
    """A daemon started while a GPU hangs has the other GPUs at once."""
    standin.hold(0)
    standin.page.links = 0
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    outcome = tick(collector, clock)
    until(lambda: up(tick(collector, clock)) == list(range(1, GPUS)), "the others are up")
    until(lambda: health(tick(collector, clock), 0, "down", "hung") == 1, "its first queries are overdue")
    outcome = tick(collector, clock)
    assert health(outcome, 0, "down", "hung") == 1
    assert health(outcome, 5, "power_watts") == 655103
    standin.release()
    until(lambda: up(tick(collector, clock)) == list(range(GPUS)), "it answered, late")
    assert standin.page.inits == 1


@pytest.mark.slow
@pytest.mark.parametrize(("code", "reason"), [(15, "lost"), (16, "reset_required"), (28, "lost"), (999, "lost")])
def test_a_lost_gpu_that_returns_is_probed_again_without_opening_the_driver(standin, make, clock, caplog, code, reason):
    collector = make()
    settled(collector, clock)
    before = standin.calls_in_all()
    standin.page.lost[3] = code
    for _ in range(4):
        outcome = tick(collector, clock)
        assert up(outcome) == [0, 1, 2, 4, 5, 6, 7]
        assert health(outcome, 4, "power_watts") == 654103
    assert health(outcome, 3, "down", "error" if code == 999 else reason) == 1
    # The first tick of an unnamed error asks everything before it knows; then it is one call a tick.
    assert standin.calls_in_all()[3] - before[3] <= 4 + CALLS_PER_TICK_MAX
    standin.page.lost[3] = 0
    outcome = tick(collector, clock)
    assert isinstance(outcome, Ok)
    assert health(outcome, 3, "power_limit_watts") == 703104
    assert standin.page.inits == 1


@pytest.mark.slow
def test_a_gpu_that_stays_lost_has_the_driver_opened_again_less_and_less_often(standin, make, clock):
    collector = make()
    settled(collector, clock)
    standin.page.lost[3] = 15
    openings = []
    for _ in range(200):
        before = standin.page.inits
        outcome = tick(collector, clock)
        openings.append(standin.page.inits - before)
        assert up(outcome) == [0, 1, 2, 4, 5, 6, 7]
    at = [second for second, opened in enumerate(openings) if opened]
    assert at[0] >= REINIT_AFTER_SECONDS - 1
    assert 3 <= len(at) <= 5
    assert standin.page.inits - standin.page.shutdowns == 1


def test_a_vanished_gpu_keeps_its_label_and_so_do_the_others(standin, make, clock):
    standin.page.count = 4
    collector = make()
    settled(collector, clock)
    standin.page.lost[3] = 15
    standin.page.count = 3
    for _ in range(REINIT_AFTER_SECONDS + 3):
        outcome = tick(collector, clock)
    assert up(outcome) == [0, 1, 2]
    assert health(outcome, 3, "down", "vanished") == 1
    standin.page.lost[3], standin.page.count = 0, 4
    outcome = tick(collector, clock)
    assert up(outcome) == [0, 1, 2, 3]
    assert health(outcome, 3, "failures_total", "vanished") > 0


def test_a_gpu_that_is_lost_when_the_daemon_starts_is_down_and_found_when_it_returns(standin, make, clock):
    standin.page.count = 3
    standin.page.lost[1] = 15
    collector = make()
    for _ in range(3):
        outcome = tick(collector, clock)
        assert up(outcome) == [0, 2]
        assert health(outcome, 1, "down", "error") == 1
    standin.page.lost[1] = 0
    outcome = tick(collector, clock)
    assert up(outcome) == [0, 1, 2]
    assert ("pacecar_gpu_info", "GPU-1") in {key[:2] for key in of_gpu(outcome, 1)}


def test_when_numbers_shift_a_gpu_keeps_its_series_and_none_is_taken_for_another(standin, make, clock):
    """When GPU 0 leaves the driver's list and the others move up, labels stay with their UUIDs."""
    collector = make()
    settled(collector, clock)
    standin.page.first = 1
    standin.page.count = 7
    standin.page.driver_life += 1
    for _ in range(5):
        outcome = tick(collector, clock, 2)
    assert up(outcome) == list(range(1, GPUS))
    assert health(outcome, 3, "power_watts") == 653103
    assert health(outcome, 0, "down", "vanished") == 1


def test_a_reloaded_driver_is_opened_anew_and_its_counters_go_on(standin, make, clock):
    collector = make()
    outcome = settled(collector, clock)
    before = health(outcome, 0, "pcie_transmit_bytes_total")
    standin.page.driver_life += 1
    standin.page.zero = 1  # its counters begin at zero
    outcome = tick(collector, clock, 2)
    assert isinstance(outcome, Failed)
    assert up(outcome) == []
    assert health(outcome, 0, "down", "driver") == 1
    outcome = tick(collector, clock, 2)
    assert isinstance(outcome, Ok)
    assert health(outcome, 0, "pcie_transmit_bytes_total") == before
    standin.page.zero = 0
    assert health(tick(collector, clock), 0, "pcie_transmit_bytes_total") == 2 * before


@pytest.mark.slow
@pytest.mark.parametrize(("attribute", "none", "some"), [("driver_missing", 1, 0), ("count", 0, 2)])
def test_a_driver_or_a_gpu_that_comes_after_the_daemon_is_absent_until_it_is_found(
    standin, make, clock, attribute, none, some
):
    setattr(standin.page, attribute, none)
    collector = make()
    assert isinstance(collector.collect(), Absent)
    assert isinstance(tick(collector, clock, REOPEN_SECONDS - 1), Absent)
    assert standin.calls(GPUS)["INIT"] == 1
    setattr(standin.page, attribute, some)
    assert isinstance(tick(collector, clock), Ok)


def test_failures_are_said_once_and_not_at_every_tick(standin, make, clock, caplog):
    caplog.set_level(logging.INFO)
    collector = make()
    settled(collector, clock)
    standin.fail("POWER", 999, gpu=2)
    for _ in range(5):
        outcome = tick(collector, clock)
        assert (type(outcome), outcome.read_failures) == (Ok, 1)
        assert "gpu 2: power: Unknown Error" in outcome.reason
        assert ("pacecar_gpu_power_watts",) not in of_gpu(outcome, 2)
        assert ("pacecar_gpu_temperature_celsius",) in of_gpu(outcome, 2)
    assert health(outcome, 2, "read_failures_total") == 5
    standin.fail("POWER", 0)
    assert isinstance(tick(collector, clock), Ok)
    assert len([record for record in caplog.records if record.message.startswith("gpu 2")]) == 2


def every(codes, calls):
    return ((code, n) for code in codes for n in range(calls))


def some(codes, calls):
    """Yield (code, n): every code for some n, every n for some code."""
    stride = min(STRIDE, calls)
    for at, code in enumerate(codes):
        yield from ((code, n) for n in range(at % stride, calls, stride))


@pytest.fixture
def opens_in_its_tick(monkeypatch):
    """However busy this machine is, the first tick waits until every GPU has answered."""
    monkeypatch.setattr("pacecar.monitor.collectors.gpu.OPEN_SECONDS", 60.0)


def check_each_failure(standin, make, clock, codes, choose):
    """If the n-th call for GPU 0 fails, nothing is raised, GPU 1 is complete, and GPU 0 recovers."""
    standin.page.count, standin.page.links = 2, 2
    healthy = settled(make(), clock)
    whole, of_0 = of_gpu(healthy, 1), of_gpu(healthy, 0)
    # A driver without the newer call for memory counts what it reserves as used.
    of_0.pop(("pacecar_gpu_memory_used_bytes",))
    for key in [key for key in of_0 if any(word in key[0] for word in UNSTABLE)]:
        del of_0[key]
    wrong = []
    for code, n in choose(codes, standin.calls_in_all()[0]):
        collector = make()
        standin.fail(None, code, gpu=0, after=n, times=1)
        outcomes = [tick(collector, clock) for _ in range(6)]
        standin.fail(None, 0, times=0)
        wrong += [
            (code, n, getattr(o, "reason", None)) for o in outcomes[2 if code in (1, 9, 18) else 1 :] if 1 not in up(o)
        ]
        if of_gpu(outcomes[-1], 1).keys() != whole.keys():
            wrong.append((code, n, "GPU 1 is not whole"))
        outcomes += [tick(collector, clock, REINIT_AFTER_SECONDS + 1), tick(collector, clock)]
        for outcome in outcomes:
            read = of_gpu(outcome, 0).items() if not isinstance(outcome, Absent) else ()
            wrong += [(code, n, key, value) for key, value in read if of_0.get(key, value) != value]
        if up(outcomes[-1]) != [0, 1]:
            wrong.append((code, n, outcomes[-1]))
        collector.close()
    assert wrong == []


QUICK = pytest.param(CODES, some, marks=pytest.mark.slow, id="some")
"""Some calls with each code."""


@pytest.mark.usefixtures("opens_in_its_tick")
@pytest.mark.parametrize(
    ("codes", "choose"),
    [
        QUICK,
        pytest.param([1], every, marks=pytest.mark.slow, id="1"),
        *(pytest.param([code], every, marks=pytest.mark.full, id=str(code)) for code in CODES if code != 1),
    ],
)
def test_any_one_call_may_fail_with_any_code(standin, make, clock, codes, choose):
    check_each_failure(standin, make, clock, codes, choose)


@pytest.mark.usefixtures("opens_in_its_tick")
@pytest.mark.parametrize(("codes", "choose"), [QUICK, pytest.param(CODES, every, marks=pytest.mark.full, id="every")])
def test_any_one_call_of_the_driver_itself_may_fail_with_any_code(standin, make, clock, codes, choose):
    """Calls for no GPU (initialize, versions, count, events) cost at most one attempt to open the driver."""
    standin.page.count, standin.page.links = 2, 0
    wrong = []
    for code, n in choose(codes, DRIVER_CALLS):
        collector = make()
        standin.fail(None, code, gpu=GPUS, after=n, times=1)
        tick(collector, clock)
        standin.fail(None, 0, times=0)
        outcomes = [tick(collector, clock, REOPEN_SECONDS) for _ in range(3)]
        if up(outcomes[-1]) != [0, 1]:
            wrong.append((code, n, outcomes[-1]))
        collector.close()
    assert wrong == []


@pytest.mark.slow
def test_a_number_that_only_ever_fails_is_asked_less_often_in_the_end(standin, make, clock):
    standin.page.count, standin.page.links = 2, 0
    standin.fail("PSTATE", 999, gpu=1)
    collector = make()
    assert tick(collector, clock).read_failures > 0
    outcomes = [tick(collector, clock) for _ in range(300)]
    assert standin.calls(1)["PSTATE"] < 20, "a driver with one broken number does not look broken for ever"
    assert sum(outcome.read_failures for outcome in outcomes[60:]) == 0
    assert ("pacecar_gpu_performance_state",) in of_gpu(outcomes[-1], 0)
    assert (
        health(outcomes[-1], 1, "refused_numbers", "probe") == health(outcomes[-1], 0, "refused_numbers", "probe") + 1
    )
    standin.fail("PSTATE", 0)
    until(lambda: ("pacecar_gpu_performance_state",) in of_gpu(tick(collector, clock, 60), 1), "it is read")


REFUSED_ONCE = ("UTIL", "PSTATE", "GPM_SUPPORT", "ARCH", "FANS", "MIGMODE", "FIELDS", "ENC", "FABRIC", "GPM_METRICS")


@pytest.mark.slow
@pytest.mark.parametrize("function", REFUSED_ONCE)
def test_what_was_refused_when_the_daemon_started_is_read_when_the_driver_answers(standin, make, clock, function):
    """A driver refuses queries while it initializes; that once lost the number for the daemon's life."""
    standin.page.count, standin.page.fans = 2, 1
    standin.fail(function, 3, gpu=1)
    collector = make()
    outcome = settled(collector, clock)
    missing = of_gpu(outcome, 0).keys() - of_gpu(outcome, 1).keys()
    if function not in ("ARCH", "MIGMODE"):
        assert {key for key in missing if "process" not in key[0]}
    standin.fail(function, 0)
    for _ in range(80):
        outcome = tick(collector, clock)
    assert of_gpu(outcome, 0).keys() - of_gpu(outcome, 1).keys() == {
        key for key in of_gpu(outcome, 0) if key[0] in OWN_LABELS
    }
    info = next(key for key in of_gpu(outcome, 1) if key[0] == "pacecar_gpu_info")
    assert info[5] == "hopper"
    assert health(outcome, 1, "refused_numbers", "probe") == health(outcome, 0, "refused_numbers", "probe")


OWN_LABELS = {
    *(f"pacecar_gpu_{name}" for name in ("info", "fabric_info", "platform_info")),
    *(f"pacecar_gpu_process_{name}" for name in ("memory_bytes", "sm_ratio")),
}
"""Metrics with a label that differs by GPU."""


@pytest.mark.slow
def test_a_number_that_is_refused_for_good_is_not_said_to_be_read_again(standin, make, clock, caplog):
    caplog.set_level(logging.INFO)
    standin.page.count, standin.page.links = 4, 0
    collector = make()
    settled(collector, clock)
    standin.fail("POWER", 3, gpu=2)
    outcomes = [tick(collector, clock) for _ in range(40)]
    lines = [record.message for record in caplog.records if record.message.startswith("gpu 2")]
    assert lines == ["gpu 2: not all numbers are read: power: Not Supported (NVML error 3)"]
    assert health(outcomes[-1], 2, "refused_numbers", "later") == 1
    assert health(outcomes[-1], 3, "refused_numbers", "later") == 0
    assert ("pacecar_gpu_power_watts",) not in of_gpu(outcomes[-1], 2)
    standin.fail("POWER", 0)
    outcomes = [tick(collector, clock) for _ in range(60)]
    lines = [record.message for record in caplog.records if record.message.startswith("gpu 2")]
    assert lines[1:] == ["gpu 2: all numbers are read again"]
    assert health(outcomes[-1], 2, "refused_numbers", "later") == 0
    assert health(outcomes[-1], 2, "power_watts") == 652103


INFO_OF_3 = ("pacecar_gpu_info", "GPU-3", "Stand-in", "599.77", "00000000:1D:00.0", "hopper", "13.1", "96.00.03", "off")


def make_lost(standin):
    standin.page.lost[3] = 15


def make_vanish(standin):
    standin.page.count, standin.page.lost[3] = 3, 15


def make_hang(standin):
    standin.hold(3)


def unload_the_driver(standin):
    standin.page.driver_life += 1
    standin.page.driver_missing = 1


@pytest.mark.slow
@pytest.mark.parametrize("take_down", [make_lost, make_vanish, make_hang, unload_the_driver])
def test_a_gpu_that_is_down_keeps_its_name_uuid_and_address_in_metrics_and_log(standin, make, clock, caplog, take_down):
    """Operators need them to reset or replace the GPU; they once vanished with its readings."""
    standin.page.count = 4
    collector = make(deadline_seconds=DEADLINE_SECONDS)
    until(lambda: up(tick(collector, clock)) == [0, 1, 2, 3], "all are up")
    take_down(standin)
    until(lambda: 3 not in up(tick(collector, clock)), "it is down")
    for _ in range(REINIT_AFTER_SECONDS + 3):
        outcome = tick(collector, clock)
        assert health(outcome, 3, "up") == 0
        assert of_gpu(outcome, 3)[INFO_OF_3] == 1
    (line, *_) = [record.message for record in caplog.records if ": down: " in record.message]
    assert "3 is Stand-in GPU-3 00000000:1D:00.0" in line


def test_the_structure_read_byte_by_byte_is_pynvmls_own():
    import ctypes

    import pynvml

    from pacecar.monitor.gpu import nvml

    assert ctypes.sizeof(pynvml.c_nvmlFieldValue_t) == nvml._FIELD_VALUE.size
    names = ("fieldId", "scopeId", "timestamp", "latencyUsec", "valueType", "nvmlReturn", "value")
    offsets = [getattr(pynvml.c_nvmlFieldValue_t, name).offset for name in names]
    assert offsets == [0, 4, 8, 16, 24, 28, 32]
    assert ctypes.sizeof(pynvml.c_nvmlGpmMetric_t) == nvml._GPM_METRIC.size
    offsets = [getattr(pynvml.c_nvmlGpmMetric_t, name).offset for name in ("metricId", "nvmlReturn", "value")]
    assert offsets == [0, 4, 8]


@pytest.mark.parametrize(
    ("kind", "member", "value", "bits"),
    [
        (1, "uiVal", 4_000_000_001, 32),
        (2, "ulVal", 5_000_000_002, 64),
        (3, "ullVal", (1 << 63) + 3, 64),
        (4, "sllVal", -4, 63),
        (5, "siVal", -5, 31),
        (6, "usVal", 60_006, 16),
    ],
)
def test_each_type_of_a_field_is_read_from_its_own_member(kind, member, value, bits):
    import pynvml

    from pacecar.monitor.gpu import nvml
    from pacecar.monitor.gpu.driver import FieldValue

    union = pynvml.c_nvmlValue_t(ullVal=(1 << 64) - 1)  # rubbish beside the number
    setattr(union, member, value)
    assert nvml._field(7, kind, 0, bytes(union)) == FieldValue(value, bits)


def test_no_series_is_given_twice(standin, make, clock):
    standin.page.mig = 1
    outcome = settled(make(), clock)
    series = [(sample.metric, sample.labels) for sample in outcome.samples]
    assert len(series) == len(set(series))


def test_threads_are_at_most_one_a_gpu_however_often_gpus_come_and_go(standin, make, clock):
    before = threading.active_count()
    collector = make()
    settled(collector, clock)
    assert 2 <= threading.active_count() - before <= GPUS + 2
    for n in range(20):
        standin.page.lost[n % GPUS] = 15
        tick(collector, clock, REINIT_AFTER_SECONDS)
        standin.page.lost[n % GPUS] = 0
        tick(collector, clock)
    assert 2 <= threading.active_count() - before <= GPUS + 2
    collector.close()
    assert threading.active_count() == before
    assert (standin.page.inits - standin.page.shutdowns) == 0


def test_reasons_are_bounded_and_at_most_one_holds(standin, make, clock):
    collector = make()
    settled(collector, clock)
    standin.page.lost[1] = 16
    outcome = tick(collector, clock)
    down = {s.labels: s.value for s in outcome.samples if s.metric == "pacecar_gpu_down"}
    assert {labels[1] for labels in down} == set(REASONS)
    assert [labels for labels, value in down.items() if value] == [("1", "reset_required")]


ASK = """
import json
from pacecar.clock import SystemClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.nvml import PyNvml
collector = GpuCollector(PyNvml(), SystemClock(), deadline_seconds=30.0)
outcomes = [collector.collect()]
while len(outcomes) < 10 and len(outcomes[-1].samples) <= 200 * GPUS:  # the driver opens within 2 s or after its tick
    outcomes.append(collector.collect())
collector.close()
print(json.dumps([[type(o).__name__, getattr(o, "reason", ""), len(o.samples)] for o in outcomes]))
""".replace("GPUS", str(GPUS))


@pytest.mark.distributed
def test_pynvml_finds_the_library_by_itself(standin):
    """The other tests pass the library on; here LD_LIBRARY_PATH does, as on a machine with a driver."""
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        env=os.environ | standin.environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    kind, reason, samples = json.loads(done.stdout)[-1]
    assert (kind, reason) == ("Ok", "")
    assert samples > 200 * GPUS


def test_only_nvml_py_knows_pynvml():
    monitor = Path(__file__).parents[2] / "monitor"
    users = {path.name for path in monitor.rglob("*.py") if "import pynvml" in path.read_text()}
    assert users == {"nvml.py"}
