"""Computes how busy GPUs, links and hosts were before and after tuning, from recordings of the daemons.

A rank knows what it launched, but only the daemon reads how busy that kept the device.  So these rows need a recording
beside the records (the demo leaves one, `pacecar dump` makes one), and describe the part of the run that it covers.  If
the job's ranks named their GPUs, only those count.

Counters become rates between two ticks; a counter that fell was reset, so that pair is skipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pacecar.metrics.metric import MetricUnit
from pacecar.records import JobHello
from pacecar.records.recording import Series, Tick

from ..figures import Moments

__all__ = ["Hosts", "Span"]

Span = tuple[int, int]
"""Start and end, in wall-clock nanoseconds."""

GAP_NS_MAX = 30_000_000_000
"""Two ticks further apart are not consecutive."""

GAUGES: dict[str, tuple[str, str, float]] = {
    "pacecar_gpu_utilization_ratio": ("GPU utilization", "ratio", 1.0),
    "pacecar_gpu_sm_active_ratio": ("SMs active", "ratio", 1.0),
    "pacecar_gpu_tensor_active_ratio": ("tensor cores active", "ratio", 1.0),
    "pacecar_gpu_memory_utilization_ratio": ("GPU memory reads and writes", "ratio", 1.0),
    "pacecar_gpu_dram_bandwidth_ratio": ("GPU memory bandwidth", "ratio", 1.0),
    "pacecar_gpu_power_watts": ("GPU power", "watts", MetricUnit.MILLIWATTS.scale),
    "pacecar_gpu_temperature_celsius": ("GPU temperature", "celsius", 1.0),
    "pacecar_host_cpu_utilization_ratio": ("host CPU", "ratio", 1.0),
}
"""Metric -> label, unit, factor from internal units."""

QUOTIENTS: dict[str, tuple[str, str, str]] = {
    "gpu_memory_used": ("GPU memory in use", "pacecar_gpu_memory_used_bytes", "pacecar_gpu_memory_size_bytes"),
    "host_memory_used": ("host memory in use", "pacecar_host_memory_used_bytes", "pacecar_host_memory_size_bytes"),
}

COUNTERS: dict[str, tuple[str, str]] = {
    "pacecar_gpu_nvlink_transmit_bytes_total": ("NVLink, sent", "gpu"),
    "pacecar_gpu_nvlink_receive_bytes_total": ("NVLink, received", "gpu"),
    "pacecar_gpu_pcie_transmit_bytes_total": ("PCIe, sent by the GPU", "gpu"),
    "pacecar_gpu_pcie_receive_bytes_total": ("PCIe, received by the GPU", "gpu"),
    "pacecar_rdma_transmit_bytes_total": ("RDMA, sent", "port"),
    "pacecar_rdma_receive_bytes_total": ("RDMA, received", "port"),
    "pacecar_host_network_transmit_bytes_total": ("network, sent", "interface"),
    "pacecar_host_network_receive_bytes_total": ("network, received", "interface"),
}

ENERGY = "pacecar_gpu_energy_joules_total"
GPU_INFO = "pacecar_gpu_info"


@dataclass
class Hosts:
    """Sums over ticks; `rows` is quantity -> label, unit, and moments by stretch."""

    spans: Mapping[str, Span]
    hellos: Iterable[JobHello] = ()
    rows: dict[str, tuple[str, str, dict[str, Moments]]] = field(default_factory=dict)
    energies: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)
    ticks: int = 0

    def __post_init__(self) -> None:
        self._last: dict[str, tuple[int, str, Tick]] = {}
        self._hosts = {hello.host for hello in self.hellos}
        self._uuids = {hello.device_uuid for hello in self.hellos if hello.device_uuid}
        self._interfaces = {(hello.host, hello.interface) for hello in self.hellos if hello.interface}

    def add(self, host: str, tick: Tick) -> None:
        """Add one tick of a host; ticks of other jobs' hosts or outside the stretches are ignored."""
        if self._hosts and host not in self._hosts:
            return
        side = next((name for name, (start, end) in self.spans.items() if start <= tick.wall_ns <= end), None)
        if side is None:
            self._last.pop(host, None)
            return
        self.ticks += 1
        gpus = self._gpus_of(tick.values)
        for (metric, labels), value in tick.values.items():
            known = GAUGES.get(metric)
            if known is not None and self._is_ours(metric, labels, gpus):
                self._add(side, metric, known[0], known[1], value * known[2])
        for name, (label, used, size) in QUOTIENTS.items():
            for (metric, labels), value in tick.values.items():
                whole = tick.values.get((size, labels))
                if metric == used and whole and self._is_ours(metric, labels, gpus):
                    self._add(side, name, label, "ratio", value / whole)
        before = self._last.get(host)
        if before is not None and before[1] == side and 0 < tick.wall_ns - before[0] <= GAP_NS_MAX:
            self._rates(host, side, before[2], tick, gpus)
        self._last[host] = (tick.wall_ns, side, tick)

    def _add(self, side: str, name: str, label: str, unit: str, value: float) -> None:
        row = self.rows.setdefault(name, (label, unit, {}))
        row[2].setdefault(side, Moments()).add(value)

    def _gpus_of(self, values: Mapping[Series, int | float]) -> set[str] | None:
        """Return the indices of the job's GPUs; None if the ranks named none, so that all count."""
        if not self._uuids:
            return None
        return {labels[0] for metric, labels in values if metric == GPU_INFO and self._uuids & set(labels)}

    def is_ours(self, host: str, gpu: str, values: Mapping[Series, int | float]) -> bool:
        """Return whether a GPU of a host is the job's, by a tick's values."""
        gpus = self._gpus_of(values)
        return (not self._hosts or host in self._hosts) and (gpus is None or gpu in gpus)

    def _is_ours(self, metric: str, labels: tuple[str, ...], gpus: set[str] | None) -> bool:
        return not metric.startswith("pacecar_gpu_") or gpus is None or labels[0] in gpus

    def _rates(self, host: str, side: str, old: Tick, new: Tick, gpus: set[str] | None) -> None:
        wall_ns = new.wall_ns - old.wall_ns
        for series, value in new.values.items():
            metric, labels = series
            if metric not in COUNTERS and metric != ENERGY:
                continue
            was = old.values.get(series)
            if was is None or value < was or not self._is_ours(metric, labels, gpus):
                continue
            if metric == ENERGY:
                # For each GPU on its own: one that missed a tick did not draw 0 W.
                total = self.energies.setdefault((side, host, labels[0]), [0, 0])
                total[0] += int(value - was)
                total[1] += wall_ns
            elif COUNTERS[metric][1] != "interface" or self._carries_collectives(host, labels[0]):
                self._add(side, metric, COUNTERS[metric][0], "bytes_per_second", (value - was) * 1e9 / wall_ns)

    def watts(self, side: str) -> tuple[float, int, int] | None:
        """Return the power of the job's GPUs on all hosts in a stretch, their number, and the time covered."""
        found = [total for (name, _, _), total in self.energies.items() if name == side and total[1] > 0]
        if not found:
            return None
        return sum(mj * 1e6 / ns for mj, ns in found), len(found), min(ns for _, ns in found)

    def _carries_collectives(self, host: str, interface: str) -> bool:
        """Return whether collectives use this interface; loopback counts only if a rank named it."""
        if any(name == host for name, _ in self._interfaces):
            return (host, interface) in self._interfaces
        return interface != "lo"
