"""How do we ask the NVIDIA driver?  The only file that knows pynvml; everyone else sees `Nvml`.

pynvml raises one exception class per error code and hands out ctypes structures.  The rest of the daemon needs a few
cases and plain integers, and its tests need a driver that they can own.

    DriverMissingError   no driver library, no driver loaded: a machine without GPUs, healthy
    DriverStoppedError   the driver was reloaded under us: open it anew
    UnsupportedError     this GPU or this driver does not have that number: ask no more
    GpuLostError         the GPU fell off the bus or needs a reset: its other numbers will not come either
    NvmlError            everything else, with the driver's own words

Left out on purpose: nvmlDeviceGetPcieThroughput, which blocks for 20 ms a direction while the driver measures; the
cumulative counters (fields 197 and 198) cost a hundredth and lose nothing between ticks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NewType, Protocol, TypeVar

import pynvml

__all__ = [
    "CLOCKS",
    "DriverMissingError",
    "DriverStoppedError",
    "FieldId",
    "GpuLostError",
    "Handle",
    "Identity",
    "Memory",
    "Nvml",
    "NvmlError",
    "PyNvml",
    "UnsupportedError",
    "Utilization",
]

Handle = NewType("Handle", object)
"""A GPU as the driver names it; valid until `stop`."""

CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}

T = TypeVar("T")


class NvmlError(Exception):
    """A query failed; the message has the driver's own words."""


class DriverMissingError(NvmlError):
    """There is no NVIDIA driver here."""


class UnsupportedError(NvmlError):
    """This GPU or this driver does not offer that number."""


class GpuLostError(NvmlError):
    """The GPU does not answer any more."""


class DriverStoppedError(NvmlError):
    """The library is not initialized (any more): the driver was reloaded under us."""


class Identity(NamedTuple):
    """What does not change about a GPU."""

    uuid: str
    name: str
    pci_bus_id: str


class Utilization(NamedTuple):
    """Shares of the driver's sample period, in percent."""

    gpu_percent: int
    memory_percent: int


class Memory(NamedTuple):
    """Device memory in bytes."""

    total: int
    used: int
    free: int


class FieldId(NamedTuple):
    """A field of nvmlDeviceGetFieldValues: its number in nvml.h and its scope (a link; 0 where it has none)."""

    number: int
    scope: int = 0


class Nvml(Protocol):
    """The driver as the GPU collector sees it.  Every method raises NvmlError or one of its kinds."""

    def start(self) -> None:
        """Load and initialize; raises DriverMissingError where there is nothing to load."""
        ...

    def stop(self) -> None:
        """Let go; never raises."""
        ...

    def driver_version(self) -> str:
        """Return the driver's version."""
        ...

    def device_count(self) -> int:
        """Return how many GPUs the driver sees."""
        ...

    def device(self, index: int) -> Handle:
        """Return the GPU with that index."""
        ...

    def identity(self, handle: Handle) -> Identity:
        """Return what does not change about the GPU."""
        ...

    def utilization(self, handle: Handle) -> Utilization:
        """Return the shares of time in which a kernel ran and memory was used."""
        ...

    def memory(self, handle: Handle) -> Memory:
        """Return device memory in bytes; what the driver reserves counts as used."""
        ...

    def power(self, handle: Handle) -> int:
        """Return milliwatts."""
        ...

    def power_limit(self, handle: Handle) -> int:
        """Return the enforced limit in milliwatts."""
        ...

    def energy(self, handle: Handle) -> int:
        """Return millijoules since the driver was loaded."""
        ...

    def temperature(self, handle: Handle) -> int:
        """Return degrees Celsius of the core."""
        ...

    def clock(self, handle: Handle, domain: str) -> int:
        """Return the clock of a domain of CLOCKS in megahertz."""
        ...

    def clock_max(self, handle: Handle, domain: str) -> int:
        """Return the highest clock of a domain of CLOCKS in megahertz."""
        ...

    def fields(self, handle: Handle, ids: Sequence[FieldId]) -> list[int | NvmlError]:
        """Return for each field its value or the error that the driver gave for that one."""
        ...


class PyNvml:
    """The real driver through pynvml."""

    def start(self) -> None:
        """Load libnvidia-ml.so.1 and initialize it."""
        with _translated():
            pynvml.nvmlInit()

    def stop(self) -> None:
        """Shut the library down; one that is down already is no error."""
        try:
            with _translated():
                pynvml.nvmlShutdown()
        except NvmlError:
            return

    def driver_version(self) -> str:
        """Ask nvmlSystemGetDriverVersion."""
        return _text(_ask(pynvml.nvmlSystemGetDriverVersion))

    def device_count(self) -> int:
        """Ask nvmlDeviceGetCount."""
        return int(_ask(pynvml.nvmlDeviceGetCount))

    def device(self, index: int) -> Handle:
        """Ask nvmlDeviceGetHandleByIndex."""
        return Handle(_ask(pynvml.nvmlDeviceGetHandleByIndex, index))

    def identity(self, handle: Handle) -> Identity:
        """Ask for UUID, name and PCI address."""
        return Identity(
            uuid=_text(_ask(pynvml.nvmlDeviceGetUUID, handle)),
            name=_text(_ask(pynvml.nvmlDeviceGetName, handle)),
            pci_bus_id=_text(_ask(pynvml.nvmlDeviceGetPciInfo, handle).busId),
        )

    def utilization(self, handle: Handle) -> Utilization:
        """Ask nvmlDeviceGetUtilizationRates."""
        rates = _ask(pynvml.nvmlDeviceGetUtilizationRates, handle)
        return Utilization(int(rates.gpu), int(rates.memory))

    def memory(self, handle: Handle) -> Memory:
        """Ask nvmlDeviceGetMemoryInfo."""
        info = _ask(pynvml.nvmlDeviceGetMemoryInfo, handle)
        return Memory(total=int(info.total), used=int(info.used), free=int(info.free))

    def power(self, handle: Handle) -> int:
        """Ask nvmlDeviceGetPowerUsage."""
        return int(_ask(pynvml.nvmlDeviceGetPowerUsage, handle))

    def power_limit(self, handle: Handle) -> int:
        """Ask nvmlDeviceGetEnforcedPowerLimit."""
        return int(_ask(pynvml.nvmlDeviceGetEnforcedPowerLimit, handle))

    def energy(self, handle: Handle) -> int:
        """Ask nvmlDeviceGetTotalEnergyConsumption."""
        return int(_ask(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle))

    def temperature(self, handle: Handle) -> int:
        """Ask nvmlDeviceGetTemperature for the core's sensor."""
        return int(_ask(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU))

    def clock(self, handle: Handle, domain: str) -> int:
        """Ask nvmlDeviceGetClockInfo."""
        return int(_ask(pynvml.nvmlDeviceGetClockInfo, handle, CLOCKS[domain]))

    def clock_max(self, handle: Handle, domain: str) -> int:
        """Ask nvmlDeviceGetMaxClockInfo."""
        return int(_ask(pynvml.nvmlDeviceGetMaxClockInfo, handle, CLOCKS[domain]))

    def fields(self, handle: Handle, ids: Sequence[FieldId]) -> list[int | NvmlError]:
        """Ask nvmlDeviceGetFieldValues once for all; each value has its own return code."""
        values = _ask(pynvml.nvmlDeviceGetFieldValues, handle, [tuple(field) for field in ids])
        return [_field(value) for value in values]


def _ask(function: Callable[..., T], *arguments: object) -> T:
    with _translated():
        return function(*arguments)


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except pynvml.NVMLError as error:
        raise _named(error.value, str(error)) from error


_MISSING = frozenset({pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED})
_UNSUPPORTED = frozenset(
    {
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a driver older than the call
        pynvml.NVML_ERROR_INVALID_ARGUMENT,  # what old drivers say to a field or a clock that they do not know
        pynvml.NVML_ERROR_DEPRECATED,
    }
)
_LOST = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, pynvml.NVML_ERROR_GPU_NOT_FOUND})


def _named(code: int, words: str) -> NvmlError:
    for codes, kind in ((_MISSING, DriverMissingError), (_UNSUPPORTED, UnsupportedError), (_LOST, GpuLostError)):
        if code in codes:
            return kind(f"{words} (NVML error {code})")
    if code == pynvml.NVML_ERROR_UNINITIALIZED:
        return DriverStoppedError(f"{words} (NVML error {code})")
    return NvmlError(f"{words} (NVML error {code})")


_VALUE_OF_TYPE = {
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}


def _field(value: pynvml.c_nvmlFieldValue_t) -> int | NvmlError:
    """Return the field's number; its type says which member of the C union holds it."""
    if value.nvmlReturn != pynvml.NVML_SUCCESS:
        return _named(value.nvmlReturn, str(pynvml.NVMLError(value.nvmlReturn)))
    member = _VALUE_OF_TYPE.get(value.valueType)
    if member is None:
        return NvmlError(f"field {value.fieldId} has value type {value.valueType}, which is no whole number")
    return int(getattr(value.value, member))


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
