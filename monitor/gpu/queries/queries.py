"""Lists the queries of a GPU besides its fields, each with its driver calls and the time after which it is stale.

Running all of them at every tick would cost a hundred calls a GPU, mostly for unchanged answers: limits, maxima,
thresholds, the address at the other end of a link.  So a query states how many driver calls it makes and how long its
answer lasts.  Those that are always stale run at every tick; the rest fill the tick's remaining calls, the longest
overdue first (`query_schedule`).

The tables cover a whole GPU, its NVLinks, fans and processes, and a MIG instance.  A query yields samples or raises
NvmlError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Sample

from ..driver import (
    DriverProcess,
    Fabric,
    FieldId,
    FieldValue,
    Handle,
    Instance,
    NothingNewError,
    Number,
    Nvml,
    NvmlError,
    RemoteLink,
    UnsupportedError,
)
from .derived import GpuCounter
from .field_numbers import is_defined

__all__ = [
    "EVERY_TICK",
    "NEVER",
    "PROCESSES_MAX",
    "C2cLinks",
    "InstanceProcesses",
    "NvmlQuery",
    "Processes",
    "SramEcc",
    "fan_queries",
    "gpu_queries",
    "instance_queries",
    "link_queries",
]

PROCESSES_MAX = 16
"""Processes of one GPU with series of their own, those with most memory; `gpu_processes` counts all."""

FANS_MAX = 16
"""Fans of one GPU with series of their own; boards have up to three."""

EVERY_TICK = 0
SECONDS_5 = 5 * NS_PER_SECOND
SECONDS_10 = 10 * NS_PER_SECOND
SECONDS_15 = 15 * NS_PER_SECOND
SECONDS_30 = 30 * NS_PER_SECOND
MINUTES_5 = 300 * NS_PER_SECOND
NEVER = 1 << 62
"""For answers that hold until the next probe."""

Ask = Callable[[Nvml, Handle], Iterable[Sample | NvmlError]]
"""Yields samples, and errors for single numbers in an otherwise good answer."""


class NvmlQuery(NamedTuple):
    """One query; with `stale_ns` 0 it runs at every tick, a detail only at ticks whose result will be looked at."""

    name: str
    calls: int
    stale_ns: int
    ask: Ask
    is_detail: bool = False
    """Whether it is a level without recorded peaks."""


def _number(which: Number, stale_ns: int, metric: str, *labels: str, factor: float = 1) -> NvmlQuery:
    def ask(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        value = nvml.number(handle, which)
        yield Sample(metric, labels, value if factor == 1 else value * factor)

    return NvmlQuery(which.value, 1, stale_ns, ask)


def gpu_queries(gpu: str) -> list[NvmlQuery]:
    """Return the queries of a whole GPU, those of every tick first."""

    def utilization(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        rates = nvml.utilization(handle)
        yield Sample("pacecar_gpu_utilization_ratio", (gpu,), rates.gpu_percent / 100)
        yield Sample("pacecar_gpu_memory_utilization_ratio", (gpu,), rates.memory_percent / 100)

    def bar1(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        memory = nvml.bar1(handle)
        yield Sample("pacecar_gpu_bar1_size_bytes", (gpu,), memory.total)
        yield Sample("pacecar_gpu_bar1_used_bytes", (gpu,), memory.used)

    def fabric(nvml: Nvml, handle: Handle) -> Iterable[Sample]:
        return fabric_samples(gpu, nvml.fabric(handle))

    def power_limits(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        lowest, highest = nvml.power_limits(handle)
        yield Sample("pacecar_gpu_power_limit_min_watts", (gpu,), lowest)
        yield Sample("pacecar_gpu_power_limit_max_watts", (gpu,), highest)

    def spare_rows(nvml: Nvml, handle: Handle) -> Iterable[Sample]:
        for spare, banks in nvml.spare_rows(handle)._asdict().items():
            yield Sample("pacecar_gpu_row_remap_banks", (gpu, spare), banks)

    def platform(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        reported = ("" if part is None else str(part) for part in nvml.platform(handle))
        yield Sample("pacecar_gpu_platform_info", (gpu, *reported), 1)

    clocks = {"sm": EVERY_TICK, "memory": SECONDS_5, "graphics": SECONDS_15, "video": SECONDS_15}
    thresholds = {
        Number.THRESHOLD_SHUTDOWN: "shutdown",
        Number.THRESHOLD_SLOWDOWN: "slowdown",
        Number.THRESHOLD_MEMORY_MAX: "memory_max",
        Number.THRESHOLD_GPU_MAX: "gpu_max",
    }
    return [
        NvmlQuery("utilization", 1, EVERY_TICK, utilization),
        NvmlQuery("memory", 1, EVERY_TICK, _memory("pacecar_gpu_memory", gpu), is_detail=True),
        _number(Number.POWER, EVERY_TICK, "pacecar_gpu_power_watts", gpu),
        _number(Number.TEMPERATURE, EVERY_TICK, "pacecar_gpu_temperature_celsius", gpu)._replace(is_detail=True),
        *(
            _number(Number(f"{clock} clock"), stale, "pacecar_gpu_clock_hertz", gpu, clock)._replace(is_detail=True)
            for clock, stale in clocks.items()
        ),
        _number(Number.PERFORMANCE_STATE, SECONDS_5, "pacecar_gpu_performance_state", gpu),
        _number(Number.ENCODER, SECONDS_10, "pacecar_gpu_encoder_utilization_ratio", gpu, factor=0.01),
        _number(Number.DECODER, SECONDS_10, "pacecar_gpu_decoder_utilization_ratio", gpu, factor=0.01),
        NvmlQuery("bar1", 1, SECONDS_15, bar1),
        _number(Number.POWER_LIMIT, SECONDS_30, "pacecar_gpu_power_limit_watts", gpu),
        _number(Number.PCIE_GENERATION, SECONDS_30, "pacecar_gpu_pcie_generation", gpu),
        _number(Number.PCIE_WIDTH, SECONDS_30, "pacecar_gpu_pcie_width", gpu),
        _number(Number.PCIE_GENERATION_MAX, MINUTES_5, "pacecar_gpu_pcie_generation_max", gpu),
        _number(Number.PCIE_WIDTH_MAX, MINUTES_5, "pacecar_gpu_pcie_width_max", gpu),
        NvmlQuery("fabric", 1, SECONDS_30, fabric),
        _number(Number.TEMPERATURE_MARGIN, SECONDS_10, "pacecar_gpu_temperature_margin_celsius", gpu),
        NvmlQuery("power limits", 1, MINUTES_5, power_limits),
        _number(Number.POWER_LIMIT_DEFAULT, MINUTES_5, "pacecar_gpu_power_limit_default_watts", gpu),
        NvmlQuery("spare rows", 1, MINUTES_5, spare_rows),
        NvmlQuery("platform", 1, NEVER, platform),
        _number(Number.C2C_ENABLED, MINUTES_5, "pacecar_gpu_c2c_enabled", gpu),
        *(
            _number(Number(f"highest {clock} clock"), MINUTES_5, "pacecar_gpu_clock_max_hertz", gpu, clock)
            for clock in clocks
        ),
        *(
            _number(which, MINUTES_5, "pacecar_gpu_temperature_threshold_celsius", gpu, name)
            for which, name in thresholds.items()
        ),
    ]


def _memory(prefix: str, *labels: str) -> Ask:
    def ask(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        memory = nvml.memory(handle)
        yield Sample(f"{prefix}_size_bytes", labels, memory.total)
        yield Sample(f"{prefix}_used_bytes", labels, memory.used)
        yield Sample(f"{prefix}_free_bytes", labels, memory.free)
        if memory.reserved is not None:
            yield Sample(f"{prefix}_reserved_bytes", labels, memory.reserved)

    return ask


def link_queries(
    gpu: str, link: int, *, ask_state: bool, remember: Callable[[int, RemoteLink], None]
) -> list[NvmlQuery]:
    """Return the queries of one NVLink; its state is included only if its field is not available.

    The remote end goes to `remember`, because the driver may not report it while a link is down.
    """

    def state(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        yield Sample("pacecar_gpu_nvlink_link_state", (gpu, str(link)), int(nvml.link_active(handle, link)))

    def remote(nvml: Nvml, handle: Handle) -> Iterable[Sample]:
        remember(link, nvml.link_remote(handle, link))
        return ()

    queries = [NvmlQuery(f"nvlink {link} remote end", 3, NEVER, remote)]
    if ask_state:
        queries.append(NvmlQuery(f"nvlink {link} state", 1, SECONDS_30, state))
    return queries


def fan_queries(gpu: str, fans: int) -> list[NvmlQuery]:
    """Return the queries of each fan: the share of its highest speed and, since driver 565, revolutions a minute."""

    def speed(fan: int) -> Ask:
        return lambda nvml, handle: [
            Sample("pacecar_gpu_fan_speed_ratio", (gpu, str(fan)), nvml.fan_percent(handle, fan) / 100)
        ]

    def rpm(fan: int) -> Ask:
        return lambda nvml, handle: [Sample("pacecar_gpu_fan_rpm", (gpu, str(fan)), nvml.fan_rpm(handle, fan))]

    asked = range(min(fans, FANS_MAX))
    return [
        *(NvmlQuery(f"fan {fan} speed", 1, SECONDS_10, speed(fan)) for fan in asked),
        *(NvmlQuery(f"fan {fan} rpm", 1, SECONDS_10, rpm(fan)) for fan in asked),
    ]


def instance_queries(gpu: str, instance: Instance) -> list[NvmlQuery]:
    """Return the queries of a MIG device; they use the instance's own handle, not the one passed to them."""
    memory = _memory("pacecar_gpu_instance_memory", *_instance_labels(gpu, instance))
    name = f"mig {instance.gpu_instance}.{instance.compute_instance}"
    return [NvmlQuery(f"{name} memory", 1, SECONDS_5, lambda nvml, handle: memory(nvml, instance.handle))]


def _instance_labels(gpu: str, instance: Instance) -> tuple[str, str, str]:
    return gpu, str(instance.gpu_instance), str(instance.compute_instance)


class SramEcc:
    """The ECC errors of one GPU's SRAM, added up across driver restarts."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._counters: dict[tuple[str, str], GpuCounter] = {}

    def queries(self) -> list[NvmlQuery]:
        """Return the query."""
        return [NvmlQuery("sram errors", 1, SECONDS_30, self._ask)]

    def _ask(self, nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        reported = nvml.sram_errors(handle)
        for series, errors in {
            ("corrected", "volatile"): reported.volatile_corrected,
            ("uncorrected_parity", "volatile"): reported.volatile_parity,
            ("uncorrected_sec_ded", "volatile"): reported.volatile_sec_ded,
            ("corrected", "aggregate"): reported.aggregate_corrected,
            ("uncorrected_parity", "aggregate"): reported.aggregate_parity,
            ("uncorrected_sec_ded", "aggregate"): reported.aggregate_sec_ded,
        }.items():
            total = self._counters.setdefault(series, GpuCounter()).update(errors)
            if total is not None:
                yield Sample("pacecar_gpu_sram_ecc_errors_total", (self._gpu, *series), total)
        yield Sample("pacecar_gpu_sram_ecc_threshold_exceeded", (self._gpu,), int(reported.is_over_threshold))


C2C_LINKS_MAX = 32
"""Links between a GPU and its CPU that are read; Grace Hopper has ten."""

_C2C_COUNT, _C2C_UP, _C2C_SPEED = 170, 171, 172
_C2C_ERRORS = {231: "interrupt", 232: "replay", 233: "replay_back_to_back"}


class C2cLinks:
    """The NVLink-C2C links of one GPU to its CPU, as one sum: single links cannot be replaced."""

    def __init__(self, gpu: str, driver: str) -> None:
        self._gpu = gpu
        self._errors = {number: kind for number, kind in _C2C_ERRORS.items() if is_defined(number, driver)}
        self._is_defined = is_defined(_C2C_COUNT, driver)
        self._counters: dict[str, GpuCounter] = {}

    def queries(self) -> list[NvmlQuery]:
        """Return the query: one call for the number of links, one for all of them."""
        return [NvmlQuery("c2c links", 2, SECONDS_30, self._ask)] if self._is_defined else []

    def _ask(self, nvml: Nvml, handle: Handle) -> Iterator[Sample | NvmlError]:
        (links,) = nvml.fields(handle, [FieldId(_C2C_COUNT)])
        if isinstance(links, NvmlError):
            raise links
        if links.value <= 0:
            raise UnsupportedError("the GPU has no NVLink-C2C")
        numbers = (_C2C_UP, _C2C_SPEED, *self._errors)
        every = range(min(links.value, C2C_LINKS_MAX))
        answers = nvml.fields(handle, [FieldId(number, link) for number in numbers for link in every])
        found = {number: _whole(answers[at * len(every) : (at + 1) * len(every)]) for at, number in enumerate(numbers)}
        yield Sample("pacecar_gpu_c2c_links", (self._gpu,), links.value)
        failed = {answer.code: answer for answer in answers if isinstance(answer, NvmlError)}
        yield from (error for error in failed.values() if not isinstance(error, UnsupportedError))
        up, speeds = found[_C2C_UP], found[_C2C_SPEED]
        if up is not None:
            yield Sample("pacecar_gpu_c2c_links_up", (self._gpu,), sum(state == 1 for state in up))
        if speeds is not None:
            yield Sample("pacecar_gpu_c2c_bytes_per_second", (self._gpu,), sum(speeds) * 1_000_000)
        for number, kind in self._errors.items():
            errors = found[number]
            if errors is not None:
                total = self._counters.setdefault(kind, GpuCounter()).update(sum(errors))
                if total is not None:
                    yield Sample("pacecar_gpu_c2c_errors_total", (self._gpu, kind), total)


def _whole(answers: Sequence[FieldValue | NvmlError]) -> list[int] | None:
    """Return the numbers in `answers`; None if any is missing, because a sum without it is wrong."""
    numbers = [answer.value for answer in answers if isinstance(answer, FieldValue)]
    return numbers if len(numbers) == len(answers) else None


class Processes:
    """The processes of one GPU and their share of its SMs; remembers the time of the newest share."""

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._since_us = 0
        self._shown: set[int] = set()
        self._clients: list[DriverProcess] = []

    def queries(self) -> list[NvmlQuery]:
        """Return the queries, of two calls each: how many, and which."""
        return [
            NvmlQuery("mps processes", 2, SECONDS_30, self._mps),
            NvmlQuery("processes", 2, SECONDS_10, self._memory),
            NvmlQuery("process shares", 2, SECONDS_10, self._shares),
        ]

    def _mps(self, nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        self._clients = []
        self._clients = nvml.mps_processes(handle)
        yield Sample("pacecar_gpu_mps_processes", (self._gpu,), len(self._clients))

    def _memory(self, nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        found = nvml.processes(handle)
        yield Sample("pacecar_gpu_processes", (self._gpu,), len(found))
        found = _with_clients(found, self._clients)
        largest = _largest(found)
        unknown = [process.pid for process in found if process.memory is None]
        self._shown = set([*largest, *unknown][:PROCESSES_MAX])
        yield from _process_memory(self._gpu, largest)

    def _shares(self, nvml: Nvml, handle: Handle) -> Iterator[Sample]:
        try:
            shares = nvml.process_shares(handle, self._since_us)
        except NothingNewError:
            return
        latest = {share.pid: share for share in sorted(shares, key=lambda share: share.stamp_us)}
        self._since_us = max((share.stamp_us for share in shares), default=self._since_us)
        for pid, share in latest.items():
            # Some drivers fill unused rows with garbage: pid 0, shares far above 100.
            if pid in self._shown and share.sm_percent <= 100:
                yield Sample("pacecar_gpu_process_sm_ratio", (self._gpu, str(pid)), share.sm_percent / 100)


class InstanceProcesses:
    """The processes of one GPU in MIG mode, from the lists of its instances.

    The driver shows the list of the whole GPU only to privileged processes, and has no SM shares in this mode (nvml.h,
    nvmlDeviceGetComputeRunningProcesses and nvmlDeviceGetProcessUtilization).
    """

    def __init__(self, gpu: str) -> None:
        self._gpu = gpu
        self._lists: dict[tuple[str, str, str], list[DriverProcess] | None] = {}
        self._clients: dict[tuple[str, str, str], list[DriverProcess] | None] = {}
        self._add_up()

    def queries(self, instance: Instance) -> list[NvmlQuery]:
        """Return the queries of an instance, of two calls each: how many, and which."""
        labels = _instance_labels(self._gpu, instance)
        self._lists[labels] = self._clients[labels] = None
        self._add_up()

        def mps(nvml: Nvml, handle: Handle) -> Iterable[Sample]:
            self._clients[labels] = None
            try:
                self._clients[labels] = nvml.mps_processes(instance.handle)
            finally:
                self._add_up()
            return ()

        def processes(nvml: Nvml, handle: Handle) -> Iterator[Sample]:
            self._lists[labels] = None
            try:
                found = self._lists[labels] = nvml.processes(instance.handle)
            finally:
                self._add_up()
            yield Sample("pacecar_gpu_instance_processes", labels, len(found))

        name = f"mig {instance.gpu_instance}.{instance.compute_instance}"
        return [
            NvmlQuery(f"{name} mps processes", 2, SECONDS_30, mps),
            NvmlQuery(f"{name} processes", 2, SECONDS_15, processes),
        ]

    def samples(self, *, are_all_known: bool) -> list[Sample]:
        """Return each process's memory and, if all instances are known and answered, the number of processes."""
        return self._memory + self._counts if are_all_known else self._memory

    def _add_up(self) -> None:
        read = [_with_clients(one, self._clients[at] or []) for at, one in self._lists.items() if one is not None]
        self._memory = list(_process_memory(self._gpu, _largest([process for one in read for process in one])))
        self._counts = [
            Sample(metric, (self._gpu,), sum(len(one) for one in by_instance.values() if one is not None))
            for metric, by_instance in (
                ("pacecar_gpu_processes", self._lists),
                ("pacecar_gpu_mps_processes", self._clients),
            )
            if None not in by_instance.values()
        ]


def _with_clients(found: list[DriverProcess], clients: list[DriverProcess]) -> list[DriverProcess]:
    """Return `found` and the clients of MPS: the driver lists their server in `found`, and the clients separately."""
    here = {process.pid for process in found}
    return found + [client for client in clients if client.pid not in here]


def _largest(processes: Iterable[DriverProcess]) -> dict[int, int]:
    """Return pid -> memory of the processes with most memory; one may be listed once per context."""
    known: dict[int, int] = {}
    for process in processes:
        if process.memory is not None:
            known[process.pid] = known.get(process.pid, 0) + process.memory
    return {pid: known[pid] for pid in sorted(known, key=lambda pid: (-known[pid], pid))[:PROCESSES_MAX]}


def _process_memory(gpu: str, processes: dict[int, int]) -> Iterator[Sample]:
    for pid, memory in processes.items():
        yield Sample("pacecar_gpu_process_memory_bytes", (gpu, str(pid)), memory)


_FABRIC_STATES = {1: "not_started", 2: "in_progress", 3: "completed"}  # NVML_GPU_FABRIC_STATE_*; 0 is not supported
_FABRIC_CONDITIONS = {  # condition -> (shift, width, reported when it holds), nvml.h NVML_GPU_FABRIC_HEALTH_MASK_*
    "degraded_bandwidth": (0, 0x3, 1),
    "route_recovery": (2, 0x3, 1),
    "route_unhealthy": (4, 0x3, 1),
    "access_timeout_recovery": (6, 0x3, 1),
    "incorrect_configuration": (8, 0xF, None),  # whichever of _FABRIC_PROBLEMS
    "no_partition_assigned": (12, 0x3, 2),
    "fabric_manager_disconnected": (14, 0x3, 2),
}
_FABRIC_PROBLEMS = {  # NVML_GPU_FABRIC_HEALTH_MASK_INCORRECT_CONFIGURATION_*
    1: "none", 2: "incorrect_system_guid", 3: "incorrect_chassis_serial", 4: "no_partition", 5: "insufficient_nvlinks",
    6: "incompatible_firmware", 7: "invalid_location", 8: "invalid_gpu_state",
}  # fmt: skip
_FABRIC_HEALTH = {1: "healthy", 2: "unhealthy", 3: "limited_capacity"}  # NVML_GPU_FABRIC_HEALTH_SUMMARY_*


def fabric_samples(gpu: str, fabric: Fabric) -> Iterator[Sample]:
    """Yield state, place and conditions; nothing for a GPU without a fabric or for what is not reported."""
    if fabric.state not in _FABRIC_STATES:
        return
    for state, name in _FABRIC_STATES.items():
        yield Sample("pacecar_gpu_fabric_state", (gpu, name), int(fabric.state == state))
    yield Sample("pacecar_gpu_fabric_status", (gpu,), fabric.status)
    problem = "" if fabric.health_mask is None else _problem(fabric.health_mask)
    if fabric.cluster or problem:
        yield Sample("pacecar_gpu_fabric_info", (gpu, fabric.cluster, str(fabric.clique), problem), 1)
    if fabric.health_summary in _FABRIC_HEALTH:
        for summary, name in _FABRIC_HEALTH.items():
            yield Sample("pacecar_gpu_fabric_health", (gpu, name), int(fabric.health_summary == summary))
    for condition, (shift, width, holds) in _FABRIC_CONDITIONS.items():
        reported = 0 if fabric.health_mask is None else fabric.health_mask >> shift & width
        if reported != 0:  # 0 is not supported
            is_so = reported > 1 if holds is None else reported == holds
            yield Sample("pacecar_gpu_fabric_condition", (gpu, condition), int(is_so))


def _problem(health_mask: int) -> str:
    """Return what is wrong with the fabric's configuration; the empty text if the driver does not report it."""
    shift, width, _ = _FABRIC_CONDITIONS["incorrect_configuration"]
    reported = health_mask >> shift & width
    return _FABRIC_PROBLEMS.get(reported, "other") if reported else ""
