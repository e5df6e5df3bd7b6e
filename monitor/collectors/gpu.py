"""What are the GPUs doing?  One table of questions, each asked of each GPU on its own.

A GPU that lacks one number (no NVLink, no energy counter, MIG without utilization) still has the others, and a GPU
that fell off the bus must not take its neighbours' numbers with it.  So: a question that the driver calls unsupported
is dropped for that GPU; one that fails is a failure of this tick; a lost GPU is asked no further in this tick.

No driver or no GPU is absent, not failed.  Because drivers get loaded and GPUs come back, it looks again every
REOPEN_SECONDS.

Units by nvml.h: memory in bytes, power in mW, energy in mJ, clocks in MHz, field 197 (PCIe sent) and 198 (received)
cumulative bytes, fields 138 and 139 (NVLink data sent and received) cumulative KiB; for these two the scope is a link
and 0xFFFFFFFF sums all links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.monitor.collectors.reading import sample
from pacecar.monitor.nvml import (
    CLOCKS,
    DriverMissingError,
    DriverStoppedError,
    FieldId,
    GpuLostError,
    Handle,
    Identity,
    Nvml,
    NvmlError,
    UnsupportedError,
)
from pacecar.records import Absent, Failed, Ok, Outcome, Sample

__all__ = ["GpuCollector"]

REOPEN_SECONDS = 60
GPUS_MAX = 64

ALL_LINKS = 0xFFFFFFFF

Values = Iterator[tuple[str, int | float, tuple[str, ...]]]


class Field(NamedTuple):
    """A cumulative counter that is read as a field."""

    field: FieldId
    metric: str
    bytes_per_count: int


FIELDS = (
    Field(FieldId(197), "pacecar_gpu_pcie_transmit_bytes_total", 1),
    Field(FieldId(198), "pacecar_gpu_pcie_receive_bytes_total", 1),
    Field(FieldId(138, ALL_LINKS), "pacecar_gpu_nvlink_transmit_bytes_total", 1024),
    Field(FieldId(139, ALL_LINKS), "pacecar_gpu_nvlink_receive_bytes_total", 1024),
)


def _utilization(nvml: Nvml, handle: Handle) -> Values:
    rates = nvml.utilization(handle)
    yield "pacecar_gpu_utilization_ratio", rates.gpu_percent / 100, ()
    yield "pacecar_gpu_memory_utilization_ratio", rates.memory_percent / 100, ()


def _memory(nvml: Nvml, handle: Handle) -> Values:
    memory = nvml.memory(handle)
    yield "pacecar_gpu_memory_size_bytes", memory.total, ()
    yield "pacecar_gpu_memory_used_bytes", memory.used, ()
    yield "pacecar_gpu_memory_free_bytes", memory.free, ()


def _power(nvml: Nvml, handle: Handle) -> Values:
    yield "pacecar_gpu_power_watts", nvml.power(handle), ()


def _power_limit(nvml: Nvml, handle: Handle) -> Values:
    yield "pacecar_gpu_power_limit_watts", nvml.power_limit(handle), ()


def _energy(nvml: Nvml, handle: Handle) -> Values:
    yield "pacecar_gpu_energy_joules_total", nvml.energy(handle), ()


def _temperature(nvml: Nvml, handle: Handle) -> Values:
    yield "pacecar_gpu_temperature_celsius", nvml.temperature(handle), ()


def _clock(domain: str) -> Callable[[Nvml, Handle], Values]:
    def ask(nvml: Nvml, handle: Handle) -> Values:
        yield "pacecar_gpu_clock_hertz", nvml.clock(handle, domain), (domain,)

    return ask


def _clock_max(domain: str) -> Callable[[Nvml, Handle], Values]:
    def ask(nvml: Nvml, handle: Handle) -> Values:
        yield "pacecar_gpu_clock_max_hertz", nvml.clock_max(handle, domain), (domain,)

    return ask


QUESTIONS: dict[str, Callable[[Nvml, Handle], Values]] = {
    "utilization": _utilization,
    "memory": _memory,
    "power": _power,
    "power limit": _power_limit,
    "energy": _energy,
    "temperature": _temperature,
    **{f"{domain} clock": _clock(domain) for domain in CLOCKS},
    **{f"highest {domain} clock": _clock_max(domain) for domain in CLOCKS},
}


class _Gpu:
    """One GPU: its handle, its constant facts, and what is still worth asking."""

    def __init__(self, index: int, handle: Handle, identity: Identity, driver: str) -> None:
        self.label = str(index)
        self.handle = handle
        self.info = sample("pacecar_gpu_info", 1, self.label, identity.uuid, identity.name, driver, identity.pci_bus_id)
        self.questions = dict(QUESTIONS)
        self.fields = list(FIELDS)


class GpuCollector:
    """Utilization, memory, power, energy, temperature, clocks, and PCIe and NVLink traffic of each GPU."""

    name = "gpu"

    def __init__(self, nvml: Nvml, clock: Clock) -> None:
        self._nvml = nvml
        self._clock = clock
        self._gpus: list[_Gpu] = []
        self._unopened: list[str] = []
        self._last: Outcome | None = None
        self._look_again_ns: int | None = None

    def collect(self) -> Outcome:
        """Ask every GPU every question that it is known to answer."""
        closed = self._open()
        if closed is not None:
            return closed
        samples: list[Sample] = []
        failures = list(self._unopened)
        for gpu in self._gpus:
            try:
                self._ask(gpu, samples, failures)
            except GpuLostError as error:
                failures.append(f"gpu {gpu.label}: {error}")
            except DriverStoppedError as error:  # old handles are void: open anew at the next tick
                self.close()
                self._look_again_ns = None
                return Failed(f"gpu {gpu.label}: {error}", tuple(samples))
        return Failed("; ".join(failures), tuple(samples)) if failures else Ok(tuple(samples))

    def close(self) -> None:
        """Let go of the driver."""
        if self._gpus or self._unopened:
            self._gpus, self._unopened = [], []
            self._nvml.stop()

    def _open(self) -> Outcome | None:
        """Open the driver if it is not; None when there are GPUs to ask, else why not."""
        now = self._clock.monotonic_ns()
        due = self._look_again_ns is not None and now >= self._look_again_ns
        if self._gpus and not (self._unopened and due):
            return None
        if self._look_again_ns is not None and not due:
            return self._last
        self.close()
        self._look_again_ns = now + REOPEN_SECONDS * NS_PER_SECOND
        self._last = self._try_open()
        return self._last

    def _try_open(self) -> Outcome | None:
        try:
            self._nvml.start()
        except DriverMissingError as error:
            return Absent(f"no NVIDIA driver: {error}")
        except NvmlError as error:
            return Failed(f"NVIDIA driver: {error}")
        try:
            driver = self._nvml.driver_version()
            count = self._nvml.device_count()
        except NvmlError as error:
            self._nvml.stop()
            return Failed(f"NVIDIA driver: {error}")
        for index in range(min(count, GPUS_MAX)):
            try:
                handle = self._nvml.device(index)
                self._gpus.append(_Gpu(index, handle, self._nvml.identity(handle), driver))
            except NvmlError as error:
                self._unopened.append(f"gpu {index}: {error}")
        if count > GPUS_MAX:
            self._unopened.append(f"{count - GPUS_MAX} GPUs beyond the first {GPUS_MAX} left out")
        if count == 0:
            self._nvml.stop()
            return Absent("the NVIDIA driver sees no GPU")
        return None

    def _ask(self, gpu: _Gpu, samples: list[Sample], failures: list[str]) -> None:
        """Add what `gpu` answers; raises GpuLostError and DriverStoppedError."""
        samples.append(gpu.info)
        for name, question in list(gpu.questions.items()):
            try:
                for metric, value, labels in question(self._nvml, gpu.handle):
                    samples.append(sample(metric, value, gpu.label, *labels))
            except UnsupportedError:
                del gpu.questions[name]
            except (GpuLostError, DriverStoppedError):
                raise
            except NvmlError as error:
                failures.append(f"gpu {gpu.label}: {name}: {error}")
        if not gpu.fields:
            return
        try:
            answers = self._nvml.fields(gpu.handle, [field.field for field in gpu.fields])
        except UnsupportedError:
            gpu.fields = []
        except (GpuLostError, DriverStoppedError):
            raise
        except NvmlError as error:
            failures.append(f"gpu {gpu.label}: counters: {error}")
        else:
            self._take_fields(gpu, answers, samples, failures)

    @staticmethod
    def _take_fields(gpu: _Gpu, answers: Sequence[int | NvmlError], samples: list[Sample], failures: list[str]) -> None:
        unsupported = []
        for field, answer in zip(list(gpu.fields), answers, strict=True):
            if isinstance(answer, int):
                samples.append(sample(field.metric, answer * field.bytes_per_count, gpu.label))
            elif isinstance(answer, UnsupportedError):
                unsupported.append(field)
            else:
                failures.append(f"gpu {gpu.label}: {field.metric}: {answer}")
        gpu.fields = [field for field in gpu.fields if field not in unsupported]
