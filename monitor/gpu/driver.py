"""Defines the NVIDIA driver as all but `monitor/gpu/nvml.py` see it: the protocol `Nvml`, its values and its errors.

NVML has thirty error codes and four hundred functions.  The daemon needs six kinds of error, because it does six
different things about them, plain numbers, and a driver that a test can replace.

    DriverMissingError   no driver library, no driver loaded: a machine without GPUs, healthy
    DriverStoppedError   the driver was reloaded under us: every handle is void, open it anew
    UnsupportedError     this GPU or this driver does not have that number: ask no more
    GpuLostError         the GPU fell off the bus or needs a reset: its other numbers will not come either
    NothingNewError      the query was right, and there is nothing to report (no sample since, no event)
    NvmlError            everything else, with the driver's own message

`NUMBER_CALLS` maps each number that the driver can be asked for to the functions that return it; the table behind
`Nvml.number`.

Functions change their names over the years, and the old ones go.  So a number may have several functions, the newest
first; where the driver does not have one, the next is tried.

Left out on purpose: calling them, and everything that sets something on a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple, NewType, Protocol

import msgspec

__all__ = [
    "ALL_LINKS",
    "NUMBER_CALLS",
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
    """A query failed; the text is the driver's own message, `code` its number (None: not the driver's)."""

    def __init__(self, words: str, code: int | None = None) -> None:
        super().__init__(words)
        self.code = code


class DriverMissingError(NvmlError):
    """There is no NVIDIA driver here."""


class UnsupportedError(NvmlError):
    """This GPU or this driver does not offer that number."""


class GpuLostError(NvmlError):
    """The GPU does not answer any more."""


class DriverStoppedError(NvmlError):
    """The library is not initialized (any more): the driver was reloaded under us."""


class NothingNewError(NvmlError):
    """Nothing happened since the last time."""


class Number(StrEnum):
    """The whole numbers that the driver can be asked for, in the units of nvml.h."""

    POWER = "power"  # mW, as sampled by the driver
    POWER_LIMIT = "power limit"  # mW, enforced
    ENERGY = "energy"  # mJ since the driver was loaded
    TEMPERATURE = "temperature"  # degrees Celsius of the core
    THRESHOLD_SHUTDOWN = "shutdown threshold"  # degrees Celsius
    THRESHOLD_SLOWDOWN = "slowdown threshold"
    THRESHOLD_MEMORY_MAX = "memory threshold"
    THRESHOLD_GPU_MAX = "operating threshold"
    CLOCK_GRAPHICS = "graphics clock"  # MHz
    CLOCK_SM = "sm clock"
    CLOCK_MEMORY = "memory clock"
    CLOCK_VIDEO = "video clock"
    CLOCK_MAX_GRAPHICS = "highest graphics clock"
    CLOCK_MAX_SM = "highest sm clock"
    CLOCK_MAX_MEMORY = "highest memory clock"
    CLOCK_MAX_VIDEO = "highest video clock"
    CLOCK_REASONS = "clock event reasons"  # bits of nvmlClocksEventReason*
    CLOCK_REASONS_SUPPORTED = "supported clock event reasons"
    PERFORMANCE_STATE = "performance state"  # 0 is the fastest
    ENCODER = "encoder utilization"  # percent
    DECODER = "decoder utilization"
    PCIE_GENERATION = "pcie generation"
    PCIE_GENERATION_MAX = "highest pcie generation"
    PCIE_WIDTH = "pcie width"  # lanes
    PCIE_WIDTH_MAX = "highest pcie width"
    MIG_MODE = "mig mode"  # 1: the GPU is cut into instances
    ARCHITECTURE = "architecture"
    GPM_SUPPORT = "gpm support"  # 1: the GPU performance monitor works here
    PERSISTENCE = "persistence mode"  # 1: the driver keeps the GPU initialized while nobody uses it
    FANS = "fans"  # that the driver steers; a board that the chassis cools has none
    POWER_LIMIT_DEFAULT = "default power limit"  # mW, what the board has after a reset
    TEMPERATURE_MARGIN = "temperature margin"  # degrees Celsius to the nearest temperature that slows the GPU down
    C2C_ENABLED = "c2c mode"  # 1: the GPU is joined to its CPU by NVLink-C2C


class Identity(NamedTuple):
    """What does not change about a GPU; an empty text is what the driver did not say."""

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
    """The whole number in a field and how many bits its declared type has: where it wraps.

    A Struct, as some hundred are made a tick, and compared with those of the tick before.
    """

    value: int
    bits: int


class DriverProcess(NamedTuple):
    """A compute process; memory in bytes, None where the driver does not say (another container, no permission)."""

    pid: int
    memory: int | None


class ProcessShare(NamedTuple):
    """A process's share of the SMs in percent, in the sample period that ended at `stamp_us` of the driver's clock."""

    pid: int
    stamp_us: int
    sm_percent: int


class Fabric(NamedTuple):
    """The GPU's place in an NVLink fabric: nvml.h's state, return code of the join, health mask and summary.

    None is what the driver is too old to say; `cluster` is a UUID, empty where the GPU is in none.
    """

    state: int
    status: int
    cluster: str
    clique: int
    health_mask: int | None = None
    health_summary: int | None = None


class SramErrors(NamedTuple):
    """ECC errors of the SRAM since the driver was loaded and of the board's life, and whether they are too many.

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
    """Where the board sits: chassis, slot, tray, host in the tray and module, as the maker numbers them.

    None where there is no chassis to count in: the driver says 0, and 1 of the host, and nvidia-smi "N/A".
    """

    chassis_serial: str
    slot: int | None
    tray: int | None
    host: int | None
    module: int


class SpareRows(NamedTuple):
    """How many banks of memory have all, most, some, few or none of their spare rows left."""

    all: int
    most: int
    some: int
    few: int
    none: int


class RemoteLink(NamedTuple):
    """What is at the other end of an NVLink; empty texts for what the driver did not say."""

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
    """An Xid that the driver's event set reports; `gpu_index` is the GPU's as it was registered."""

    gpu_index: int
    xid: int


class Nvml(Protocol):
    """The driver.  Every method raises NvmlError or one of its kinds, and any call may hang."""

    def start(self) -> None:
        """Load and initialize; raises DriverMissingError where there is nothing to load."""
        ...

    def stop(self) -> None:
        """Undo one `start`; never raises."""
        ...

    def driver_version(self) -> str:
        """Return the driver's version."""
        ...

    def cuda_version(self) -> str:
        """Return the highest CUDA version that the driver serves."""
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

    def number(self, handle: Handle, which: Number) -> int:
        """Return one number, in one call."""
        ...

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Return the CUDA compute capability: major, minor."""
        ...

    def peer_status(self, handle: Handle, other: Handle) -> int:
        """Return nvml.h's status of reads from `other`'s memory without the host's: 0 is possible."""
        ...

    def utilization(self, handle: Handle) -> DriverUtilization:
        """Return the shares of time in which a kernel ran and memory was used."""
        ...

    def memory(self, handle: Handle) -> DriverMemory:
        """Return device memory, with what the driver reserves apart where it reports that."""
        ...

    def fan_percent(self, handle: Handle, fan: int) -> int:
        """Return the speed that the driver asks of a fan, in percent of the highest."""
        ...

    def fan_rpm(self, handle: Handle, fan: int) -> int:
        """Return the same in revolutions a minute."""
        ...

    def bar1(self, handle: Handle) -> DriverMemory:
        """Return the BAR1 window through which the host and other devices reach device memory."""
        ...

    def fields(self, handle: Handle, ids: Sequence[FieldId]) -> list[FieldValue | NvmlError]:
        """Return for each field its value or the error that the driver gave for that one, in one call."""
        ...

    def processes(self, handle: Handle) -> list[DriverProcess]:
        """Return the compute processes."""
        ...

    def process_shares(self, handle: Handle, since_us: int) -> list[ProcessShare]:
        """Return the shares sampled after `since_us`; raises NothingNewError when there are none."""
        ...

    def mps_processes(self, handle: Handle) -> list[DriverProcess]:
        """Return the compute processes that run through the Multi-Process Service."""
        ...

    def mig_modes(self, handle: Handle) -> tuple[int, int]:
        """Return the MIG mode now and after the next reset; 1: the GPU is cut into instances."""
        ...

    def power_limits(self, handle: Handle) -> tuple[int, int]:
        """Return the lowest and the highest power limit that may be set, in mW."""
        ...

    def sram_errors(self, handle: Handle) -> SramErrors:
        """Return the ECC errors of the SRAM."""
        ...

    def spare_rows(self, handle: Handle) -> SpareRows:
        """Return how many banks have which share of their spare rows left."""
        ...

    def platform(self, handle: Handle) -> Platform:
        """Return where the board sits."""
        ...

    def fabric(self, handle: Handle) -> Fabric:
        """Return the state of the NVLink fabric."""
        ...

    def link_active(self, handle: Handle, link: int) -> bool:
        """Return whether NVLink `link` is up; raises UnsupportedError past the last one."""
        ...

    def link_remote(self, handle: Handle, link: int) -> RemoteLink:
        """Return what is at the other end of the link, in three calls; raises UnsupportedError where it is unknown."""
        ...

    def instance_slots(self, handle: Handle) -> int:
        """Return how many MIG devices the GPU can have."""
        ...

    def instance_key(self, handle: Handle, slot: int) -> int | None:
        """Return a number that stands for the MIG device in that slot, None where there is none, in one call."""
        ...

    def instance(self, handle: Handle, slot: int) -> Instance:
        """Return the MIG device in that slot, in five calls."""
        ...

    def gpm_sample(self) -> GpmSample:
        """Allocate a buffer for a reading; `stop` frees what is left."""
        ...

    def gpm_free(self, sample: GpmSample) -> None:
        """Free a buffer; never raises."""
        ...

    def gpm_read(self, handle: Handle, into: GpmSample, gpu_instance: int | None = None) -> None:
        """Read the performance monitor of the GPU, or of one of its MIG instances, into `into`."""
        ...

    def gpm_metrics(self, before: GpmSample, after: GpmSample, ids: Sequence[int]) -> list[float | NvmlError]:
        """Return for each metric its mean between two readings or the error for that one, in one call."""
        ...

    def watch(self, handles: Sequence[tuple[int, Handle]]) -> list[NvmlError | None]:
        """Open an event set for the Xids of these GPUs (index, handle); the answer says which are in it."""
        ...

    def event(self) -> DriverEvent:
        """Return the next Xid without waiting; raises NothingNewError when there is none."""
        ...


Call = tuple[object, ...]

NUMBER_CALLS: dict[Number, tuple[Call, ...]] = {
    Number.POWER: (("nvmlDeviceGetPowerUsage",),),
    Number.POWER_LIMIT: (("nvmlDeviceGetEnforcedPowerLimit",),),
    Number.ENERGY: (("nvmlDeviceGetTotalEnergyConsumption",),),
    Number.TEMPERATURE: (("nvmlDeviceGetTemperature", 0), ("nvmlDeviceGetTemperatureV", 0)),
    Number.THRESHOLD_SHUTDOWN: (("nvmlDeviceGetTemperatureThreshold", 0),),
    Number.THRESHOLD_SLOWDOWN: (("nvmlDeviceGetTemperatureThreshold", 1),),
    Number.THRESHOLD_MEMORY_MAX: (("nvmlDeviceGetTemperatureThreshold", 2),),
    Number.THRESHOLD_GPU_MAX: (("nvmlDeviceGetTemperatureThreshold", 3),),
    Number.CLOCK_GRAPHICS: (("nvmlDeviceGetClockInfo", 0),),
    Number.CLOCK_SM: (("nvmlDeviceGetClockInfo", 1),),
    Number.CLOCK_MEMORY: (("nvmlDeviceGetClockInfo", 2),),
    Number.CLOCK_VIDEO: (("nvmlDeviceGetClockInfo", 3),),
    Number.CLOCK_MAX_GRAPHICS: (("nvmlDeviceGetMaxClockInfo", 0),),
    Number.CLOCK_MAX_SM: (("nvmlDeviceGetMaxClockInfo", 1),),
    Number.CLOCK_MAX_MEMORY: (("nvmlDeviceGetMaxClockInfo", 2),),
    Number.CLOCK_MAX_VIDEO: (("nvmlDeviceGetMaxClockInfo", 3),),
    Number.CLOCK_REASONS: (
        ("nvmlDeviceGetCurrentClocksEventReasons",),
        ("nvmlDeviceGetCurrentClocksThrottleReasons",),  # its name before driver 535
    ),
    Number.CLOCK_REASONS_SUPPORTED: (
        ("nvmlDeviceGetSupportedClocksEventReasons",),
        ("nvmlDeviceGetSupportedClocksThrottleReasons",),
    ),
    Number.PERFORMANCE_STATE: (("nvmlDeviceGetPerformanceState",), ("nvmlDeviceGetPowerState",)),
    Number.ENCODER: (("nvmlDeviceGetEncoderUtilization",),),
    Number.DECODER: (("nvmlDeviceGetDecoderUtilization",),),
    Number.PCIE_GENERATION: (("nvmlDeviceGetCurrPcieLinkGeneration",),),
    Number.PCIE_GENERATION_MAX: (("nvmlDeviceGetMaxPcieLinkGeneration",),),
    Number.PCIE_WIDTH: (("nvmlDeviceGetCurrPcieLinkWidth",),),
    Number.PCIE_WIDTH_MAX: (("nvmlDeviceGetMaxPcieLinkWidth",),),
    Number.MIG_MODE: (("nvmlDeviceGetMigMode",),),
    Number.ARCHITECTURE: (("nvmlDeviceGetArchitecture",),),
    Number.GPM_SUPPORT: (("nvmlGpmQueryDeviceSupport",),),
    Number.PERSISTENCE: (("nvmlDeviceGetPersistenceMode",),),
    Number.FANS: (("nvmlDeviceGetNumFans",),),
    Number.POWER_LIMIT_DEFAULT: (("nvmlDeviceGetPowerManagementDefaultLimit",),),
    Number.TEMPERATURE_MARGIN: (("nvmlDeviceGetMarginTemperature",),),
    Number.C2C_ENABLED: (("nvmlDeviceGetC2cModeInfoV",),),
}
"""Number -> the calls that answer it, the newest name first: where the driver lacks one, the next is tried."""
