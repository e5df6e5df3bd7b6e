"""Lists the source and the possible values of every metric of hosts and GPUs.

A driver that does not know a number answers 4294967295, a kernel counter below zero shows as 2**64 - 1, and a
container's /proc may report more free swap than swap.  Such values would spoil the maximum of a window or the sum of a
job and trigger alerts.  So each metric has a range, in its inside unit, which the sampler checks
(`monitor/sampling/sample_screen`).  The ranges are types of `pacecar.records.ranges`, wide enough for the hardware of
the next years, because a range that is too narrow loses true values.

A part cannot exceed its whole: `WHOLES` maps a metric to the metric that limits it, with the same labels.

A test fails if a metric of a host or GPU has no row.
"""

from __future__ import annotations

from typing import NamedTuple

from pacecar.metrics.catalog import by_name
from pacecar.records.ranges import (
    BoardMilliwatts,
    Bytes,
    Celsius,
    ChipMilliwatts,
    Count,
    Cpus,
    FewLanes,
    FewParts,
    Flag,
    Kilohertz,
    LinkRate,
    LinkShare,
    Load,
    MeasuredRatio,
    Megahertz,
    Millicelsius,
    Nanoseconds,
    NvmlCode,
    PerformanceState,
    Ratio,
    Revolutions,
    SignedNanoseconds,
    Tasks,
    bounds_of,
)

__all__ = ["ANYTHING", "RANGES", "WHOLES", "ValueRange"]


class ValueRange(NamedTuple):
    """The lowest and highest value of a metric, in its inside unit, and its source."""

    low: float
    high: float
    source: str


ANYTHING = ValueRange(float("-inf"), float("inf"), "the daemon")
"""The range of values that the daemon itself counts; NaN is outside."""


def _from(source: str, *rows: tuple[object, str]) -> dict[str, ValueRange]:
    """Return the ranges of the metrics from `source`; each row is a range and its metrics."""
    found: dict[str, ValueRange] = {}
    for range_type, names in rows:
        for name in names.split():
            metric = by_name(f"pacecar_{name}")
            assert metric.name not in found, f"{metric.name} has two ranges"
            found[metric.name] = ValueRange(*bounds_of(range_type), source)
    return found


RANGES: dict[str, ValueRange] = {
    **_from(
        "/proc/stat",
        (Nanoseconds, "host_cpu_seconds_total host_numa_cpu_seconds_total host_boot_time_seconds"),
        (Ratio, "host_cpu_utilization_ratio host_numa_cpu_utilization_ratio"),
        (Cpus, "host_cpus_online"),
        (Count, "host_context_switches_total host_interrupts_total host_forks_total"),
        (Tasks, "host_tasks_runnable host_tasks_blocked"),
    ),
    **_from("/proc/loadavg", (Load, "host_load_average"), (Tasks, "host_threads")),
    **_from(
        "/sys/devices/system/cpu/cpufreq",
        (Kilohertz, "host_cpu_frequency_min_hertz host_cpu_frequency_mean_hertz host_cpu_frequency_limit_hertz"),
    ),
    **_from(
        "/sys/devices/system/node",
        (Bytes, "host_numa_memory_size_bytes host_numa_memory_free_bytes"),
        (Count, "host_numa_pages_total"),
    ),
    **_from(
        "/proc/meminfo",
        (
            Bytes,
            "host_memory_size_bytes host_memory_available_bytes host_memory_used_bytes host_memory_cached_bytes"
            " host_memory_shared_bytes host_memory_dirty_bytes host_memory_writeback_bytes host_memory_anonymous_bytes"
            " host_memory_mapped_bytes host_memory_slab_bytes host_memory_page_tables_bytes"
            " host_memory_committed_bytes host_memory_corrupted_bytes host_memory_unevictable_bytes"
            " host_memory_transparent_huge_bytes host_swap_size_bytes host_swap_used_bytes",
        ),
    ),
    **_from("/sys/kernel/mm/hugepages", (Bytes, "host_hugepages_size_bytes host_hugepages_free_bytes")),
    **_from(
        "/proc/vmstat",
        (Count, "host_page_faults_total host_major_page_faults_total host_oom_kills_total"),
        (Bytes, "host_swap_in_bytes_total host_swap_out_bytes_total"),
    ),
    **_from("/proc/pressure", (Nanoseconds, "host_pressure_stalled_seconds_total")),
    **_from(
        "/proc/diskstats",
        (Bytes, "host_disk_read_bytes_total host_disk_written_bytes_total"),
        (Count, "host_disk_reads_total host_disk_writes_total"),
        (
            Nanoseconds,
            "host_disk_busy_seconds_total host_disk_read_seconds_total host_disk_write_seconds_total"
            " host_disk_queue_seconds_total",
        ),
        (Tasks, "host_disk_requests_in_flight"),
    ),
    **_from(
        "statvfs",
        (Bytes, "host_filesystem_size_bytes host_filesystem_available_bytes"),
        (Count, "host_filesystem_files host_filesystem_files_free"),
        (Flag, "host_filesystem_read_only host_filesystem_error"),
    ),
    **_from(
        "/proc/net/dev",
        (Bytes, "host_network_receive_bytes_total host_network_transmit_bytes_total"),
        (
            Count,
            "host_network_receive_packets_total host_network_transmit_packets_total"
            " host_network_receive_errors_total host_network_transmit_errors_total"
            " host_network_receive_drops_total host_network_transmit_drops_total",
        ),
        (LinkShare, "host_network_receive_utilization_ratio host_network_transmit_utilization_ratio"),
    ),
    **_from(
        "/sys/class/net",
        (LinkRate, "host_network_link_bytes_per_second"),
        (Flag, "host_network_up"),
        (Bytes, "host_network_mtu_bytes"),
        (Count, "host_network_carrier_changes_total"),
    ),
    **_from(
        "/proc/net",
        (
            Count,
            "host_tcp_segments_received_total host_tcp_segments_sent_total host_tcp_segments_retransmitted_total"
            " host_tcp_retransmissions_total host_tcp_timeouts_total host_tcp_receive_errors_total"
            " host_tcp_resets_sent_total host_tcp_drops_total host_tcp_opens_total host_udp_datagrams_total"
            " host_udp_receive_errors_total host_udp_buffer_errors_total host_softnet_drops_total"
            " host_softnet_squeezes_total",
        ),
        (Tasks, "host_tcp_connections host_tcp_sockets"),
        (Bytes, "host_socket_memory_bytes"),
    ),
    **_from(
        "/proc/sys",
        (Flag, "host_os_info"),
        (Count, "host_threads_limit host_tracked_connections host_tracked_connections_limit host_hung_tasks_total"),
        (Count, "host_open_files"),
        (Bytes, "host_open_files_limit"),  # a signed number of 64 bits, which it is by default
    ),
    **_from(
        "adjtimex",
        (Flag, "host_clock_synchronized"),
        (SignedNanoseconds, "host_clock_offset_seconds"),
        (Nanoseconds, "host_clock_estimated_error_seconds host_clock_max_error_seconds"),
    ),
    **_from(
        "/sys/class/hwmon",
        (Millicelsius, "host_sensor_temperature_celsius host_sensor_temperature_limit_celsius"),
        (Revolutions, "host_sensor_fan_rpm"),
        (BoardMilliwatts, "host_sensor_power_watts"),
    ),
    **_from(
        "/sys/class/infiniband",
        (Flag, "rdma_port_info rdma_port_active rdma_port_link_up"),
        (LinkRate, "rdma_port_link_bytes_per_second"),
        (Bytes, "rdma_receive_bytes_total rdma_transmit_bytes_total"),
        (Count, "rdma_receive_packets_total rdma_transmit_packets_total rdma_transmit_waits_total"),
        (Count, "rdma_errors_total rdma_congestion_events_total"),
        (LinkShare, "rdma_receive_utilization_ratio rdma_transmit_utilization_ratio"),
    ),
    **_from(
        "the control group",
        (Flag, "cgroup_member_info"),
        (Cpus, "cgroup_cpu_limit_cpus"),
        (Nanoseconds, "cgroup_cpu_seconds_total cgroup_cpu_throttled_seconds_total"),
        (Count, "cgroup_cpu_periods_total cgroup_cpu_throttled_periods_total"),
        (Bytes, "cgroup_memory_limit_bytes cgroup_memory_used_bytes"),
        (Count, "cgroup_memory_limit_hits_total cgroup_oom_kills_total"),
    ),
    **_from(
        "the daemon",
        (Flag, "gpu_up gpu_down gpu_driver_slow gpu_pcie_counters_reliable"),
        (Nanoseconds, "gpu_last_success_time_seconds gpu_driver_call_seconds_total gpu_read_interval_seconds"),
        (Count, "gpu_consecutive_failures gpu_failures_total gpu_read_failures_total gpu_driver_calls_total"),
        (Count, "gpu_driver_openings_total gpu_xid_errors_total"),
        (Flag, "gpu_health gpu_health_reason gpu_missing"),
        (FewParts, "gpu_refused_numbers"),
    ),
    **_from(
        "NVML",
        (Flag, "gpu_info gpu_nvlink_info gpu_instance_info gpu_platform_info gpu_fabric_info"),
        (
            Ratio,
            "gpu_utilization_ratio gpu_memory_utilization_ratio gpu_encoder_utilization_ratio"
            " gpu_decoder_utilization_ratio gpu_process_sm_ratio",
        ),
        (
            MeasuredRatio,
            "gpu_graphics_active_ratio gpu_sm_active_ratio gpu_sm_occupancy_ratio gpu_tensor_active_ratio"
            " gpu_pipe_active_ratio gpu_dram_bandwidth_ratio gpu_instance_active_ratio gpu_fan_speed_ratio",
        ),
        (
            Bytes,
            "gpu_memory_size_bytes gpu_memory_used_bytes gpu_memory_free_bytes gpu_memory_reserved_bytes"
            " gpu_bar1_size_bytes gpu_bar1_used_bytes gpu_process_memory_bytes gpu_instance_memory_size_bytes"
            " gpu_instance_memory_used_bytes gpu_instance_memory_free_bytes gpu_instance_memory_reserved_bytes",
        ),
        (
            ChipMilliwatts,
            "gpu_power_watts gpu_power_mean_watts gpu_power_limit_watts gpu_power_limit_min_watts"
            " gpu_power_limit_max_watts gpu_power_limit_default_watts",
        ),
        (Count, "gpu_energy_joules_total"),
        (Celsius, "gpu_temperature_celsius gpu_memory_temperature_celsius gpu_temperature_threshold_celsius"),
        (Celsius, "gpu_temperature_margin_celsius gpu_temperature_margin_threshold_celsius"),
        (Revolutions, "gpu_fan_rpm"),
        (Megahertz, "gpu_clock_hertz gpu_clock_max_hertz"),
        (Nanoseconds, "gpu_clock_event_seconds_total"),
        (PerformanceState, "gpu_performance_state"),
        (Count, "gpu_ecc_errors_total gpu_pcie_replays_total gpu_nvlink_link_errors_total"),
        (Count, "gpu_sram_ecc_errors_total gpu_c2c_errors_total"),
        (Count, "gpu_ecc_uncorrected_errors"),  # a field of 64 bits: its reader leaves out what is all ones
        (FewParts, "gpu_retired_pages gpu_remapped_rows gpu_row_remap_banks"),
        (FewParts, "gpu_processes gpu_mps_processes gpu_instance_processes gpu_mig_instances"),
        (FewParts, "gpu_retired_pages_pending gpu_row_remap_pending gpu_row_remap_failed"),
        (Flag, "gpu_ecc_enabled gpu_ecc_enabled_after_reset gpu_sram_ecc_threshold_exceeded"),
        (Flag, "gpu_mig_enabled gpu_mig_enabled_after_reset gpu_c2c_enabled"),
        (FewLanes, "gpu_pcie_generation gpu_pcie_generation_max gpu_pcie_width gpu_pcie_width_max"),
        (FewLanes, "gpu_nvlink_link_state gpu_c2c_links gpu_c2c_links_up"),
        (Bytes, "gpu_pcie_receive_bytes_total gpu_pcie_transmit_bytes_total"),
        (Bytes, "gpu_nvlink_receive_bytes_total gpu_nvlink_transmit_bytes_total"),
        (Bytes, "gpu_nvlink_link_receive_bytes_total gpu_nvlink_link_transmit_bytes_total"),
        (Count, "gpu_nvlink_link_receive_packets_total gpu_nvlink_link_transmit_packets_total"),
        (
            LinkRate,
            "gpu_pcie_receive_bytes_per_second gpu_pcie_transmit_bytes_per_second gpu_nvlink_receive_bytes_per_second"
            " gpu_nvlink_transmit_bytes_per_second gpu_nvlink_link_bytes_per_second gpu_c2c_bytes_per_second",
        ),
        (Flag, "gpu_fabric_state gpu_fabric_health gpu_fabric_condition"),
        (NvmlCode, "gpu_fabric_status"),
    ),
}
"""Metric -> its range and source."""

_WHOLES = {
    "host_memory_available_bytes": "host_memory_size_bytes",
    "host_memory_used_bytes": "host_memory_size_bytes",
    "host_swap_used_bytes": "host_swap_size_bytes",
    "host_hugepages_free_bytes": "host_hugepages_size_bytes",
    "host_numa_memory_free_bytes": "host_numa_memory_size_bytes",
    "host_filesystem_available_bytes": "host_filesystem_size_bytes",
    "host_filesystem_files_free": "host_filesystem_files",
    "gpu_memory_used_bytes": "gpu_memory_size_bytes",
    "gpu_memory_free_bytes": "gpu_memory_size_bytes",
    "gpu_memory_reserved_bytes": "gpu_memory_size_bytes",
    "gpu_bar1_used_bytes": "gpu_bar1_size_bytes",
    "gpu_power_limit_min_watts": "gpu_power_limit_max_watts",
    "gpu_c2c_links_up": "gpu_c2c_links",
    "gpu_instance_memory_used_bytes": "gpu_instance_memory_size_bytes",
    "gpu_instance_memory_free_bytes": "gpu_instance_memory_size_bytes",
    "gpu_instance_memory_reserved_bytes": "gpu_instance_memory_size_bytes",
}

WHOLES = {by_name(f"pacecar_{part}").name: by_name(f"pacecar_{whole}").name for part, whole in _WHOLES.items()}
"""Metric -> the metric with the same labels that it cannot exceed."""
assert all(by_name(part).labels == by_name(whole).labels for part, whole in WHOLES.items())
assert all(RANGES[part].source == RANGES[whole].source for part, whole in WHOLES.items()), "read at two instants"
