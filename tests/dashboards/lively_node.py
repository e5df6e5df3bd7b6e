"""A training node of eight H200, as Prometheus sees it: changing values, all invented.

For the pictures in docs/images: the stand-in driver of tests/monitor says a different number in every field, which is
right for a test and wrong for a picture.  Sizes and speeds are those of NVIDIA's data sheet of the H200 SXM (141 GB,
700 W, 18 NVLinks of 26.562 GB/s in each direction) and of a ConnectX-7 (400 Gbit/s).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable

from pacecar.metrics.catalog import WINDOW_NAMES, MetricKind, by_name
from pacecar.records import Ok, Outcome, Sample

__all__ = ["LivelyNode"]

GB, GIB = 10**9, 1 << 30
NS = 10**9
GPUS, LINKS, PORTS, NUMA = 8, 18, 4, 2
CPU_MODES = {"user": 50.0, "system": 9.0, "iowait": 1.5, "irq": 0.2, "softirq": 2.0, "nice": 0.0, "steal": 0.0}
CPUS = 192

Figure = Callable[[float], float]
"""Seconds since the start -> a gauge's value, or a counter's rate per second, in the catalog's inside unit."""


def steady(value: float) -> Figure:
    return lambda _: value


def wave(low: float, high: float, period: float = 90.0, shift: float = 0.0) -> Figure:
    """Between `low` and `high`, with a slow swing and a fast, smaller one."""

    def at(t: float) -> float:
        swing = 0.7 * math.sin(2 * math.pi * t / period + shift) + 0.3 * math.sin(t * 1.7 + 3 * shift)
        return low + (high - low) * (0.5 + 0.5 * swing)

    return at


def after(second: float, then: Figure, before: Figure | None = None) -> Figure:
    """Nothing, or `before`, until `second`."""
    first = before or steady(0.0)
    return lambda t: then(t) if t >= second else first(t)


class LivelyNode:
    """A collector.  `hot` is a GPU that gets too hot after `trouble_seconds`, `torn` one with an NVLink that fails."""

    name = "lively"

    def __init__(self, *, hot: int | None = None, torn: int | None = None, trouble_seconds: float = 150.0) -> None:
        self._hot, self._torn, self._trouble = hot, torn, trouble_seconds
        self._began = self._last = time.monotonic()
        self._series: list[tuple[str, tuple[str, ...], Figure]] = []
        self._totals: dict[tuple[str, tuple[str, ...]], float] = {}
        self._xids: list[tuple[str, ...]] = []
        self._host()
        self._network()
        for gpu in range(GPUS):
            self._gpu(gpu)
            self._health(gpu)
            self._links(gpu)

    def collect(self) -> Outcome:
        now = time.monotonic()
        t, passed, self._last = now - self._began, now - self._last, now
        samples = [sample for row in self._series for sample in self._samples(*row, t, passed)]
        samples += [Sample("pacecar_gpu_xid_errors_total", xid, int(t >= self._trouble)) for xid in self._xids]
        return Ok(tuple(samples))

    def close(self) -> None:
        """Hold nothing."""

    def _samples(self, name: str, labels: tuple[str, ...], figure: Figure, t: float, passed: float) -> Iterable[Sample]:
        is_whole = by_name(name).unit.outside != "ratio"
        if by_name(name).kind is MetricKind.COUNTER:
            self._totals[name, labels] = total = self._totals.get((name, labels), 0.0) + figure(t) * passed
            yield Sample(name, labels, int(total))
            return
        value = figure(t)
        yield Sample(name, labels, round(value) if is_whole else value)
        for over, factor in zip(WINDOW_NAMES.get(name, ()), (0.6, 0.95, 1.05), strict=False):
            extreme = value * factor
            yield Sample(over, labels, round(extreme) if is_whole else min(1.0, extreme))

    def _add(self, name: str, figure: Figure, *labels: object) -> None:
        self._series.append((f"pacecar_{name}", tuple(map(str, labels)), figure))

    def _host(self) -> None:
        add = self._add
        for mode, busy in CPU_MODES.items():
            add("host_cpu_seconds_total", wave(0.8 * busy * NS, 1.2 * busy * NS), mode)
        add("host_cpu_seconds_total", wave(120 * NS, 130 * NS), "idle")
        add("host_cpu_utilization_ratio", wave(0.28, 0.38))
        add("host_cpus_online", steady(CPUS))
        for window, load in (("1m", 66), ("5m", 64), ("15m", 61)):
            add("host_load_average", wave(load - 4, load + 4), window)
        for name, low, high in (
            ("context_switches_total", 3.1e5, 4.2e5), ("interrupts_total", 2.1e5, 2.6e5), ("forks_total", 3, 9),
            ("tasks_runnable", 55, 72), ("tasks_blocked", 0, 3), ("cpu_frequency_min_hertz", 2.4e6, 2.6e6),
            ("cpu_frequency_mean_hertz", 3.1e6, 3.4e6), ("cpu_frequency_limit_hertz", 3.7e6, 3.7e6),
            ("memory_size_bytes", 2048 * GIB, 2048 * GIB), ("memory_used_bytes", 410 * GIB, 430 * GIB),
            ("memory_available_bytes", 1500 * GIB, 1530 * GIB), ("memory_cached_bytes", 880 * GIB, 900 * GIB),
            ("memory_shared_bytes", 64 * GIB, 72 * GIB), ("memory_dirty_bytes", 0.1 * GIB, 2 * GIB),
            ("memory_writeback_bytes", 0, 0.2 * GIB), ("memory_anonymous_bytes", 330 * GIB, 345 * GIB),
            ("memory_mapped_bytes", 70 * GIB, 74 * GIB), ("memory_slab_bytes", 21 * GIB, 22 * GIB),
            ("memory_page_tables_bytes", 2 * GIB, 2 * GIB), ("memory_committed_bytes", 610 * GIB, 640 * GIB),
            ("memory_corrupted_bytes", 0, 0), ("page_faults_total", 2e5, 9e5), ("hung_tasks_total", 0, 0),
            ("threads", 4100, 4300),
            ("threads_limit", 4194304, 4194304), ("open_files", 31_000, 33_000), ("open_files_limit", 2e8, 2e8),
            ("tracked_connections", 900, 1100), ("tracked_connections_limit", 262_144, 262_144),
            ("clock_synchronized", 1, 1), ("clock_offset_seconds", -4e4, 4e4),
            ("clock_estimated_error_seconds", 2e3, 9e3), ("clock_max_error_seconds", 1.2e6, 2.6e6),
            ("memory_unevictable_bytes", 48 * GIB, 48 * GIB), ("memory_transparent_huge_bytes", 210 * GIB, 220 * GIB),
            ("major_page_faults_total", 0, 2), ("oom_kills_total", 0, 0), ("swap_size_bytes", 8 * GIB, 8 * GIB),
            ("swap_used_bytes", 0, 0), ("swap_in_bytes_total", 0, 0), ("swap_out_bytes_total", 0, 0),
            ("tcp_segments_received_total", 2e4, 4e4), ("tcp_segments_sent_total", 2e4, 4e4),
            ("tcp_segments_retransmitted_total", 0, 12), ("tcp_timeouts_total", 0, 0.4),
            ("tcp_receive_errors_total", 0, 0), ("tcp_resets_sent_total", 0, 1), ("tcp_connections", 340, 360),
            ("udp_receive_errors_total", 0, 0), ("softnet_drops_total", 0, 0), ("softnet_squeezes_total", 0, 20),
        ):  # fmt: skip
            add(f"host_{name}", wave(low, high))
        for page, size in (("2MB", 0), ("1GB", 0)):
            add("host_hugepages_size_bytes", steady(size), page)
            add("host_hugepages_free_bytes", steady(size), page)
        for cause in ("fast", "slow_start", "syn", "lost"):
            add("host_tcp_retransmissions_total", wave(0, 3), cause)
        for cause in ("listen", "backlog", "receive_queue"):
            add("host_tcp_drops_total", steady(0), cause)
        for direction in ("receive", "transmit"):
            add("host_udp_buffer_errors_total", steady(0), direction)
        for resource, high in (("cpu", 0.04), ("memory", 0.001), ("io", 0.06)):
            for kind in ("some", "full"):
                add("host_pressure_stalled_seconds_total", wave(0, high * NS * (1 if kind == "some" else 0.3)),
                    resource, kind)  # fmt: skip
        add("host_boot_time_seconds", steady(time.time_ns() - 41 * 86_400 * NS))
        add("host_os_info", steady(1), "6.8.0-1013-nvidia", "x86_64", "ubuntu", "24.04")
        for direction in ("receive", "transmit"):
            add("host_udp_datagrams_total", wave(3, 20), direction)
        for side in ("active", "passive"):
            add("host_tcp_opens_total", wave(1, 9), side)
        for state, sockets in (("in_use", 410), ("orphan", 0), ("time_wait", 90), ("allocated", 430)):
            add("host_tcp_sockets", wave(sockets, 1.1 * sockets), state)
        for protocol in ("tcp", "udp"):
            add("host_socket_memory_bytes", wave(2e6, 9e6), protocol)
        self._sensors()
        self._disks()
        for node in range(NUMA):
            for mode, busy in CPU_MODES.items():
                add("host_numa_cpu_seconds_total", steady(busy / 2 * NS), node, mode)
            add("host_numa_cpu_utilization_ratio", wave(0.25, 0.42, shift=node), node)
            add("host_numa_memory_size_bytes", steady(1024 * GIB), node)
            add("host_numa_memory_free_bytes", wave(300 * GIB, 330 * GIB, shift=node), node)
            for outcome, pages in (("hit", 9e4), ("miss", 40), ("foreign", 40), ("local", 9e4), ("other", 120)):
                add("host_numa_pages_total", steady(pages), node, outcome)

    def _sensors(self) -> None:
        add = self._add
        for socket in range(NUMA):
            package = ("coretemp", f"coretemp.{socket}", f"Package id {socket}")
            add("host_sensor_temperature_celsius", wave(61e3, 68e3, shift=socket), *package)
            add("host_sensor_temperature_limit_celsius", steady(100e3), *package)
        for fan in range(4):
            add("host_sensor_fan_rpm", wave(8900, 9400, shift=fan), "board", "ipmi", f"FAN {fan + 1}")
        add("host_sensor_power_watts", wave(6.6e6, 7.2e6), "board", "ipmi", "power1")

    def _disks(self) -> None:
        add = self._add
        for disk in ("nvme0n1", "nvme1n1"):
            for name, low, high in (
                ("read_bytes_total", 0.8 * GB, 2.1 * GB), ("written_bytes_total", 0.02 * GB, 0.3 * GB),
                ("reads_total", 6e3, 1.6e4), ("writes_total", 100, 900), ("busy_seconds_total", 0.2 * NS, 0.6 * NS),
                ("read_seconds_total", 0.6 * NS, 1.6 * NS), ("write_seconds_total", 0.02 * NS, 0.1 * NS),
                ("queue_seconds_total", 0.7 * NS, 1.8 * NS), ("requests_in_flight", 1, 8),
            ):  # fmt: skip
                add(f"host_disk_{name}", wave(low, high, shift=len(disk)), disk)
        for mount, size, used in (("/", 880 * GB, 0.31), ("/mnt/data", 28_000 * GB, 0.83)):
            add("host_filesystem_size_bytes", steady(size), mount)
            add("host_filesystem_available_bytes", steady(size * (1 - used)), mount)
            add("host_filesystem_files", steady(5e7), mount)
            add("host_filesystem_files_free", steady(4.6e7), mount)
            add("host_filesystem_read_only", steady(0), mount)
            add("host_filesystem_error", steady(0), mount)

    def _network(self) -> None:
        add = self._add
        for number in range(2):
            name, link = f"eth{number}", 12.5 * GB
            for direction in ("receive", "transmit"):
                share = wave(0.02, 0.3 if number == 0 else 0.05, shift=number)
                add(f"host_network_{direction}_utilization_ratio", share, name)
                add(f"host_network_{direction}_bytes_total", lambda t, s=share, link=link: s(t) * link, name)
                add(f"host_network_{direction}_packets_total", lambda t, s=share, link=link: s(t) * link / 4096, name)
                add(f"host_network_{direction}_errors_total", steady(0), name)
                add(f"host_network_{direction}_drops_total", steady(0.2 * number), name)
            add("host_network_link_bytes_per_second", steady(link), name)
            add("host_network_up", steady(1), name)
            add("host_network_mtu_bytes", steady(9000), name)
            add("host_network_carrier_changes_total", steady(0), name)
        for number in range(PORTS):
            port, link = (f"mlx5_{number}", "1"), 50 * GB
            add("rdma_port_info", steady(1), *port, "InfiniBand", "ConnectX-7", "28.39.1002")
            add("rdma_port_active", steady(1), *port)
            add("rdma_port_link_up", steady(1), *port)
            add("rdma_port_link_bytes_per_second", steady(link), *port)
            for direction in ("receive", "transmit"):
                share = wave(0.25, 0.85, period=40, shift=number)
                add(f"rdma_{direction}_utilization_ratio", share, *port)
                add(f"rdma_{direction}_bytes_total", lambda t, s=share, link=link: s(t) * link, *port)
                add(f"rdma_{direction}_packets_total", lambda t, s=share, link=link: s(t) * link / 4096, *port)
            add("rdma_transmit_waits_total", wave(0, 4e5), *port)
            for error in ("symbol_error", "link_downed", "port_rcv_errors"):
                add("rdma_errors_total", steady(0), *port, error)
            for event in ("np_cnp_sent", "rp_cnp_handled", "out_of_sequence", "packet_seq_err"):
                add("rdma_congestion_events_total", wave(0, 40, shift=number), *port, event)

    def _gpu(self, gpu: int) -> None:
        def add(name: str, figure: Figure, *labels: object) -> None:
            self._add(f"gpu_{name}", figure, gpu, *labels)

        shift = gpu / 3
        heat = wave(52, 64, shift=shift)
        clock = wave(1930, 1980, shift=shift)
        if gpu == self._hot:
            heat = after(self._trouble, wave(84, 88, shift=shift), heat)
            clock = after(self._trouble, wave(1300, 1480, shift=shift), clock)
        add("info", steady(1), f"GPU-{gpu:04d}", "NVIDIA H200", "570.124.06", f"0000:{0x1b + 0x20 * gpu:02x}:00.0",
            "hopper", "12.8", "96.00.A5.00.01", "off")  # fmt: skip
        for name, low, high in (
            ("utilization_ratio", 0.9, 1.0), ("memory_utilization_ratio", 0.45, 0.62), ("sm_active_ratio", 0.6, 0.82),
            ("encoder_utilization_ratio", 0, 0), ("decoder_utilization_ratio", 0, 0),
            ("sm_occupancy_ratio", 0.2, 0.34), ("tensor_active_ratio", 0.3, 0.48), ("dram_bandwidth_ratio", 0.35, 0.5),
            ("memory_size_bytes", 141 * GB, 141 * GB), ("memory_used_bytes", 96 * GB, 104 * GB),
            ("memory_free_bytes", 37 * GB, 45 * GB), ("memory_reserved_bytes", 0.6 * GB, 0.6 * GB),
            ("bar1_size_bytes", 256 * GIB, 256 * GIB), ("bar1_used_bytes", 0.6 * GIB, 0.6 * GIB),
            ("power_watts", 520e3, 690e3), ("power_mean_watts", 560e3, 660e3), ("power_limit_watts", 700e3, 700e3),
            ("energy_joules_total", 560e3, 660e3), ("memory_temperature_celsius", 60, 72),
            ("performance_state", 0, 0), ("pcie_generation", 5, 5), ("pcie_generation_max", 5, 5),
            ("pcie_width", 16, 16), ("pcie_width_max", 16, 16), ("pcie_replays_total", 0, 0.02),
            ("pcie_receive_bytes_total", 2 * GB, 9 * GB), ("pcie_transmit_bytes_total", 1 * GB, 6 * GB),
            ("pcie_receive_bytes_per_second", 2 * GB, 9 * GB), ("pcie_transmit_bytes_per_second", 1 * GB, 6 * GB),
            ("nvlink_receive_bytes_per_second", 90 * GB, 260 * GB), ("nvlink_receive_bytes_total", 90 * GB, 260 * GB),
            ("nvlink_transmit_bytes_per_second", 90 * GB, 260 * GB), ("nvlink_transmit_bytes_total", 90 * GB, 260 * GB),
            ("processes", 1, 1), ("mig_enabled", 0, 0), ("fabric_status", 0, 0), ("driver_calls_total", 12, 12),
        ):  # fmt: skip
            add(name, wave(low, high, shift=shift))
        add("temperature_celsius", heat)
        for domain, figure in (("sm", clock), ("memory", steady(3201)), ("graphics", clock), ("video", steady(1545))):
            add("clock_hertz", figure, domain)
            add(
                "clock_max_hertz", steady({"sm": 1980, "memory": 3201, "graphics": 1980, "video": 1545}[domain]), domain
            )
        for threshold, degrees in (("shutdown", 92), ("slowdown", 89), ("gpu_max", 87), ("memory_max", 95)):
            add("temperature_threshold_celsius", steady(degrees), threshold)
        for pipe in ("tensor_hmma", "fp16", "fp32", "integer"):
            add("pipe_active_ratio", wave(0.02, 0.12, shift=shift), pipe)
        add("process_memory_bytes", wave(95 * GB, 103 * GB, shift=shift), 4100 + gpu)
        add("process_sm_ratio", wave(0.6, 0.82, shift=shift), 4100 + gpu)

    def _health(self, gpu: int) -> None:
        def add(name: str, figure: Figure, *labels: object) -> None:
            self._add(f"gpu_{name}", figure, gpu, *labels)

        is_hot, is_torn = gpu == self._hot, gpu == self._torn
        add("up", steady(1))
        add("consecutive_failures", steady(0))
        add("read_failures_total", steady(0))
        add("last_success_time_seconds", lambda _: time.time_ns())
        for reason in ("hung", "lost", "reset_required", "vanished", "driver", "error"):
            add("down", steady(0), reason)
            add("failures_total", steady(0), reason)
        for reason, source in (
            ("sw_power_cap", "driver"),
            ("sw_thermal_slowdown", "driver"),
            ("hw_slowdown", "sampled"),
        ):
            share = 0.02 if reason == "sw_power_cap" else 0.8 if is_hot and reason == "sw_thermal_slowdown" else 0.0
            add("clock_event_seconds_total", after(self._trouble, steady(share * NS), steady(0.02 * share * NS)),
                reason, source)  # fmt: skip
        for severity in ("corrected", "uncorrected"):
            for lifetime in ("volatile", "aggregate"):
                burst = 0.05 if is_hot and severity == "corrected" else 0.0
                add("ecc_errors_total", after(self._trouble, steady(burst)), severity, lifetime)
            add("remapped_rows", steady(2 if is_hot and severity == "corrected" else 0), severity)
        add("row_remap_pending", after(self._trouble, steady(1 if is_hot else 0)))
        add("row_remap_failed", steady(0))
        if is_torn or is_hot:
            self._xids.append((str(gpu), "145" if is_torn else "63"))
        for state in ("not_started", "in_progress", "completed"):
            add("fabric_state", steady(int(state == "completed")), state)
        add("fabric_condition", steady(0), "degraded_bandwidth")

    def _links(self, gpu: int) -> None:
        for link in range(LINKS):
            is_torn = gpu == self._torn and link == 11
            of = (gpu, link)
            flow = wave(5 * GB, 14.4 * GB, shift=gpu / 3)
            if is_torn:
                flow = after(self._trouble, steady(0), flow)
            self._add("gpu_nvlink_info", steady(1), *of, "4", "switch", f"0000:0{link % 4 + 1}:00.0")
            self._add("gpu_nvlink_link_state", after(self._trouble, steady(0 if is_torn else 1), steady(1)), *of)
            self._add("gpu_nvlink_link_bytes_per_second", steady(26.562 * GB), *of)
            self._add("gpu_nvlink_link_receive_bytes_total", flow, *of)
            self._add("gpu_nvlink_link_transmit_bytes_total", flow, *of)
            for kind in ("crc", "replay", "recovery"):
                self._add("gpu_nvlink_link_errors_total", after(self._trouble - 30, steady(2 if is_torn else 0)),
                          *of, kind)  # fmt: skip
