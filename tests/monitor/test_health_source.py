"""Readings of GPUs become one verdict each, and a real daemon on faulty stand-in GPUs shows it everywhere."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from pacecar.clock import SystemClock
from pacecar.config import DaemonConfig
from pacecar.gpu_health import FABRIC_JOIN_SECONDS, HealthReason, HealthVerdict
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.gpu.health_source import XID_SECONDS, GpuHealthSource, health_samples
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.records import Ok, Sample, Snapshot
from tests.kit.net import scrape
from tests.kit.waiting import until

S = 1_000_000_000


def gpu(metric, value, *labels, label="0"):
    return Sample(f"pacecar_gpu_{metric}", (label, *labels), value)


def tick(*samples, at=0):
    return Snapshot(at, at * S, 0, 0, {"gpu": Ok((gpu("up", 1), *samples))}, {})


def reasons(health):
    return {finding.reason: finding.figure for finding in health.findings}


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ([gpu("row_remap_failed", 1)], HealthReason.ROW_REMAP_FAILED),
        ([gpu("row_remap_pending", 1)], HealthReason.MEMORY_REPAIR_PENDING),
        ([gpu("retired_pages_pending", 1)], HealthReason.MEMORY_REPAIR_PENDING),
        ([gpu("ecc_uncorrected_errors", 1)], HealthReason.ECC_UNCORRECTED),
        ([gpu("pcie_width", 4), gpu("pcie_width_max", 16)], HealthReason.PCIE_WIDTH),
        ([gpu("fabric_state", 1, "completed"), gpu("fabric_status", 999)], HealthReason.FABRIC_FAILED),
        ([gpu("fabric_condition", 1, "incorrect_configuration")], HealthReason.FABRIC_MISCONFIGURED),
        ([gpu("fabric_condition", 1, "degraded_bandwidth")], HealthReason.FABRIC_DEGRADED),
        (
            [gpu("nvlink_link_state", 0, "3"), gpu("nvlink_info", 1, "3", "4.0", "switch", "p")],
            HealthReason.NVLINK_DOWN,
        ),
    ],
    ids=lambda value: None if isinstance(value, list) else value.value,
)
def test_each_metric_that_shows_a_fault_makes_its_reason(samples, reason):
    health = GpuHealthSource().update(tick(*samples))["0"]
    assert set(reasons(health)) == {reason}
    well = [Sample(one.metric, one.labels, 16 if one.metric.endswith("width") else 0) for one in samples]
    if reason is HealthReason.NVLINK_DOWN:
        well = [gpu("nvlink_link_state", 2, "3")]  # asleep
    assert reasons(GpuHealthSource().update(tick(*well))["0"]) == {}


def test_a_link_that_was_up_is_down_though_the_driver_does_not_tell_its_other_end_any_more():
    source = GpuHealthSource()
    assert source.update(tick(gpu("nvlink_link_state", 1, "3"), gpu("nvlink_link_state", 0, "4")))["0"].findings == ()
    health = source.update(tick(gpu("nvlink_link_state", 0, "3"), gpu("nvlink_link_state", 0, "4"), at=1))["0"]
    assert reasons(health) == {HealthReason.NVLINK_DOWN: "0 links up; down: 3"}, "4 was never up"


def test_a_fabric_that_is_joined_in_time_is_no_fault_and_one_that_waits_on_is():
    source = GpuHealthSource()
    waits = gpu("fabric_state", 1, "in_progress"), gpu("fabric_state", 0, "completed")
    joined = gpu("fabric_state", 0, "in_progress"), gpu("fabric_state", 1, "completed")
    assert source.update(tick(*waits))["0"].findings == ()
    assert source.update(tick(*waits, at=FABRIC_JOIN_SECONDS - 1))["0"].findings == ()
    health = source.update(tick(*waits, at=FABRIC_JOIN_SECONDS))["0"]
    assert reasons(health) == {HealthReason.FABRIC_NOT_JOINED: "in progress for 5 minutes"}
    assert source.update(tick(*joined, at=FABRIC_JOIN_SECONDS + 1))["0"].findings == ()
    assert source.update(tick(*waits, at=FABRIC_JOIN_SECONDS + 2))["0"].findings == (), "it joins anew after a reset"


def test_an_xid_counts_for_ten_minutes_and_one_from_before_the_daemon_looked_does_not():
    source = GpuHealthSource()
    counts = gpu("xid_errors_total", 3, "79"), gpu("xid_errors_total", 0, "48")
    assert source.update(tick(*counts))["0"].findings == ()
    health = source.update(tick(*counts, gpu("xid_errors_total", 1, "120"), at=1))["0"]
    assert reasons(health) == {HealthReason.XID: "120 in the last minutes"}, "a rare code begins with its first error"
    health = source.update(tick(*counts, gpu("xid_errors_total", 1, "120"), at=XID_SECONDS))["0"]
    assert HealthReason.XID in reasons(health)
    health = source.update(tick(*counts, gpu("xid_errors_total", 1, "120"), at=XID_SECONDS + 1))["0"]
    assert (health.findings, HealthReason.XID in health.judged) == ((), True)
    unknown = gpu("xid_errors_total", 1, "79", label="unknown")
    assert set(source.update(tick(*counts, unknown, at=XID_SECONDS + 2))) == {"0"}


def test_samples_say_0_or_1_of_what_was_read_and_nothing_of_what_was_not():
    verdicts = GpuHealthSource().update(tick(gpu("pcie_width", 4), gpu("pcie_width_max", 16)))
    found = {(one.metric.removeprefix("pacecar_gpu_"), *one.labels): one.value for one in health_samples(verdicts)}
    assert found == {
        ("health", "0", "ok"): 0, ("health", "0", "degraded"): 1, ("health", "0", "failed"): 0,
        ("health", "0", "unknown"): 0, ("health_reason", "0", "down"): 0, ("health_reason", "0", "pcie_width"): 1,
    }  # fmt: skip


def test_a_gpu_that_was_not_read_yet_is_unknown_and_one_that_is_down_is_failed():
    at_start = Snapshot(0, 0, 0, 0, {"gpu": Ok((gpu("up", 0), gpu("down", 0, "lost")))}, {})
    assert GpuHealthSource().update(at_start)["0"].verdict is HealthVerdict.UNKNOWN
    down = Snapshot(0, 0, 0, 0, {"gpu": Ok((gpu("up", 0), gpu("down", 1, "reset_required")))}, {})
    assert reasons(GpuHealthSource().update(down)["0"]) == {HealthReason.DOWN: "reset required"}


# --- stand-in GPUs ------------------------------------------------------------------------------

COUNT = 4


@pytest.fixture
def well(standin):
    """Healthy stand-in GPUs: every number that would show a fault is 0."""
    standin.page.zero, standin.page.count, standin.page.links = 1, COUNT, 0
    standin.page.structures = 2  # in the newer one of the fabric a number says that it is unhealthy
    return standin


@pytest.fixture
def node(well, tmp_path):
    config = DaemonConfig(port=0, socket=str(tmp_path / "s"), period_seconds=0.5, recordings=str(tmp_path / "rec"))
    collector = GpuCollector(PyNvml(), SystemClock(), deadline_seconds=0.25, kernel_log="/nowhere")
    daemon = Daemon(config, collectors=[collector])
    daemon.start()
    yield daemon
    daemon.close()


def gpus_of(node):
    return {one["gpu"]: one for one in json.loads(scrape(node.port, "/api/snapshot"))["gpus"]}


@pytest.mark.distributed
def test_a_broken_gpu_is_not_ok_on_any_screen(node, well):
    gpus = partial(gpus_of, node)
    until(lambda: len(gpus()) == COUNT and all(one["up"] for one in gpus().values()), "the GPUs are read")
    well.page.zero = 0  # a different number in every field: each of them shows a fault
    well.page.links = 2
    well.page.driver_life += 1  # links are counted when the driver is loaded
    well.page.link_down[1] = 2
    well.page.lost[2] = 15
    broken = {"row_remap_failed", "ecc_uncorrected", "fabric_failed", "memory_repair_pending", "pcie_width"}

    def reasons_of(number):
        one = gpus().get(number)  # none in a tick whose collector was late
        return set() if one is None else {reason["reason"] for reason in one["health_reasons"]}

    until(lambda: broken <= reasons_of("0") and "nvlink_down" in reasons_of("1"), "all faults are found", 120)
    until(lambda: len(gpus()) == COUNT and reasons_of("2") == {"down"}, "one is lost", 120)
    found = gpus()
    assert {one["health"] for one in found.values()} == {"failed"}
    lost = found["2"]
    assert (lost["name"], lost["uuid"], lost["pci_bus_id"]) == ("Stand-in", "GPU-2", "00000000:1C:00.0")
    assert [reason["words"] for reason in lost["health_reasons"]] == ["down: lost"]
    page = scrape(node.port, "/metrics")
    assert 'pacecar_gpu_health{gpu="0",verdict="failed"} 1' in page
    assert 'pacecar_gpu_health_reason{gpu="0",reason="nvlink_down"} 0' in page
    assert 'pacecar_gpu_health_reason{gpu="1",reason="nvlink_down"} 1' in page
    assert 'pacecar_gpu_health_reason{gpu="2",reason="row_remap_failed"}' not in page, "nothing is read of it"
    environ = {key: value for key, value in os.environ.items() if not key.startswith("PACECAR_")}
    command = [sys.executable, "-m", "pacecar", "top", "--once", f"127.0.0.1:{node.port}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ).stdout
    text = " ".join(shown.split())
    assert "! GPU 2 (Stand-in, 00000000:1C:00.0, GPU-2) failed: down: lost. To do:" in text
    assert "degraded: PCIe link: 8 of 16 lanes. To do: drain the node and reseat the card" in text
    assert " ok " not in text


@pytest.mark.distributed
def test_a_gpu_that_was_reset_is_ok_again(node, well):
    def health():
        return gpus_of(node).get("3", {}).get("health")

    well.page.ecc[3] = 2
    until(lambda: health() == "failed", "errors are found", 120)
    (reason,) = gpus_of(node)["3"]["health_reasons"]
    assert reason["words"] == "uncorrected ECC errors: 2 since the last reset"
    well.page.ecc[3] = 0  # the driver's counter begins anew
    until(lambda: health() == "ok", "the reset is noticed", 120)
    series = 'pacecar_gpu_ecc_errors_total{gpu="3",lifetime="volatile",severity="uncorrected"} '
    totals = []  # none until a second reading confirms that the driver's counter fell

    def is_served():
        totals[:] = [line.removeprefix(series) for line in scrape(node.port, "/metrics").splitlines() if series in line]
        return totals

    until(is_served, "the fall is confirmed")
    assert totals == ["2"], "a counter does not fall"


@pytest.mark.distributed
def test_healthy_gpus_are_ok(node):
    def verdicts():
        return [one["health"] for one in gpus_of(node).values()]

    until(lambda: verdicts() == ["ok"] * COUNT, "all are ok", 60)
