"""Which metrics are there?  One list that collectors, exporter, dashboards, alert rules and docs all read.

A name that is typed twice is spelt differently the third time.  So nobody types one: a collector that emits a
sample, a panel that draws a series and the page that documents it all go through this list, and tests compare it
with what a running daemon serves.

The label that names a training job is `training_job`: Prometheus gives every target a label `job` of its own, and one
of ours by that name would come out as `exported_job` in any scrape job that does not set `honor_labels`.

Names are `pacecar_<subject>_<quantity>_<unit>[_total]`, base units, few and bounded labels.  Inside the daemon values
are integers of the *inside* unit; the exporter multiplies by `Unit.scale` and nobody else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

__all__ = ["CATALOG", "Kind", "Metric", "Subject", "Unit", "by_name"]


class Kind(StrEnum):
    """How a series behaves, in Prometheus' words."""

    COUNTER = "counter"
    GAUGE = "gauge"


class Unit(Enum):
    """Inside unit -> (name outside, factor, what the inside value counts)."""

    NANOSECONDS = ("seconds", 1e-9, "nanoseconds")
    BYTES = ("bytes", 1.0, "bytes")
    BYTES_PER_SECOND = ("bytes_per_second", 1.0, "bytes per second")
    MILLIWATTS = ("watts", 1e-3, "milliwatts")
    MILLIJOULES = ("joules", 1e-3, "millijoules")
    CELSIUS = ("celsius", 1.0, "degrees Celsius")
    MEGAHERTZ = ("hertz", 1e6, "megahertz")
    RATIO = ("ratio", 1.0, "0..1")
    COUNT = ("", 1.0, "a count")

    @property
    def outside(self) -> str:
        """The base unit in the metric's name; empty for a plain count."""
        return self.value[0]

    @property
    def scale(self) -> float:
        """Outside value = inside value * scale."""
        return self.value[1]


class Subject(StrEnum):
    """What a metric is about: the sections of docs/metrics.md."""

    HOST = "Host"
    GPU = "GPU"
    JOB = "Job"
    TUNER = "Tuner"
    DAEMON = "The daemon itself"


@dataclass(frozen=True, slots=True)
class Metric:
    """One entry of the catalog; `labels` in the order in which samples give their values."""

    name: str
    kind: Kind
    unit: Unit
    subject: Subject
    labels: tuple[str, ...]
    help: str

    def __post_init__(self) -> None:
        stem = self.name.removesuffix("_total")
        assert self.name.startswith("pacecar_"), self.name
        assert (self.kind is Kind.COUNTER) == self.name.endswith("_total"), self.name
        assert stem.endswith(self.unit.outside), f"{self.name} does not end in its unit {self.unit.outside}"
        assert self.help.endswith("."), f"{self.name}: help is a sentence"


def _section(subject: Subject, *rows: tuple[str, Kind, Unit, str, str]) -> list[Metric]:
    return [
        Metric(f"pacecar_{name}", kind, unit, subject, tuple(labels.split()), text)
        for name, kind, unit, labels, text in rows
    ]


_C, _G = Kind.COUNTER, Kind.GAUGE
_NS, _B, _BPS, _R, _N = Unit.NANOSECONDS, Unit.BYTES, Unit.BYTES_PER_SECOND, Unit.RATIO, Unit.COUNT

CATALOG: tuple[Metric, ...] = (
    *_section(
        Subject.HOST,
        ("host_cpu_seconds_total", _C, _NS, "mode", "CPU time of all processors by mode."),
        ("host_cpu_utilization_ratio", _G, _R, "", "Share of CPU time not idle nor waiting for I/O, over the last tick."),
        ("host_cpus_online", _G, _N, "", "Logical processors that are online."),
        ("host_load_average", _G, _N, "window", "Runnable and uninterruptible tasks, averaged over the window."),
        ("host_context_switches_total", _C, _N, "", "Context switches since boot."),
        ("host_memory_size_bytes", _G, _B, "", "Physical memory."),
        ("host_memory_available_bytes", _G, _B, "", "Memory that can be given out without swapping."),
        ("host_memory_used_bytes", _G, _B, "", "Memory in use, caches not counted."),
        ("host_memory_cached_bytes", _G, _B, "", "Page cache."),
        ("host_swap_size_bytes", _G, _B, "", "Swap space."),
        ("host_swap_used_bytes", _G, _B, "", "Swap space in use."),
        ("host_pressure_stalled_seconds_total", _C, _NS, "resource kind", "Time that some or all tasks stalled on a resource (PSI)."),
        ("host_disk_read_bytes_total", _C, _B, "device", "Bytes read from the disk."),
        ("host_disk_written_bytes_total", _C, _B, "device", "Bytes written to the disk."),
        ("host_disk_reads_total", _C, _N, "device", "Reads completed."),
        ("host_disk_writes_total", _C, _N, "device", "Writes completed."),
        ("host_disk_busy_seconds_total", _C, _NS, "device", "Time that the disk had I/O in flight."),
        ("host_filesystem_size_bytes", _G, _B, "mountpoint", "Size of a file system."),
        ("host_filesystem_available_bytes", _G, _B, "mountpoint", "Space that an ordinary user can still write."),
        ("host_network_receive_bytes_total", _C, _B, "interface", "Bytes received."),
        ("host_network_transmit_bytes_total", _C, _B, "interface", "Bytes sent."),
        ("host_network_receive_packets_total", _C, _N, "interface", "Packets received."),
        ("host_network_transmit_packets_total", _C, _N, "interface", "Packets sent."),
        ("host_network_receive_errors_total", _C, _N, "interface", "Packets received with an error."),
        ("host_network_transmit_errors_total", _C, _N, "interface", "Packets that could not be sent for an error."),
        ("host_network_receive_drops_total", _C, _N, "interface", "Received packets that were dropped."),
        ("host_network_transmit_drops_total", _C, _N, "interface", "Packets to be sent that were dropped."),
        ("host_network_link_bytes_per_second", _G, _BPS, "interface", "Rated speed of the link, one direction."),
    ),
    *_section(
        Subject.GPU,
        ("gpu_info", _G, _N, "gpu uuid name driver pci_bus_id", "Constant facts of a GPU; always 1, to join on."),
        ("gpu_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which a kernel ran; not how busy it kept the GPU."),
        ("gpu_memory_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which device memory was read or written."),
        ("gpu_memory_size_bytes", _G, _B, "gpu", "Device memory."),
        ("gpu_memory_used_bytes", _G, _B, "gpu", "Device memory in use."),
        ("gpu_memory_free_bytes", _G, _B, "gpu", "Device memory that is free."),
        ("gpu_power_watts", _G, Unit.MILLIWATTS, "gpu", "Power draw as the driver samples it."),
        ("gpu_power_limit_watts", _G, Unit.MILLIWATTS, "gpu", "Power limit that is enforced."),
        ("gpu_energy_joules_total", _C, Unit.MILLIJOULES, "gpu", "Energy since the driver was loaded."),
        ("gpu_temperature_celsius", _G, Unit.CELSIUS, "gpu", "Temperature of the GPU core."),
        ("gpu_clock_hertz", _G, Unit.MEGAHERTZ, "gpu clock", "Clock now, by domain (sm, memory, graphics, video)."),
        ("gpu_clock_max_hertz", _G, Unit.MEGAHERTZ, "gpu clock", "Highest clock, by domain (sm, memory, graphics, video)."),
        ("gpu_pcie_receive_bytes_total", _C, _B, "gpu", "Bytes that the GPU received over PCIe."),
        ("gpu_pcie_transmit_bytes_total", _C, _B, "gpu", "Bytes that the GPU sent over PCIe."),
        ("gpu_nvlink_receive_bytes_total", _C, _B, "gpu", "Bytes that the GPU received over all its NVLinks."),
        ("gpu_nvlink_transmit_bytes_total", _C, _B, "gpu", "Bytes that the GPU sent over all its NVLinks."),
    ),
    *_section(
        Subject.JOB,
        (
            "rank_info", _G, _N,
            "training_job rank local_rank world_size host pid device device_uuid backend framework",
            "Who a rank is; always 1, to join on.",
        ),
        ("job_steps_total", _C, _N, "training_job rank", "Steps (optimizer updates) since attach."),
        ("job_samples_total", _C, _N, "training_job rank", "Samples trained on by this rank; absent when the hook cannot count them."),
        ("job_tokens_total", _C, _N, "training_job rank", "Tokens trained on by this rank; absent when the hook cannot count them."),
        ("job_step", _G, _N, "training_job rank", "Number of the last step that was reported."),
        ("job_step_duration_seconds", _G, _NS, "training_job rank", "Wall time of the last step."),
        ("job_step_phase_duration_seconds", _G, _NS, "training_job rank phase", "Host time of the last step's phases: data_wait, forward, backward, optimizer."),
        ("job_step_wall_seconds_total", _C, _NS, "training_job rank", "Wall time of all steps; the ledger's headings sum to it."),
        ("job_ledger_seconds_total", _C, _NS, "training_job rank heading", "The step ledger: wall time of all steps by what it went to."),
        ("job_communication_seconds_total", _C, _NS, "training_job rank", "Communication time of all steps, exposed or not."),
        ("job_overlapped_communication_seconds_total", _C, _NS, "training_job rank", "Communication that ran under compute and so cost nothing."),
        ("job_ledger_calibration_age_steps", _G, _N, "training_job rank", "Steps since the exact window that calibrates the estimate; absent before the first."),
        ("job_windows_total", _C, _N, "training_job rank", "Exact (profiled) windows taken."),
        ("job_overhead_seconds_total", _C, _NS, "training_job rank", "Pacecar's own time inside the steps."),
        ("job_records_dropped_total", _C, _N, "training_job rank", "Records that the hook dropped because the daemon was full, gone or slow."),
        ("job_last_record_age_seconds", _G, _NS, "training_job rank", "Time since the last step record arrived."),
        ("job_micro_batches", _G, _N, "training_job rank", "Micro-batches in the last step."),
    ),
    *_section(
        Subject.TUNER,
        ("knob_value", _G, _N, "training_job rank knob", "Numeric knobs in force."),
        ("knob_epoch", _G, _N, "training_job rank", "How many times the knobs were switched; equal on all ranks of a job."),
        ("knob_switches_total", _C, _N, "training_job rank", "Switches that this rank reported."),
        ("knob_switch_duration_seconds", _G, _NS, "training_job rank", "What the last switch itself took."),
        ("tuner_state", _G, _N, "training_job state", "1 for the state that the tuner is in, 0 for the others."),
        ("tuner_decisions_total", _C, _N, "training_job knob kind", "Decisions: trials begun and advice given."),
        ("tuner_verdicts_total", _C, _N, "training_job knob outcome", "Verdicts by what became of the change."),
        ("tuner_expected_gain_ratio", _G, _R, "training_job knob", "Share of step time that the last decision expected to save."),
        ("tuner_measured_gain_ratio", _G, _R, "training_job knob", "Share of step time that the last verdict measured as saved."),
        ("tuner_exploration_seconds", _G, _NS, "training_job", "Time lost to trials so far, against the setting in force before each."),
    ),
    *_section(
        Subject.DAEMON,
        ("build_info", _G, _N, "version python", "Versions; always 1, to join on."),
        ("daemon_start_time_seconds", _G, _NS, "", "When the daemon started, seconds since the Unix epoch."),
        ("daemon_cpu_seconds_total", _C, _NS, "", "CPU time of the daemon itself."),
        ("daemon_resident_memory_bytes", _G, _B, "", "Resident memory of the daemon itself."),
        ("daemon_ticks_total", _C, _N, "", "Ticks begun."),
        ("daemon_ticks_missed_total", _C, _N, "", "Ticks left out because the one before was still running."),
        ("daemon_tick_lateness_seconds", _G, _NS, "", "How much later than planned the last tick began."),
        ("daemon_snapshot_age_seconds", _G, _NS, "", "Age of the numbers served, at the time of the scrape."),
        ("collector_duration_seconds", _G, _NS, "collector", "What the collector took in the last tick."),
        ("collector_outcome", _G, _N, "collector outcome", "1 for the collector's last outcome (ok, absent, failed), 0 for the others."),
        ("collector_failures_total", _C, _N, "collector", "Ticks in which the collector failed."),
        ("inbox_connections", _G, _N, "", "Hooks connected now."),
        ("inbox_frames_total", _C, _N, "", "Frames taken in."),
        ("inbox_frames_refused_total", _C, _N, "refusal", "Frames refused, by reason."),
        ("inbox_jobs", _G, _N, "", "Jobs on the board."),
    ),
)  # fmt: skip

_BY_NAME = {metric.name: metric for metric in CATALOG}
assert len(_BY_NAME) == len(CATALOG), "a metric is listed twice"


def by_name(name: str) -> Metric:
    """Return the entry called `name`; raises KeyError for a name that is not in the catalog."""
    return _BY_NAME[name]
