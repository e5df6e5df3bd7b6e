"""A snapshot as text is in the units that the names promise."""

from pacecar.commands.sample_text import document, lines
from pacecar.records import Absent, Failed, Ok, Sample, Snapshot

SNAPSHOT = Snapshot(
    tick=1,
    started_ns=5,
    wall_ns=1_500_000_000,
    lateness_ns=0,
    outcomes={
        "cpu": Ok((Sample("pacecar_host_cpu_seconds_total", ("user",), 3_620_220_000_000),)),
        "gpu": Absent("no NVIDIA driver"),
        "disk": Failed("diskstats:3: bad", (Sample("pacecar_host_disk_read_bytes_total", ("sda",), 0),)),
        "clocks": Ok((Sample("pacecar_gpu_clock_hertz", ("0", "sm"), 1410),), 2, "gpu 0: power: odd"),
    },
    durations_ns={"cpu": 2_000_000, "gpu": 1, "disk": 3, "clocks": 4},
)


def test_a_document_has_base_units_named_labels_and_every_outcome() -> None:
    collectors = document(SNAPSHOT)["collectors"]
    assert collectors["cpu"]["samples"] == [
        {"metric": "pacecar_host_cpu_seconds_total", "labels": {"mode": "user"}, "value": 3620.22}
    ]
    assert collectors["cpu"]["duration_seconds"] == 0.002
    assert collectors["gpu"] == {
        "outcome": "absent",
        "reason": "no NVIDIA driver",
        "read_failures": 0,
        "duration_seconds": 1e-9,
        "samples": [],
    }
    assert collectors["disk"]["outcome"] == "failed"
    assert (collectors["clocks"]["outcome"], collectors["clocks"]["read_failures"]) == ("ok", 2)
    assert (collectors["cpu"]["reason"], collectors["clocks"]["reason"]) == (None, "gpu 0: power: odd")
    assert collectors["clocks"]["samples"][0]["value"] == 1.41e9


def test_zero_is_a_measurement() -> None:
    assert document(SNAPSHOT)["collectors"]["disk"]["samples"][0]["value"] == 0


def test_lines_are_for_people() -> None:
    assert list(lines(SNAPSHOT)) == [
        "cpu: ok",
        '  pacecar_host_cpu_seconds_total{mode="user"} 3620.22',
        "gpu: absent: no NVIDIA driver",
        "disk: failed: diskstats:3: bad",
        '  pacecar_host_disk_read_bytes_total{device="sda"} 0',
        "clocks: ok, 2 read failures: gpu 0: power: odd",
        '  pacecar_gpu_clock_hertz{gpu="0",clock="sm"} 1410000000.0',
    ]
