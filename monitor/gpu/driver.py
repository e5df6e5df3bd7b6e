"""Defines the NVIDIA driver for all modules but `nvml`: the protocol `Nvml`, its values and its errors.

NVML has thirty error codes and four hundred functions.  The daemon reacts to errors in six ways, so it needs six kinds;
beyond that it needs plain numbers, and a driver that a test can replace.

    DriverMissingError   no driver library or driver: a machine without GPUs, which is healthy
    DriverStoppedError   the driver was reloaded: every handle is void, so open it again
    UnsupportedError     this GPU or this driver does not have that number: ask less often
    GpuLostError         the GPU fell off the bus or needs a reset: it will not answer other queries either
    NothingNewError      a valid query without a result (no sample since, no event)
    NvmlError            everything else, with the driver's own message

Left out: calling the driver, and everything that sets something on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, NewType, Protocol, Self

import msgspec

__all__ = [
    "ALL_LINKS",
    "DriverEvent",
    "DriverMemory",
    "DriverMissingError",
    "DriverProcess",
    "DriverStoppedError",
    "DriverUtilization",
    "Fabric",
    "FieldId",
    "FieldValue",
    "GpmSample",
    "GpuLostError",
    "Handle",
    "Identity",
    "Instance",
    "NothingNewError",
    "Number",
    "Nvml",
    "NvmlError",
    "Platform",
    "ProcessShare",
    "RemoteLink",
    "SpareRows",
    "SramErrors",
    "UnsupportedError",
]

ALL_LINKS = 0xFFFFFFFF
"""The scope of a field that sums all NVLinks of the GPU (nvml.h, nvmlFieldValue_t.scopeId)."""

Handle = NewType("Handle", object)
"""A GPU or a MIG instance as the driver names it; valid until `stop`."""

GpmSample = NewType("GpmSample", object)
"""A buffer that holds one reading of the GPU performance monitor."""


class NvmlError(Exception):
    """A query failed: the driver's own message, and its `code`; None if the error is not the driver's."""

    def __init__(self, words: str, code: int | None = None) -> None:
        super().__init__(words)
        self.code = code


class DriverMissingError(NvmlError):
    """This machine has no NVIDIA driver."""


class UnsupportedError(NvmlError):
    """This GPU or this driver does not offer that number."""


class GpuLostError(NvmlError):
    """The GPU no longer answers."""


class DriverStoppedError(NvmlError):
    """The library is not initialized, or no longer: the driver was reloaded."""


class NothingNewError(NvmlError):
    """Nothing happened since the last time."""


class Number(StrEnum):
    """The integers that the driver can be asked for, in the units of nvml.h, and the functions that return them.

    A function is a name, or a name with the arguments after the handle.  Functions are renamed over the years: the
    newest comes first, and where the driver lacks one, the next is tried.
    """

    def __new__(cls, words: str, *functions: str | tuple[object, ...]) -> Self:
        """Make a member with the value `words`."""
        number = str.__new__(cls, words)
        number._value_ = words
        number.calls = tuple(function if isinstance(function, tuple) else (function,) for function in functions)
        return number

    _value_: str
    calls: tuple[tuple[object, ...], ...]

    POWER = "power", "nvmlDeviceGetPowerUsage"  # mW, as sampled by the driver
    POWER_LIMIT = "power limit", "nvmlDeviceGetEnforcedPowerLimit"  # mW, enforced
    ENERGY = "energy", "nvmlDeviceGetTotalEnergyConsumption"  # mJ since the driver was loaded
    # degrees Celsius of the core
    TEMPERATURE = "temperature", ("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0)
    THRESHOLD_SHUTDOWN = "shutdown threshold", ("nvmlDeviceGetTemperatureThreshold", 0)  # degrees Celsius
    THRESHOLD_SLOWDOWN = "slowdown threshold", ("nvmlDeviceGetTemperatureThreshold", 1)
    THRESHOLD_MEMORY_MAX = "memory threshold", ("nvmlDeviceGetTemperatureThreshold", 2)
    THRESHOLD_GPU_MAX = "operating threshold", ("nvmlDeviceGetTemperatureThreshold", 3)
    CLOCK_GRAPHICS = "graphics clock", ("nvmlDeviceGetClockInfo", 0)  # MHz
    CLOCK_SM = "sm clock", ("nvmlDeviceGetClockInfo", 1)
    CLOCK_MEMORY = "memory clock", ("nvmlDeviceGetClockInfo", 2)
    CLOCK_VIDEO = "video clock", ("nvmlDeviceGetClockInfo", 3)
    CLOCK_MAX_GRAPHICS = "highest graphics clock", ("nvmlDeviceGetMaxClockInfo", 0)
    CLOCK_MAX_SM = "highest sm clock", ("nvmlDeviceGetMaxClockInfo", 1)
    CLOCK_MAX_MEMORY = "highest memory clock", ("nvmlDeviceGetMaxClockInfo", 2)
    CLOCK_MAX_VIDEO = "highest video clock", ("nvmlDeviceGetMaxClockInfo", 3)
    CLOCK_REASONS = (  # bits of nvmlClocksEventReason*
        "clock event reasons",
        "nvmlDeviceGetCurrentClocksEventReasons",
        "nvmlDeviceGetCurrentClocksThrottleReasons",  # its name before driver 535
    )
    CLOCK_REASONS_SUPPORTED = (
        "supported clock event reasons",
        "nvmlDeviceGetSupportedClocksEventReasons",
        "nvmlDeviceGetSupportedClocksThrottleReasons",
    )
    # 0 is the fastest
    PERFORMANCE_STATE = "performance state", "nvmlDeviceGetPerformanceState", "nvmlDeviceGetPowerState"
    ENCODER = "encoder utilization", "nvmlDeviceGetEncoderUtilization"  # percent
    DECODER = "decoder utilization", "nvmlDeviceGetDecoderUtilization"
    PCIE_GENERATION = "pcie generation", "nvmlDeviceGetCurrPcieLinkGeneration"
    PCIE_GENERATION_MAX = "highest pcie generation", "nvmlDeviceGetMaxPcieLinkGeneration"
    PCIE_WIDTH = "pcie width", "nvmlDeviceGetCurrPcieLinkWidth"  # lanes
    PCIE_WIDTH_MAX = "highest pcie width", "nvmlDeviceGetMaxPcieLinkWidth"
    MIG_MODE = "mig mode", "nvmlDeviceGetMigMode"  # 1: the GPU is split into instances
    ARCHITECTURE = "architecture", "nvmlDeviceGetArchitecture"
    GPM_SUPPORT = "gpm support", "nvmlGpmQueryDeviceSupport"  # 1: the GPU performance monitor works here
    # 1: the driver keeps the GPU initialized while no process uses it
    PERSISTENCE = "persistence mode", "nvmlDeviceGetPersistenceMode"
    FANS = "fans", "nvmlDeviceGetNumFans"  # that the driver controls; a board cooled by the chassis has none
    # mW, what the board has after a reset
    POWER_LIMIT_DEFAULT = "default power limit", "nvmlDeviceGetPowerManagementDefaultLimit"
    # degrees Celsius below the nearest temperature that slows the GPU down
    TEMPERATURE_MARGIN = "temperature margin", "nvmlDeviceGetMarginTemperature"
    C2C_ENABLED = "c2c mode", "nvmlDeviceGetC2cModeInfoV"  # 1: the GPU is joined to its CPU by NVLink-C2C


class Identity(NamedTuple):
    """Constant facts of a GPU; the empty text for what the driver did not report."""

    uuid: str
    name: str
    pci_bus_id: str
    vbios: str = ""


class DriverUtilization(NamedTuple):
    """Shares of the driver's sample period, in percent."""

    gpu_percent: int
    memory_percent: int


class DriverMemory(NamedTuple):
    """Memory in bytes; `reserved` is None where the driver counts it as used."""

    total: int
    used: int
    free: int
    reserved: int | None = None


class FieldId(NamedTuple):
    """A field of nvmlDeviceGetFieldValues: its number in nvml.h and its scope (a link; 0 where it has none)."""

    number: int
    scope: int = 0


class FieldValue(msgspec.Struct, frozen=True, gc=False):
    """The integer in a field, and the bits of its declared type, which is where it wraps.

    A Struct because a tick makes some hundred of them and compares each with that of the previous tick.
    """

    value: int
    bits: int


class DriverProcess(NamedTuple):
    """A compute process; memory in bytes, None if the driver hides it (another container, no permission)."""

    pid: int
    memory: int | None


class ProcessShare(NamedTuple):
    """A process's share of the SMs in percent, in the sample period that ended at `stamp_us` of the driver's clock."""

    pid: int
    stamp_us: int
    sm_percent: int


class Fabric(NamedTuple):
    """The GPU's place in an NVLink fabric: nvml.h's state, return code of the join, health mask and summary.

    The last two are None on older drivers; `cluster` is a UUID, empty for a GPU in no cluster.
    """

    state: int
    status: int
    cluster: str
    clique: int
    health_mask: int | None = None
    health_summary: int | None = None


class SramErrors(NamedTuple):
    """SRAM ECC errors since the driver was loaded and in the board's life, and whether they exceed the threshold.

    Uncorrected errors are found by parity or by SEC-DED, depending on the unit.
    """

    volatile_corrected: int
    volatile_parity: int
    volatile_sec_ded: int
    aggregate_corrected: int
    aggregate_parity: int
    aggregate_sec_ded: int
    is_over_threshold: bool


class Platform(NamedTuple):
    """Where the board sits: chassis, slot, tray, host in the tray and module, as the manufacturer numbers them.

    None without a chassis: the driver then reports slot 0, tray 0 and host 1, and nvidia-smi prints "N/A".
    """

    chassis_serial: str
    slot: int | None
    tray: int | None
    host: int | None
    module: int


class SpareRows(NamedTuple):
    """How many memory banks have all, most, some, few or none of their spare rows left."""

    all: int
    most: int
    some: int
    few: int
    none: int


class RemoteLink(NamedTuple):
    """The other end of an NVLink; empty texts for what the driver did not report."""

    version: str
    device: str
    pci_bus_id: str


class Instance(NamedTuple):
    """A MIG device: a compute instance within a GPU instance."""

    handle: Handle
    gpu_instance: int
    compute_instance: int
    uuid: str
    name: str


class DriverEvent(NamedTuple):
    """An Xid from the driver's event set; `gpu_index` is the index under which the GPU was registered."""

    gpu_index: int
    xid: int


class Nvml(Protocol):
    """The driver.  Every method raises NvmlError or one of its kinds, and any call may hang."""

    def start(self) -> None:
        """Load and initialize; raises DriverMissingError if there is nothing to load."""

    def stop(self) -> None:
        """Undo one `start`; never raises."""

    def driver_version(self) -> str:
        """Return the driver's version."""

    def cuda_version(self) -> str:
        """Return the highest CUDA version that the driver supports."""

    def device_count(self) -> int:
        """Return how many GPUs the driver sees."""

    def device(self, index: int) -> Handle:
        """Return the GPU with that index."""

    def identity(self, handle: Handle) -> Identity:
        """Return the constant facts of the GPU."""

    def number(self, handle: Handle, which: Number) -> int:
        """Return one number, in one call."""

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Return the CUDA compute capability: major, minor."""

    def peer_status(self, handle: Handle, other: Handle) -> int:
        """Return nvml.h's status of direct reads from `other`'s memory; 0 means that they work."""

    def utilization(self, handle: Handle) -> DriverUtilization:
        """Return the shares of time in which a kernel ran and memory was used."""

    def memory(self, handle: Handle) -> DriverMemory:
        """Return device memory, with reserved memory counted separately if the driver reports it."""

    def fan_percent(self, handle: Handle, fan: int) -> int:
        """Return the speed that the driver requests of a fan, in percent of the highest."""

    def fan_rpm(self, handle: Handle, fan: int) -> int:
        """Return the speed of a fan in revolutions per minute."""

    def bar1(self, handle: Handle) -> DriverMemory:
        """Return the BAR1 window through which the host and other devices reach device memory."""

    def fields(self, handle: Handle, ids: Sequence[FieldId]) -> list[FieldValue | NvmlError]:
        """Return each field's value, or the error that the driver gave for it, in one call."""

    def processes(self, handle: Handle) -> list[DriverProcess]:
        """Return the compute processes."""

    def process_shares(self, handle: Handle, since_us: int) -> list[ProcessShare]:
        """Return the shares sampled after `since_us`; raises NothingNewError if there are none."""

    def mps_processes(self, handle: Handle) -> list[DriverProcess]:
        """Return the compute processes that use the Multi-Process Service."""

    def mig_modes(self, handle: Handle) -> tuple[int, int]:
        """Return the MIG mode now and after the next reset; 1 means that the GPU is split into instances."""

    def power_limits(self, handle: Handle) -> tuple[int, int]:
        """Return the lowest and the highest power limit that can be set, in mW."""

    def sram_errors(self, handle: Handle) -> SramErrors:
        """Return the ECC errors of the SRAM."""

    def spare_rows(self, handle: Handle) -> SpareRows:
        """Return how many memory banks have which share of their spare rows left."""

    def platform(self, handle: Handle) -> Platform:
        """Return where the board sits."""

    def fabric(self, handle: Handle) -> Fabric:
        """Return the state of the NVLink fabric."""

    def link_active(self, handle: Handle, link: int) -> bool:
        """Return whether NVLink `link` is up; raises UnsupportedError past the last one."""

    def link_remote(self, handle: Handle, link: int) -> RemoteLink:
        """Return the other end of the link, in three calls; raises UnsupportedError if it is unknown."""

    def instance_slots(self, handle: Handle) -> int:
        """Return how many MIG devices the GPU can have."""

    def instance_key(self, handle: Handle, slot: int) -> int | None:
        """Return a number that identifies the MIG device in that slot, None for an empty slot, in one call."""

    def instance(self, handle: Handle, slot: int) -> Instance:
        """Return the MIG device in that slot, in five calls."""

    def gpm_sample(self) -> GpmSample:
        """Allocate a buffer for a reading; `stop` frees any that are left."""

    def gpm_free(self, sample: GpmSample) -> None:
        """Free a buffer; never raises."""

    def gpm_read(self, handle: Handle, into: GpmSample, gpu_instance: int | None = None) -> None:
        """Read the performance monitor of the GPU, or of one of its MIG instances, into `into`."""

    def gpm_metrics(self, before: GpmSample, after: GpmSample, ids: Sequence[int]) -> list[float | NvmlError]:
        """Return each metric's mean between two readings, or its error, in one call."""

    def watch(self, handles: Sequence[tuple[int, Handle]]) -> list[NvmlError | None]:
        """Open an event set for the Xids of these GPUs (index, handle); return the error of each that is not in it."""

    def event(self) -> DriverEvent:
        """Return the next Xid without waiting; raises NothingNewError if there is none."""
