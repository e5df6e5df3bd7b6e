"""Which metrics are there?  One list that collectors, exporter, dashboards, alert rules and docs all read.

A name that is typed twice is spelt differently the third time.  So nobody types one: a collector that emits a
sample, a panel that draws a series and the page that documents it all go through this list, and tests compare it
with what a running daemon serves.

The label that names a training job is `training_job`: Prometheus gives every target a label `job` of its own, and one
of ours by that name would come out as `exported_job` in any scrape job that does not set `honor_labels`.

A metric that changes faster than anybody scrapes is *windowed*: beside the latest value stand the lowest, the mean
and the highest of the last window, as `..._window_min_<unit>`, `..._window_mean_<unit>`, `..._window_max_<unit>`.
They are metrics of their own and not a label `stat`: the sum over a label's values should mean something (Prometheus'
naming practice), and the sum of a minimum and a maximum does not.  Few are windowed: each makes four series of one.

Names are `pacecar_<subject>_<quantity>_<unit>[_total]`, base units, few and bounded labels.  Inside the daemon values
are integers of the *inside* unit; the exporter multiplies by `Unit.scale` and nobody else does.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum

__all__ = ["CATALOG", "WINDOW_NAMES", "Kind", "Metric", "Subject", "Unit", "by_name"]


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
    HERTZ = ("hertz", 1.0, "hertz")
    KILOHERTZ = ("hertz", 1e3, "kilohertz")
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

    def convert(self, value: int | float) -> int | float:
        """Return an inside value in the outside unit; whole numbers of bytes, counts and the like stay whole."""
        if self.scale == 1.0:
            return value
        # Dividing by the whole power of ten is correctly rounded; times 1e-9 makes 0.30000000000000004 of 0.3 s.
        return value / round(1 / self.scale) if self.scale < 1.0 else value * self.scale


class Subject(StrEnum):
    """What a metric is about: the sections of docs/metrics.md."""

    HOST = "Host"
    RDMA = "RDMA"
    CGROUP = "Control groups"
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
    windowed: bool = False

    def __post_init__(self) -> None:
        stem = self.name.removesuffix("_total")
        assert self.name.startswith("pacecar_"), self.name
        assert (self.kind is Kind.COUNTER) == self.name.endswith("_total"), self.name
        assert stem.endswith(self.unit.outside), f"{self.name} does not end in its unit {self.unit.outside}"
        assert self.help.endswith("."), f"{self.name}: help is a sentence"
        assert not (self.windowed and self.kind is Kind.COUNTER), (
            f"{self.name}: a counter has no extremes; window a rate"
        )

    def over_window(self) -> tuple[Metric, ...]:
        """Return the metrics of the lowest, mean and highest value in the window, in this order."""
        unit = f"_{self.unit.outside}" if self.unit.outside else ""
        stem, text = self.name.removesuffix(unit), self.help.removesuffix(".")
        return tuple(
            Metric(f"{stem}_window_{stat}{unit}", self.kind, self.unit, self.subject, self.labels, f"{text}: {words}.")
            for stat, words in _EXTREMES.items()
        )


_EXTREMES = {
    "min": "the lowest value of the last window",
    "mean": "the mean of the last window",
    "max": "the highest value of the last window",
}

WINDOWED = frozenset({
    "gpu_utilization_ratio", "gpu_power_watts", "gpu_sm_active_ratio",
    "gpu_nvlink_receive_bytes_per_second", "gpu_nvlink_transmit_bytes_per_second",
    "host_cpu_utilization_ratio",
    "host_network_receive_utilization_ratio", "host_network_transmit_utilization_ratio",
    "rdma_receive_utilization_ratio", "rdma_transmit_utilization_ratio",
})  # fmt: skip
"""What is kept over a window: what has peaks shorter than a scrape that explain a slow step, and is small in number."""


def _section(subject: Subject, *rows: tuple[str, Kind, Unit, str, str]) -> list[Metric]:
    metrics: list[Metric] = []
    for name, kind, unit, labels, text in rows:
        metric = Metric(f"pacecar_{name}", kind, unit, subject, tuple(labels.split()), text, name in WINDOWED)
        metrics += [metric, *metric.over_window()] if metric.windowed else [metric]
    return metrics


_C, _G = Kind.COUNTER, Kind.GAUGE
_NS, _B, _BPS, _R, _N = Unit.NANOSECONDS, Unit.BYTES, Unit.BYTES_PER_SECOND, Unit.RATIO, Unit.COUNT
_HZ = Unit.HERTZ

CATALOG: tuple[Metric, ...] = (
    *_section(
        Subject.HOST,
        ("host_cpu_seconds_total", _C, _NS, "mode", "CPU time of all processors by mode."),
        ("host_cpu_utilization_ratio", _G, _R, "", "Share of CPU time not idle nor waiting for I/O, over the last tick."),
        ("host_cpus_online", _G, _N, "", "Logical processors that are online."),
        ("host_load_average", _G, _N, "window", "Runnable and uninterruptible tasks, averaged over the window."),
        ("host_context_switches_total", _C, _N, "", "Context switches since boot."),
        ("host_interrupts_total", _C, _N, "", "Interrupts served since boot."),
        ("host_forks_total", _C, _N, "", "Processes and threads made since boot."),
        ("host_tasks_runnable", _G, _N, "", "Tasks that run or could run."),
        ("host_tasks_blocked", _G, _N, "", "Tasks that wait for I/O to complete."),
        ("host_cpu_frequency_min_hertz", _G, Unit.KILOHERTZ, "", "Frequency of the slowest processor."),
        ("host_cpu_frequency_mean_hertz", _G, Unit.KILOHERTZ, "", "Mean frequency of the processors."),
        ("host_cpu_frequency_limit_hertz", _G, Unit.KILOHERTZ, "", "Highest frequency that the slowest processor may be set to."),
        ("host_numa_cpu_seconds_total", _C, _NS, "numa_node mode", "CPU time of a NUMA node's processors by mode."),
        ("host_numa_cpu_utilization_ratio", _G, _R, "numa_node", "Share of a NUMA node's CPU time not idle nor waiting for I/O, over the last tick."),
        ("host_numa_memory_size_bytes", _G, _B, "numa_node", "Memory of a NUMA node."),
        ("host_numa_memory_free_bytes", _G, _B, "numa_node", "Free memory of a NUMA node."),
        ("host_numa_pages_total", _C, _N, "numa_node outcome", "Pages allocated on a NUMA node, by whether the task wanted that node (hit, miss, foreign) and ran on it (local, other)."),
        ("host_memory_size_bytes", _G, _B, "", "Physical memory."),
        ("host_memory_available_bytes", _G, _B, "", "Memory that can be given out without swapping."),
        ("host_memory_used_bytes", _G, _B, "", "Memory in use, caches not counted."),
        ("host_memory_cached_bytes", _G, _B, "", "Page cache."),
        ("host_memory_shared_bytes", _G, _B, "", "Shared memory and tmpfs, /dev/shm with it."),
        ("host_memory_dirty_bytes", _G, _B, "", "Memory that waits to be written to disk."),
        ("host_memory_unevictable_bytes", _G, _B, "", "Memory that cannot be paged out, such as what is pinned for devices."),
        ("host_memory_transparent_huge_bytes", _G, _B, "", "Anonymous memory in transparent huge pages."),
        ("host_hugepages_size_bytes", _G, _B, "page", "Pool of huge pages, by the size of a page."),
        ("host_hugepages_free_bytes", _G, _B, "page", "Huge pages of the pool that are not in use, by the size of a page."),
        ("host_major_page_faults_total", _C, _N, "", "Page faults that waited for a disk."),
        ("host_oom_kills_total", _C, _N, "", "Processes that the kernel killed for want of memory."),
        ("host_swap_size_bytes", _G, _B, "", "Swap space."),
        ("host_swap_used_bytes", _G, _B, "", "Swap space in use."),
        ("host_swap_in_bytes_total", _C, _B, "", "Memory read back from swap."),
        ("host_swap_out_bytes_total", _C, _B, "", "Memory written to swap."),
        ("host_pressure_stalled_seconds_total", _C, _NS, "resource kind", "Time that some or all tasks stalled on a resource (PSI)."),
        ("host_disk_read_bytes_total", _C, _B, "device", "Bytes read from the disk."),
        ("host_disk_written_bytes_total", _C, _B, "device", "Bytes written to the disk."),
        ("host_disk_reads_total", _C, _N, "device", "Reads completed."),
        ("host_disk_writes_total", _C, _N, "device", "Writes completed."),
        ("host_disk_busy_seconds_total", _C, _NS, "device", "Time that the disk had I/O in flight."),
        ("host_disk_read_seconds_total", _C, _NS, "device", "Time that reads took, all of them added up."),
        ("host_disk_write_seconds_total", _C, _NS, "device", "Time that writes took, all of them added up."),
        ("host_disk_queue_seconds_total", _C, _NS, "device", "Time with I/O in flight, times the requests in flight."),
        ("host_disk_requests_in_flight", _G, _N, "device", "Requests in flight now."),
        ("host_filesystem_size_bytes", _G, _B, "mountpoint", "Size of a file system."),
        ("host_filesystem_available_bytes", _G, _B, "mountpoint", "Space that an ordinary user can still write."),
        ("host_filesystem_files", _G, _N, "mountpoint", "Files (inodes) that a file system has room for."),
        ("host_filesystem_files_free", _G, _N, "mountpoint", "Files (inodes) that can still be made."),
        ("host_filesystem_read_only", _G, _N, "mountpoint", "1 when the file system is mounted read-only, as after an error, else 0."),
        ("host_network_receive_bytes_total", _C, _B, "interface", "Bytes received."),
        ("host_network_transmit_bytes_total", _C, _B, "interface", "Bytes sent."),
        ("host_network_receive_packets_total", _C, _N, "interface", "Packets received."),
        ("host_network_transmit_packets_total", _C, _N, "interface", "Packets sent."),
        ("host_network_receive_errors_total", _C, _N, "interface", "Packets received with an error."),
        ("host_network_transmit_errors_total", _C, _N, "interface", "Packets that could not be sent for an error."),
        ("host_network_receive_drops_total", _C, _N, "interface", "Received packets that were dropped."),
        ("host_network_transmit_drops_total", _C, _N, "interface", "Packets to be sent that were dropped."),
        ("host_network_link_bytes_per_second", _G, _BPS, "interface", "Rated speed of the link, one direction."),
        ("host_network_receive_utilization_ratio", _G, _R, "interface", "Bytes received as a share of the link's rated speed, since the reading before."),
        ("host_network_transmit_utilization_ratio", _G, _R, "interface", "Bytes sent as a share of the link's rated speed, since the reading before."),
        ("host_network_up", _G, _N, "interface", "1 when the interface is operational, else 0."),
        ("host_network_mtu_bytes", _G, _B, "interface", "Largest packet of the interface."),
        ("host_network_carrier_changes_total", _C, _N, "interface", "Times that the link went up or down."),
        ("host_tcp_segments_received_total", _C, _N, "", "TCP segments received."),
        ("host_tcp_segments_sent_total", _C, _N, "", "TCP segments sent, retransmissions not counted."),
        ("host_tcp_segments_retransmitted_total", _C, _N, "", "TCP segments sent again."),
        ("host_tcp_retransmissions_total", _C, _N, "cause", "TCP retransmissions by cause: fast, slow_start, syn, lost."),
        ("host_tcp_timeouts_total", _C, _N, "", "TCP retransmission timers that ran out; each stalls a connection for 200 ms or more."),
        ("host_tcp_receive_errors_total", _C, _N, "", "TCP segments received with an error."),
        ("host_tcp_resets_sent_total", _C, _N, "", "TCP segments sent with the reset flag."),
        ("host_tcp_drops_total", _C, _N, "cause", "TCP segments or connections dropped for want of room: listen, backlog, receive_queue."),
        ("host_tcp_connections", _G, _N, "", "TCP connections that are established."),
        ("host_udp_receive_errors_total", _C, _N, "", "UDP datagrams that could not be delivered."),
        ("host_udp_buffer_errors_total", _C, _N, "direction", "UDP datagrams dropped for want of buffer, by direction (receive, transmit)."),
        ("host_softnet_drops_total", _C, _N, "", "Packets dropped because a processor's backlog was full."),
        ("host_softnet_squeezes_total", _C, _N, "", "Times that a processor ran out of its budget with packets left to take in."),
    ),
    *_section(
        Subject.RDMA,
        ("rdma_port_info", _G, _N, "device port link_layer adapter firmware", "Constant facts of an RDMA port; always 1, to join on."),
        ("rdma_port_active", _G, _N, "device port", "1 when the port's logical state is ACTIVE, else 0."),
        ("rdma_port_link_up", _G, _N, "device port", "1 when the port's physical state is LinkUp, else 0."),
        ("rdma_port_link_bytes_per_second", _G, _BPS, "device port", "Rated speed of the port, one direction."),
        ("rdma_receive_bytes_total", _C, _B, "device port", "Bytes received."),
        ("rdma_transmit_bytes_total", _C, _B, "device port", "Bytes sent."),
        ("rdma_receive_packets_total", _C, _N, "device port", "Packets received."),
        ("rdma_transmit_packets_total", _C, _N, "device port", "Packets sent."),
        ("rdma_receive_utilization_ratio", _G, _R, "device port", "Bytes received as a share of the port's rated speed, since the reading before."),
        ("rdma_transmit_utilization_ratio", _G, _R, "device port", "Bytes sent as a share of the port's rated speed, since the reading before."),
        ("rdma_transmit_waits_total", _C, _N, "device port", "Ticks of the port's own clock in which it had data and no credit to send."),
        ("rdma_errors_total", _C, _N, "device port error", "Errors, by the kernel's name of the counter."),
        ("rdma_congestion_events_total", _C, _N, "device port event", "Congestion, loss and retransmission, by the kernel's name of the counter."),
    ),
    *_section(
        Subject.CGROUP,
        ("cgroup_member_info", _G, _N, "cgroup member training_job rank", "Who is in a control group: a rank of a job, or the daemon; always 1, to join on."),
        ("cgroup_cpu_limit_cpus", _G, _N, "cgroup", "Processors' worth of time that the group may use, its parents' limits included; absent without a limit."),
        ("cgroup_cpu_seconds_total", _C, _NS, "cgroup", "CPU time of the group."),
        ("cgroup_cpu_periods_total", _C, _N, "cgroup", "Periods of the tightest CPU limit that were enforced."),
        ("cgroup_cpu_throttled_periods_total", _C, _N, "cgroup", "Periods in which the tightest CPU limit stopped the group."),
        ("cgroup_cpu_throttled_seconds_total", _C, _NS, "cgroup", "Time for which the tightest CPU limit stopped the group's tasks."),
        ("cgroup_memory_limit_bytes", _G, _B, "cgroup", "Memory that the group may use, its parents' limits included; absent without a limit."),
        ("cgroup_memory_used_bytes", _G, _B, "cgroup", "Memory of the group, its page cache included."),
        ("cgroup_memory_limit_hits_total", _C, _N, "cgroup", "Times that the group ran into its own memory limit."),
        ("cgroup_oom_kills_total", _C, _N, "cgroup", "Processes of the group that were killed for want of memory."),
    ),
    *_section(
        Subject.GPU,
        ("gpu_info", _G, _N, "gpu uuid name driver pci_bus_id architecture cuda vbios mig", "Constant facts of a GPU; always 1, to join on."),
        ("gpu_up", _G, _N, "gpu", "1 when the last tick read something of the GPU."),
        ("gpu_down", _G, _N, "gpu reason", "1 for the reason why the GPU is down, 0 for the others; all 0 while it is up."),
        ("gpu_last_success_time_seconds", _G, _NS, "gpu", "When the GPU was last read, seconds since the Unix epoch."),
        ("gpu_consecutive_failures", _G, _N, "gpu", "Ticks in a row in which nothing was read of the GPU."),
        ("gpu_failures_total", _C, _N, "gpu reason", "Ticks in which nothing was read of the GPU."),
        ("gpu_read_failures_total", _C, _N, "gpu", "Single numbers that could not be read while the GPU was up."),
        ("gpu_driver_calls_total", _C, _N, "gpu", "Calls of the driver for this GPU."),
        ("gpu_driver_openings_total", _C, _N, "", "How often the driver was opened; more than 1: GPUs were lost or the driver was reloaded."),
        ("gpu_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which a kernel ran; not how busy it kept the GPU."),
        ("gpu_memory_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which device memory was read or written."),
        ("gpu_encoder_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which the video encoder worked."),
        ("gpu_decoder_utilization_ratio", _G, _R, "gpu", "Share of the sample period in which the video decoder worked."),
        ("gpu_memory_size_bytes", _G, _B, "gpu", "Device memory."),
        ("gpu_memory_used_bytes", _G, _B, "gpu", "Device memory in use."),
        ("gpu_memory_free_bytes", _G, _B, "gpu", "Device memory that is free."),
        ("gpu_memory_reserved_bytes", _G, _B, "gpu", "Device memory that the driver keeps for itself."),
        ("gpu_bar1_size_bytes", _G, _B, "gpu", "Window through which the host and other devices reach device memory."),
        ("gpu_bar1_used_bytes", _G, _B, "gpu", "Part of the BAR1 window in use."),
        ("gpu_power_watts", _G, Unit.MILLIWATTS, "gpu", "Power draw as the driver samples it."),
        ("gpu_power_mean_watts", _G, Unit.MILLIWATTS, "gpu", "Mean power since the tick before, by the energy counter: misses nothing between samples."),
        ("gpu_power_limit_watts", _G, Unit.MILLIWATTS, "gpu", "Power limit that is enforced."),
        ("gpu_energy_joules_total", _C, Unit.MILLIJOULES, "gpu", "Energy since the driver was loaded."),
        ("gpu_temperature_celsius", _G, Unit.CELSIUS, "gpu", "Temperature of the GPU core."),
        ("gpu_memory_temperature_celsius", _G, Unit.CELSIUS, "gpu", "Temperature of the device memory."),
        ("gpu_temperature_threshold_celsius", _G, Unit.CELSIUS, "gpu threshold", "Temperatures at which the GPU acts: gpu_max, memory_max, slowdown, shutdown."),
        ("gpu_clock_hertz", _G, Unit.MEGAHERTZ, "gpu clock", "Clock now, by domain (sm, memory, graphics, video)."),
        ("gpu_clock_max_hertz", _G, Unit.MEGAHERTZ, "gpu clock", "Highest clock, by domain (sm, memory, graphics, video)."),
        ("gpu_clock_event_seconds_total", _C, _NS, "gpu reason source", "Time for which a reason held the clocks down; source driver: counted by it, sampled: added up from samples."),
        ("gpu_performance_state", _G, _N, "gpu", "Performance state; 0 is the fastest, 15 the slowest."),
        ("gpu_ecc_errors_total", _C, _N, "gpu severity lifetime", "ECC errors; lifetime volatile: since the driver was loaded, aggregate: of the board's life."),
        ("gpu_retired_pages", _G, _N, "gpu cause", "Memory pages retired for ECC errors (before Ampere)."),
        ("gpu_retired_pages_pending", _G, _N, "gpu", "1 when pages wait for a reset to be retired."),
        ("gpu_remapped_rows", _G, _N, "gpu severity", "Memory rows remapped for ECC errors (Ampere and later)."),
        ("gpu_row_remap_pending", _G, _N, "gpu", "1 when a row waits for a reset to be remapped."),
        ("gpu_row_remap_failed", _G, _N, "gpu", "1 when a row could not be remapped: the board wants replacing."),
        ("gpu_pcie_generation", _G, _N, "gpu", "PCIe generation now; it falls when the GPU idles."),
        ("gpu_pcie_generation_max", _G, _N, "gpu", "Highest PCIe generation of GPU and slot."),
        ("gpu_pcie_width", _G, _N, "gpu", "PCIe lanes now."),
        ("gpu_pcie_width_max", _G, _N, "gpu", "Most PCIe lanes of GPU and slot."),
        ("gpu_pcie_replays_total", _C, _N, "gpu", "PCIe packets sent again for an error on the link."),
        ("gpu_pcie_receive_bytes_total", _C, _B, "gpu", "Bytes that the GPU received over PCIe."),
        ("gpu_pcie_transmit_bytes_total", _C, _B, "gpu", "Bytes that the GPU sent over PCIe."),
        ("gpu_pcie_receive_bytes_per_second", _G, _BPS, "gpu", "PCIe receive rate by the performance monitor (Hopper and later)."),
        ("gpu_pcie_transmit_bytes_per_second", _G, _BPS, "gpu", "PCIe send rate by the performance monitor (Hopper and later)."),
        ("gpu_nvlink_receive_bytes_total", _C, _B, "gpu", "Bytes that the GPU received over all its NVLinks."),
        ("gpu_nvlink_transmit_bytes_total", _C, _B, "gpu", "Bytes that the GPU sent over all its NVLinks."),
        ("gpu_nvlink_receive_bytes_per_second", _G, _BPS, "gpu", "NVLink receive rate by the performance monitor (Hopper and later)."),
        ("gpu_nvlink_transmit_bytes_per_second", _G, _BPS, "gpu", "NVLink send rate by the performance monitor (Hopper and later)."),
        ("gpu_nvlink_info", _G, _N, "gpu link version remote_type remote_pci_bus_id", "What is at the other end of an NVLink; always 1, to join on."),
        ("gpu_nvlink_link_state", _G, _N, "gpu link", "State of an NVLink: 0 down, 1 up, 2 asleep, 3 up without traffic."),
        ("gpu_nvlink_link_bytes_per_second", _G, _BPS, "gpu link", "Rated speed of an NVLink."),
        ("gpu_nvlink_link_receive_bytes_total", _C, _B, "gpu link", "Bytes received over one NVLink."),
        ("gpu_nvlink_link_transmit_bytes_total", _C, _B, "gpu link", "Bytes sent over one NVLink."),
        ("gpu_nvlink_link_receive_packets_total", _C, _N, "gpu link", "Packets received over one NVLink (NVLink 5)."),
        ("gpu_nvlink_link_transmit_packets_total", _C, _N, "gpu link", "Packets sent over one NVLink (NVLink 5)."),
        ("gpu_nvlink_link_errors_total", _C, _N, "gpu link kind", "Errors and recoveries of one NVLink by kind."),
        ("gpu_sm_active_ratio", _G, _R, "gpu", "Share of the SMs that worked, mean of the tick (Hopper and later)."),
        ("gpu_sm_occupancy_ratio", _G, _R, "gpu", "Warps in flight over the most possible, mean of the tick (Hopper and later)."),
        ("gpu_tensor_active_ratio", _G, _R, "gpu", "Share of time in which the tensor cores worked (Hopper and later)."),
        ("gpu_pipe_active_ratio", _G, _R, "gpu pipe", "Share of time in which a pipe of the SMs worked (Hopper and later)."),
        ("gpu_dram_bandwidth_ratio", _G, _R, "gpu", "Bandwidth of device memory used over the most possible (Hopper and later)."),
        ("gpu_xid_errors_total", _C, _N, "gpu xid", "Xid errors by code since the daemon started, from the driver's events and the kernel log, each counted once."),
        ("gpu_fabric_state", _G, _N, "gpu state", "1 for the state of joining the NVLink fabric, 0 for the others."),
        ("gpu_fabric_status", _G, _N, "gpu", "NVML return code of joining the NVLink fabric; 0 is success."),
        ("gpu_fabric_condition", _G, _N, "gpu condition", "1 for a condition of the NVLink fabric that holds, 0 for one that does not."),
        ("gpu_processes", _G, _N, "gpu", "Compute processes on the GPU."),
        ("gpu_process_memory_bytes", _G, _B, "gpu pid", "Device memory of a process; the largest ones only."),
        ("gpu_process_sm_ratio", _G, _R, "gpu pid", "Share of the sample period in which a process's kernels ran."),
        ("gpu_mig_enabled", _G, _N, "gpu", "1 when the GPU is cut into instances."),
        ("gpu_instance_info", _G, _N, "gpu gpu_instance compute_instance uuid name", "Constant facts of a MIG instance; always 1, to join on."),
        ("gpu_instance_memory_size_bytes", _G, _B, "gpu gpu_instance compute_instance", "Memory of a MIG instance."),
        ("gpu_instance_memory_used_bytes", _G, _B, "gpu gpu_instance compute_instance", "Memory of a MIG instance in use."),
        ("gpu_instance_memory_free_bytes", _G, _B, "gpu gpu_instance compute_instance", "Memory of a MIG instance that is free."),
        ("gpu_instance_memory_reserved_bytes", _G, _B, "gpu gpu_instance compute_instance", "Memory of a MIG instance that the driver keeps for itself."),
        ("gpu_instance_processes", _G, _N, "gpu gpu_instance compute_instance", "Compute processes on a MIG instance."),
        ("gpu_instance_active_ratio", _G, _R, "gpu gpu_instance part", "Activity of a part of a MIG instance, mean since it was read before (Hopper and later)."),
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
        ("job_estimate_error_ratio", _G, _R, "training_job rank", "Share of the step that the estimate would have put under a wrong heading, against the last exact window; absent before the second one."),
        ("job_estimate_heading_error_ratio", _G, _R, "training_job rank heading", "Estimate minus exact of that window by heading, over its step; above zero is too much."),
        ("job_estimate_bias_limit_ratio", _G, _R, "training_job rank", "Bound of what the profiler's own slow-down can have moved between headings: how much longer than usual its phases were, over its step."),
        ("job_collectives", _G, _N, "training_job rank op", "Collectives in the step of the last exact window, by operation; as old as the calibration."),
        ("job_collective_duration_seconds", _G, _NS, "training_job rank op", "Time of that step's collectives, waiting for late ranks included; those that ran at once are added."),
        ("job_collective_bytes", _G, _B, "training_job rank op", "Size of that step's collectives (nccl-tests' definition); absent where the backend does not say it (gloo)."),
        ("job_collective_bus_bandwidth_bytes_per_second", _G, _BPS, "training_job rank op", "Bus bandwidth of that step's collectives by nccl-tests' factors, a lower bound; absent where sizes are."),
        ("job_windows_total", _C, _N, "training_job rank", "Exact (profiled) windows taken."),
        ("job_overhead_seconds_total", _C, _NS, "training_job rank", "Pacecar's own time inside the steps."),
        ("job_hook_measuring", _G, _N, "training_job rank", "1 while the hook measures steps, 0 when it turned itself off because that alone was over the budget."),
        ("job_measured_every_steps", _G, _N, "training_job rank", "One step in k is measured (four in a row), the others are counted: 1 but where steps are too short for the budget; absent when off."),
        ("job_records_dropped_total", _C, _N, "training_job rank", "Records that the hook dropped because the daemon was full, gone or slow."),
        ("job_last_record_age_seconds", _G, _NS, "training_job rank", "Time since the last step record arrived."),
        ("job_pace_seconds", _G, _NS, "training_job", "Mean step of the slowest rank over the last steps that all ranks compared."),
        ("job_median_pace_seconds", _G, _NS, "training_job", "The same of the median rank."),
        ("job_phase_seconds_total", _C, _NS, "training_job phase", "Host time of all steps of all ranks together, by phase; tail is the wait for the last all-reduces."),
        ("job_what_if_step_seconds", _G, _NS, "training_job scenario", "What-if ladder: a lower bound of the step if only this cost were gone (communication_hidden, data_free, straggler_median, launch_gaps_gone, all); no promise."),
        ("job_what_if_gain_ratio", _G, _R, "training_job scenario", "The share of the step that this would save at most; scenarios do not add up."),
        ("job_what_if_calibration_age_steps", _G, _N, "training_job", "Age of the oldest calibration behind the ladder, 0 where every step in it was profiled; the ladder is absent before the first."),
        ("job_straggler_excess_seconds", _G, _NS, "training_job rank cause", "By how much a late rank's step exceeds the other ranks' median; present while it is late, without a rank when only the cause is known."),
        ("job_stragglers_total", _C, _N, "training_job cause", "Times that a rank was found late."),
        ("job_hang_suspected", _G, _N, "training_job rank", "1 while the rank has ended no step for suspiciously long, else 0; absent until it happens."),
        ("job_hang_silent", _G, _N, "training_job rank", "1 while others suspect a hang and this rank says nothing at all, as a stopped process does, else 0; absent while nobody does."),
        ("job_hangs_total", _C, _N, "training_job rank", "Times that the rank ended no step for suspiciously long."),
        ("job_micro_batches", _G, _N, "training_job rank", "Micro-batches in the last step."),
        ("job_flops_info", _G, _N, "training_job rank source arithmetic", "How a rank's FLOPs are known (counted, given) and the dtype, or tf32, that most of them are done in; always 1, to join on."),
        ("job_step_flops", _G, _N, "training_job rank", "Model FLOPs (forward and backward, nothing computed twice) of the last step; absent when unknown."),
        ("job_model_flops_per_second", _G, _N, "training_job rank", "Model FLOPs per second of wall time over the last steps; absent when unknown."),
        ("job_device_peak_flops_per_second", _G, _N, "training_job rank", "Dense peak of the rank's device in that arithmetic, by its data sheet; absent when unknown."),
        ("job_mfu_ratio", _G, _R, "training_job rank", "Model FLOPs utilization (MFU): model FLOPs per second over the device's peak; absent when either is unknown."),
        ("job_memory_allocated_bytes", _G, _B, "training_job rank", "Device memory in tensors at the end of a step, by torch's caching allocator."),
        ("job_memory_reserved_bytes", _G, _B, "training_job rank", "Device memory that the allocator holds, in use or not; the driver reports this as used."),
        ("job_memory_allocated_peak_bytes", _G, _B, "training_job rank", "Most device memory in tensors since the script last reset the peak."),
        ("job_memory_inactive_split_bytes", _G, _B, "training_job rank", "Free parts of blocks that are in use: memory that cannot go back to the driver."),
        ("job_memory_fragmentation_ratio", _G, _R, "training_job rank", "Reserved device memory that no tensor uses at the end of a step, over all reserved."),
        ("job_memory_allocation_retries_total", _C, _N, "training_job rank", "Times that the allocator had to free its cache to serve a request; each stops the device."),
        ("job_memory_out_of_memory_total", _C, _N, "training_job rank", "Out-of-memory errors that the allocator raised."),
        ("job_checkpoints_total", _C, _N, "training_job rank", "Checkpoints saved inside pacer.checkpoint()."),
        ("job_checkpoint_seconds_total", _C, _NS, "training_job rank", "Time inside pacer.checkpoint(), outside the steps too; the ledger holds the part inside."),
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
        ("tuner_forecast_error_ratio", _G, _R, "training_job knob", "Share of step time by which the last judged forecast was off: expected minus measured gain, sign dropped."),
        ("tuner_orders_total", _C, _N, "training_job action outcome", "Orders that people gave the tuner, by whether they were carried out."),
        ("tuner_exploration_seconds", _G, _NS, "training_job", "Time lost to trials so far, against the setting in force before each."),
    ),
    *_section(
        Subject.DAEMON,
        ("build_info", _G, _N, "version python", "Versions; always 1, to join on."),
        ("daemon_start_time_seconds", _G, _NS, "", "When the daemon started, seconds since the Unix epoch."),
        ("daemon_cpu_seconds_total", _C, _NS, "", "CPU time of the daemon itself."),
        ("daemon_resident_memory_bytes", _G, _B, "", "Resident memory of the daemon itself."),
        ("daemon_threads", _G, _N, "", "Threads of the daemon itself."),
        ("daemon_open_files", _G, _N, "", "File descriptors that the daemon has open."),
        ("daemon_cpu_utilization_ratio", _G, _R, "", "CPU time of the daemon as a share of one processor, when its budget was last looked at."),
        ("daemon_cpu_budget_ratio", _G, _R, "", "Share of one processor that the daemon allows itself."),
        ("daemon_glance_frequency_hertz", _G, _HZ, "", "How often collectors look between ticks; 0 when the budget leaves nothing for it."),
        ("daemon_glance_changes_total", _C, _N, "direction", "Times that the budget slowed the glances down or let them up again."),
        ("daemon_scrapes_total", _C, _N, "", "Scrapes answered."),
        ("daemon_scrape_seconds_total", _C, _NS, "", "Time that scrapes took inside the daemon."),
        ("daemon_otlp_exports_total", _C, _N, "outcome", "Exports by OTLP, by outcome (ok, failed); absent where [otlp] names no endpoint."),
        ("daemon_otlp_export_duration_seconds", _G, _NS, "", "What the last export by OTLP took, whatever came of it; one under way counts once it takes longer."),
        ("daemon_otlp_success_age_seconds", _G, _NS, "", "Time since the last export by OTLP that succeeded."),
        ("daemon_ticks_total", _C, _N, "", "Ticks begun."),
        ("daemon_ticks_missed_total", _C, _N, "", "Ticks left out because the one before was still running."),
        ("daemon_tick_lateness_seconds", _G, _NS, "", "How much later than planned the last tick began."),
        ("daemon_snapshot_age_seconds", _G, _NS, "", "Age of the numbers served, at the time of the scrape."),
        ("collector_duration_seconds", _G, _NS, "collector", "What the collector took in the last tick."),
        ("collector_outcome", _G, _N, "collector outcome", "1 for the collector's last outcome (ok, absent, failed), 0 for the others."),
        ("collector_failures_total", _C, _N, "collector", "Ticks in which the collector failed."),
        ("collector_glances_total", _C, _N, "collector", "Readings of windowed metrics between ticks."),
        ("collector_glance_failures_total", _C, _N, "collector", "Glances that failed; the next tick names the reason."),
        ("inbox_connections", _G, _N, "", "Hooks connected now."),
        ("inbox_frames_total", _C, _N, "", "Frames taken in."),
        ("inbox_frames_refused_total", _C, _N, "refusal", "Frames refused, by reason."),
        ("inbox_jobs", _G, _N, "", "Jobs on the board."),
    ),
)  # fmt: skip

_BY_NAME = {metric.name: metric for metric in CATALOG}
assert len(_BY_NAME) == len(CATALOG), "a metric is listed twice"

WINDOW_NAMES = {m.name: tuple(over.name for over in m.over_window()) for m in CATALOG if m.windowed}
"""Windowed metric -> the names of its lowest, mean and highest value in the window."""
assert len(WINDOW_NAMES) == len(WINDOWED), "a windowed metric is not in the catalog"


def by_name(name: str) -> Metric:
    """Return the entry called `name`; raises KeyError for a name that is not in the catalog."""
    return _BY_NAME[name]
