"""Derives what jobs are told about their node: throttled GPUs, and signals about links, memory, clocks and faults.

A tuner compares step times, so it must know what else changes them, and know it again every few ticks.  All of it is in
the snapshots.  Not every tick reads every number, so a rate is taken over SIGNAL_TICKS ticks, a level is the last one
read in as many, and what none of them has is unknown.

Faults are events, and a job may miss a record, so a fault is sent for FAULT_SECONDS: an Xid error, an uncorrectable ECC
error (the others cost nothing), or a GPU that cannot be read.

RDMA bypasses the kernel, so a rank that names no interface but uses NCCL gets the sum of the active ports.

`pacecar_gpu_clock_event_seconds_total` counts how long each reason held a GPU's clocks down.  A GPU is throttled for a
reason that held for HELD_RATIO of the last WINDOW_SECONDS, which is longer than a tick.  Being idle does not count, nor
do clocks that an administrator set.

Pure: snapshots in, records out.  Left out: sending (`ingest/socket_server`); whose traffic it is; and jobs in another
network namespace, where the interface's name may mean another one.  At worst tuning pauses, and pauses are bounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import JobHello, Snapshot, Throttling
from pacecar.records.host_signals import NAMES_MAX, HostSignals

__all__ = [
    "FAULT_SECONDS",
    "HELD_RATIO",
    "REASONS",
    "SIGNAL_TICKS",
    "WINDOW_SECONDS",
    "NodeSignals",
    "NodeSignalsSource",
    "Throttles",
]

SIGNAL_TICKS = 3
"""A record every three seconds at the default tick: it averages out a burst of one second, and a trial takes longer."""

FAULT_SECONDS = 60
"""The driver retires pages, resets or resends for seconds after a fault."""

FAULTS_MAX = 1024
"""Faults remembered for all GPUs together."""

_Key = tuple[str, tuple[str, ...]]
_PREFIX = "pacecar_"

LEVELS = frozenset({
    "gpu_memory_free_bytes", "gpu_memory_size_bytes", "gpu_instance_memory_free_bytes",
    "gpu_instance_memory_size_bytes", "host_network_link_bytes_per_second",
    "host_network_transmit_utilization_ratio", "host_memory_available_bytes", "host_memory_size_bytes",
    "rdma_port_active", "rdma_port_link_bytes_per_second", "gpu_up",
})  # fmt: skip

COUNTERS = frozenset({
    "host_network_receive_bytes_total", "host_network_transmit_bytes_total", "rdma_receive_bytes_total",
    "rdma_transmit_bytes_total", "host_pressure_stalled_seconds_total",
})  # fmt: skip

FAULTS = ("gpu_ecc_errors_total", "gpu_down", "gpu_xid_errors_total")

HELD_RATIO = 0.2
"""Less would lengthen a step by less than anyone would act on."""

WINDOW_SECONDS = 2.0


class NodeSignals(NamedTuple):
    """The node in the last SIGNAL_TICKS ticks; `of` selects what concerns a rank.

    `levels` and `rates` (per second) are by metric and labels, `gpus` is uuid -> label, `faults` is label -> words,
    `instances` is uuid of a MIG instance -> its labels.  `gpus` also has the GPU of each instance, by the instance's
    uuid, because the GPU's faults are the instance's, too.
    """

    period_ns: int
    taken_ns: int
    levels: Mapping[_Key, float]
    rates: Mapping[_Key, float]
    gpus: Mapping[str, str]
    faults: Mapping[str, tuple[str, ...]]
    instances: Mapping[str, tuple[str, ...]] = MappingProxyType({})

    def of(self, hello: JobHello, throttling: Throttling | None) -> HostSignals:
        """Return the record for the rank of `hello`; `throttling` is that of its device."""
        gpu = None if hello.device_uuid is None else self.gpus.get(hello.device_uuid)
        receive, transmit, speed, name = self._link(hello)
        return HostSignals(
            period_ns=self.period_ns,
            taken_ns=self.taken_ns,
            device_uuid=hello.device_uuid,
            throttled_by=None if throttling is None or throttling.reasons is None else throttling.reasons[:NAMES_MAX],
            faults=None if gpu is None or gpu not in self.faults else self.faults[gpu][:NAMES_MAX],
            device_free_bytes=self._device_level("memory_free_bytes", hello.device_uuid),
            device_total_bytes=self._device_level("memory_size_bytes", hello.device_uuid),
            interface=name,
            receive_bytes_per_second=receive,
            transmit_bytes_per_second=transmit,
            link_bytes_per_second=speed,
            host_available_bytes=self._level("host_memory_available_bytes"),
            host_total_bytes=self._level("host_memory_size_bytes"),
            memory_stalled_ratio=self._stalled("memory"),
            cpu_stalled_ratio=self._stalled("cpu"),
        )

    def _link(self, hello: JobHello) -> tuple[float | None, float | None, int | None, str | None]:
        """Return receive and transmit rate, rated speed and name of the link that the rank's collectives use."""
        name = hello.interface
        if name is None:
            return self._rdma() if "nccl" in (hello.backend or "") else (None, None, None, None)
        receive, transmit = (
            self.rates.get((f"host_network_{direction}_bytes_total", (name,))) for direction in ("receive", "transmit")
        )
        # Only links have a utilization: a veth always claims 10 Gbit/s.
        is_link = ("host_network_transmit_utilization_ratio", (name,)) in self.levels
        speed = self._level("host_network_link_bytes_per_second", name) if is_link else None
        return receive, transmit, speed, name if receive is not None else None

    def _rdma(self) -> tuple[float | None, float | None, int | None, str | None]:
        """Return the same for all active ports together: NCCL gives each GPU the nearest one."""
        ports = [labels for (metric, labels), up in self.levels.items() if metric == "rdma_port_active" and up == 1]
        sums: list[float | None] = []
        for table, metric in (
            (self.rates, "rdma_receive_bytes_total"),
            (self.rates, "rdma_transmit_bytes_total"),
            (self.levels, "rdma_port_link_bytes_per_second"),
        ):
            found = [value for labels in ports if (value := table.get((metric, labels))) is not None]
            sums.append(sum(found) if found and len(found) == len(ports) else None)
        receive, transmit, speed = sums
        return receive, transmit, None if speed is None else int(speed), "RDMA" if ports else None

    def _device_level(self, what: str, uuid: str | None) -> int | None:
        """Return a level of a GPU or of a MIG instance."""
        if uuid is None:
            return None
        if uuid in self.instances:
            return self._level(f"gpu_instance_{what}", *self.instances[uuid])
        return self._level(f"gpu_{what}", self.gpus[uuid]) if uuid in self.gpus else None

    def _level(self, metric: str, *labels: str) -> int | None:
        value = self.levels.get((metric, labels))
        return None if value is None else int(value)

    def _stalled(self, resource: str) -> float | None:
        rate = self.rates.get(("host_pressure_stalled_seconds_total", (resource, "some")))
        return None if rate is None else rate / NS_PER_SECOND


class NodeSignalsSource:
    """Derives signals from every SIGNAL_TICKS snapshots, taken in order."""

    def __init__(self, tick_ns: int) -> None:
        self._period_ns = SIGNAL_TICKS * tick_ns
        self._ticks = 0
        self._gpus: dict[str, str] = {}
        self._levels: dict[_Key, float] = {}
        self._counters: dict[_Key, float] = {}
        self._since_ns: int | None = None
        self._fault_counts: dict[_Key, float] = {}
        self._faults: dict[tuple[str, str], int] = {}

    def update(self, snapshot: Snapshot) -> NodeSignals | None:
        """Return the signals to send after this tick; None if they are not due yet."""
        for metric in LEVELS:
            for sample in snapshot.of(_PREFIX + metric):
                self._levels[metric, sample.labels] = sample.value
        for metric in FAULTS:
            for sample in snapshot.of(_PREFIX + metric):
                self._note_fault(metric, sample.labels, sample.value, snapshot.started_ns)
        for sample in snapshot.of("pacecar_gpu_info"):
            self._gpus[sample.labels[1]] = sample.labels[0]
        instances = {one.labels[3]: one.labels[:3] for one in snapshot.of("pacecar_gpu_instance_info")}
        self._ticks += 1
        if self._ticks % SIGNAL_TICKS:
            return None
        counters = {(m, one.labels): one.value for m in COUNTERS for one in snapshot.of(_PREFIX + m)}
        rates = self._rates(counters, snapshot.started_ns)
        levels, self._levels = self._levels, {}
        faults = self._current_faults(snapshot.started_ns, levels)
        gpus = self._gpus | {uuid: labels[0] for uuid, labels in instances.items()}
        return NodeSignals(self._period_ns, snapshot.started_ns, levels, rates, gpus, faults, instances)

    def _rates(self, counters: dict[_Key, float], now_ns: int) -> dict[_Key, float]:
        before, since_ns = self._counters, self._since_ns
        self._counters, self._since_ns = counters, now_ns
        if since_ns is None or now_ns <= since_ns:
            return {}
        elapsed_ns = now_ns - since_ns
        return {
            key: (value - before[key]) * NS_PER_SECOND / elapsed_ns
            for key, value in counters.items()
            if key in before and value >= before[key]  # less: it was reset
        }

    def _note_fault(self, metric: str, labels: tuple[str, ...], value: float, now_ns: int) -> None:
        """Remember a fault by its GPU and what people call it."""
        if metric == "gpu_down":
            gpu, word = labels
            if value == 1:
                self._remember(gpu, f"down: {word}", now_ns)
            return
        if metric == "gpu_ecc_errors_total" and labels[1:] != ("uncorrected", "volatile"):
            return
        key = (metric, labels)
        before = self._fault_counts.get(key)
        if before is None and metric == "gpu_xid_errors_total" and self._knows_xids(labels[0]):
            before = 0  # a rare code, whose series begins with its first error
        if before is not None and value > before:
            self._remember(labels[0], f"Xid {labels[1]}" if metric == "gpu_xid_errors_total" else "ECC error", now_ns)
        self._fault_counts[key] = value

    def _knows_xids(self, gpu: str) -> bool:
        return any(metric == "gpu_xid_errors_total" and labels[0] == gpu for metric, labels in self._fault_counts)

    def _remember(self, gpu: str, word: str, now_ns: int) -> None:
        self._faults.pop((gpu, word), None)
        self._faults[gpu, word] = now_ns
        while len(self._faults) > FAULTS_MAX:
            del self._faults[next(iter(self._faults))]

    def _current_faults(self, now_ns: int, levels: Mapping[_Key, float]) -> dict[str, tuple[str, ...]]:
        """Return the faults of each known GPU, and forget those that are over."""
        over_ns = now_ns - FAULT_SECONDS * NS_PER_SECOND
        self._faults = {key: since_ns for key, since_ns in self._faults.items() if since_ns > over_ns}
        current: dict[str, tuple[str, ...]] = {labels[0]: () for metric, labels in levels if metric == "gpu_up"}
        for gpu, word in self._faults:
            current[gpu] = (*current.get(gpu, ()), word)
        return current


REASONS = frozenset({"sw_power_cap", "hw_slowdown", "sw_thermal_slowdown", "hw_thermal_slowdown", "hw_power_brake"})
"""The reasons of nvmlClocksEventReason* in nvml.h that slow down a GPU with work to do."""


class Throttles:
    """Finds throttled GPUs by comparing snapshots, taken in order, with an earlier one."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], int] = {}
        self._since_ns: int | None = None
        self._held: dict[str, tuple[str, ...]] = {}

    def update(self, snapshot: Snapshot) -> Mapping[str, Throttling]:
        """Return uuid -> what holds the GPU's clocks down; without GPUs for which it is unknown."""
        uuids = {sample.labels[0]: sample.labels[1] for sample in snapshot.of("pacecar_gpu_info")}
        since = self._since_ns
        elapsed = None if since is None else snapshot.started_ns - since
        if elapsed is None or elapsed >= WINDOW_SECONDS * NS_PER_SECOND:
            counters = {
                (sample.labels[0], sample.labels[1]): int(sample.value)
                for sample in snapshot.of("pacecar_gpu_clock_event_seconds_total")
                if sample.labels[1] in REASONS
            }
            self._held = {} if elapsed is None else _held(self._counters, counters, elapsed)
            self._counters, self._since_ns = counters, snapshot.started_ns
        of_gpu = [(uuid, gpu) for gpu, uuid in uuids.items()]
        of_gpu += [(one.labels[3], one.labels[0]) for one in snapshot.of("pacecar_gpu_instance_info")]  # on its clocks
        return {
            uuid: Throttling(device_uuid=uuid, reasons=self._held[gpu]) for uuid, gpu in of_gpu if gpu in self._held
        }


def _held(
    before: Mapping[tuple[str, str], int], now: Mapping[tuple[str, str], int], elapsed_ns: int
) -> dict[str, tuple[str, ...]]:
    """Return GPU -> the reasons that held for long enough, for each GPU with a reason that was read twice."""
    held: dict[str, tuple[str, ...]] = {}
    for (gpu, reason), value in sorted(now.items()):
        old = before.get((gpu, reason))
        if old is not None:
            is_held = value - old >= HELD_RATIO * elapsed_ns
            held[gpu] = (*held.get(gpu, ()), *([reason] if is_held else []))
    return held
