"""Defines the facts of a machine: values and their sources, without conclusions.

None means "absent" or "unknown", an empty tuple "none", zero a zero.  Sizes are bytes, times nanoseconds, power
milliwatts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pacecar.monitor.gpu.known_gpus import KnownGpu
from pacecar.nccl_inspector import InspectorFigures
from pacecar.nccl_ras import RasFinding

from .evidence import FindingEvidence
from .job import Log, Run, Script

__all__ = [
    "ACCELERATOR",
    "AMD",
    "DISPLAY",
    "NETWORK",
    "NVIDIA",
    "AccountedTime",
    "Cpus",
    "GpuFacts",
    "Gpus",
    "Interface",
    "Network",
    "NodeFacts",
    "PciDevice",
    "ProcessFacts",
    "ProcessLimits",
    "RdmaPort",
    "Seen",
    "SettingFacts",
]  # fmt: skip

T = TypeVar("T")

NVIDIA, AMD = 0x10DE, 0x1002
DISPLAY, NETWORK, ACCELERATOR = 0x03, 0x02, 0x12
"""Base classes (pci_ids.h): a data-centre GPU is a 3D controller, 0x0302; InfiniBand is a network, 0x0207."""


@dataclass(frozen=True, slots=True)
class Seen(Generic[T]):
    """A value and its source: a path, a path with a line, a call of the driver."""

    value: T
    where: str

    def as_evidence(self, what: str, text: str | None = None) -> FindingEvidence:
        """Return it as evidence; `text` replaces the bare value."""
        return FindingEvidence(what, str(self.value) if text is None else text, self.where)


@dataclass(frozen=True, slots=True)
class AccountedTime:
    """How often a CPU limit throttled a control group: periods with throttling, and all periods."""

    throttled: int
    periods: int


@dataclass(frozen=True, slots=True)
class HostPressureFacts:
    """Shares of the last minute (0..1) in which tasks waited, according to the kernel (PSI).

    `cpu`: some task for a processor; `memory`: all tasks for memory; `io`: all tasks for a disk.
    """

    cpu: Seen[float] | None = None
    memory: Seen[float] | None = None
    io: Seen[float] | None = None


@dataclass(frozen=True, slots=True)
class Cpus:
    """Processors and memory.  `governors` is governor -> its CPUs, `nodes` is NUMA node -> its CPUs.

    `quota` is the control group's limit in CPUs, None without one; `load` is the mean number of tasks that ran, wanted
    to run or waited for a disk, over five minutes.
    """

    model: Seen[str] | None = None
    sockets: int | None = None
    count: int | None = None
    nodes: Mapping[int, frozenset[int]] = field(default_factory=dict)
    governors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    governor_where: str = ""
    scaling_driver: Seen[str] | None = None
    boost: Seen[int] | None = None
    no_turbo: Seen[int] | None = None
    numa_balancing: Seen[int] | None = None
    memory_bytes: Seen[int] | None = None
    kernel: Seen[str] | None = None
    is_virtual: bool | None = None
    throttling: Seen[AccountedTime] | None = None
    quota: int | None = None
    load: Seen[float] | None = None
    pressure: HostPressureFacts = field(default_factory=HostPressureFacts)

    @property
    def usable(self) -> int | None:
        """How many processors a job has here: the online ones, or fewer if its control group has a lower limit."""
        return min((number for number in (self.count, self.quota) if number is not None), default=None)


@dataclass(frozen=True, slots=True)
class PciDevice:
    """A function on the PCI bus.  `path` leads from the host bridge to it; `speed` is in GT/s.

    The maxima are the lower of the device's and of the port above it, because a card cannot be faster than its slot.
    `redirects` says whether ACS sends traffic between devices up to the host; None if the port has no ACS or its
    registers may not be read.
    """

    address: str
    vendor: int
    kind: int
    where: str
    driver: str | None = None
    path: tuple[str, ...] = ()
    node: int | None = None
    local_cpus: frozenset[int] | None = None
    speed: float | None = None
    speed_max: float | None = None
    width: int | None = None
    width_max: int | None = None
    iommu_domain: Seen[str] | None = None
    redirects: Seen[bool] | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is a display controller, as all GPUs are, of a vendor of training GPUs."""
        return self.kind >> 16 == DISPLAY and self.vendor in (NVIDIA, AMD)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One GPU according to NVML; `lost` has the driver's words if it does not answer.

    States and conditions of the fabric are named as in the metrics.  `chip_links` are NVLink-C2C links to the processor
    beside it (Grace).
    """

    index: int
    uuid: str = ""
    name: str = ""
    address: str = ""
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    is_persistent: bool | None = None
    power_limit: int | None = None
    power_limit_default: int | None = None
    clock_reasons: int | None = None
    clock_sm: int | None = None
    clock_sm_max: int | None = None
    performance_state: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    has_mig: bool | None = None
    links_up: tuple[int, ...] = ()
    links_down: tuple[int, ...] = ()
    chip_links: int | None = None
    has_switch: bool = False
    fabric_state: str | None = None
    fabric_status: int | None = None
    fabric_conditions: tuple[tuple[str, bool], ...] = ()
    fabric_health: str | None = None
    fabric_problem: str | None = None
    sram_over_threshold: bool | None = None
    uncorrected_errors: int | None = None
    remap_pending: int | None = None
    remap_failed: int | None = None
    retire_pending: int | None = None
    pids: tuple[int, ...] = ()
    lost: str | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    """All GPUs according to NVML; `absent` says why there is no driver.  `peers` is (reader, owner) -> P2P status.

    `known` are the GPUs that the daemon has seen on this node, with addresses as in `NodeFacts.pci`; `uptime_ns` is the
    time since boot.
    """

    boards: tuple[GpuFacts, ...] = ()
    driver: str | None = None
    cuda: str | None = None
    absent: str | None = None
    known: tuple[Seen[KnownGpu], ...] = ()
    uptime_ns: int | None = None
    peers: Mapping[tuple[int, int], int] = field(default_factory=dict)
    kernel_module: Seen[str] | None = None
    peermem: Seen[str] | None = None

    @property
    def working(self) -> tuple[GpuFacts, ...]:
        """The GPUs that answered."""
        return tuple(gpu for gpu in self.boards if gpu.lost is None)


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface; `speed` in bits per second, None if the device does not report it.

    `master` is the bond or bridge that it belongs to, which then has the address.
    """

    name: str
    where: str
    is_physical: bool
    state: str | None = None
    speed: int | None = None
    duplex: str | None = None
    mtu: int | None = None
    address: str | None = None
    master: str | None = None
    is_bond: bool = False


@dataclass(frozen=True, slots=True)
class RdmaPort:
    """A port of an RDMA device; `rate` in bytes per second."""

    device: str
    port: str
    where: str
    state: str | None = None
    rate: int | None = None
    link_layer: str | None = None
    address: str | None = None

    @property
    def is_active(self) -> bool:
        """Whether traffic can flow."""
        return self.state == "ACTIVE"


@dataclass(frozen=True, slots=True)
class Network:
    """Interfaces, RDMA ports and the settings of the kernel's TCP (sysctl name -> text)."""

    interfaces: tuple[Interface, ...] = ()
    ports: tuple[RdmaPort, ...] = ()
    sysctls: Mapping[str, Seen[str]] = field(default_factory=dict)
    segments_sent: Seen[int] | None = None
    segments_again: Seen[int] | None = None

    @property
    def active_ports(self) -> tuple[RdmaPort, ...]:
        """RDMA ports that are up."""
        return tuple(port for port in self.ports if port.is_active)


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """The limits of a process; a `Seen` limit of None is unlimited.

    `may_lock_all`: it has the capability to lock memory beyond its limit; None if unknown.
    """

    files: Seen[int | None] | None = None
    locked_bytes: Seen[int | None] | None = None
    may_lock_all: bool | None = None
    shared_memory_bytes: Seen[int] | None = None
    shared_memory_missing: Seen[str] | None = None


@dataclass(frozen=True, slots=True)
class ProcessFacts:
    """The given training process (--pid)."""

    pid: int
    cpus: Seen[frozenset[int]] | None = None


@dataclass(frozen=True, slots=True)
class SettingFacts:
    """Variables that affect training, from the process's environment and NCCL's configuration files."""

    values: Mapping[str, Seen[str]] = field(default_factory=dict)

    def get(self, name: str) -> Seen[str] | None:
        """Return the variable; an empty one counts as unset, as for NCCL and torch."""
        found = self.values.get(name)
        return None if found is None or not found.value.strip() else found

    def is_on(self, name: str) -> Seen[str] | None:
        """Return the variable if it is set to yes."""
        found = self.get(name)
        return found if found is not None and _says_yes(name, found.value) else None

    def is_off(self, name: str) -> Seen[str] | None:
        """Return the variable if it is set to no."""
        found = self.get(name)
        return found if found is not None and not _says_yes(name, found.value) else None


def _says_yes(name: str, value: str) -> bool:
    """Return how the reader of the variable interprets it: NCCL parses the number at its beginning, so `yes` is 0."""
    if name.startswith("NCCL_"):
        number = re.match(r"\s*[-+]?(0[xX][0-9a-fA-F]+|\d+)", value)
        return number is not None and int(number[1], 16 if "x" in number[1].lower() else 10) != 0
    return value.strip().lower() not in ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Everything that was read; `run`, `log`, `script` and `process` are None if not given.

    `ras` is what NCCL's RAS says is wrong with the job on this machine, None if no RAS answers; `inspector` is what
    NCCL's Inspector wrote, None if no folder of its is known.
    """

    host: str = ""
    cpus: Cpus = field(default_factory=Cpus)
    pci: tuple[PciDevice, ...] = ()
    gpus: Gpus = field(default_factory=Gpus)
    network: Network = field(default_factory=Network)
    limits: ProcessLimits = field(default_factory=ProcessLimits)
    settings: SettingFacts = field(default_factory=SettingFacts)
    torch_version: str | None = None
    round_trip_ns: int | None = None
    process: ProcessFacts | None = None
    ras: tuple[RasFinding, ...] | None = None
    inspector: InspectorFigures | None = None
    log: Log | None = None
    script: Script | None = None
    run: Run | None = None
    unreadable: tuple[str, ...] = ()
    limited: tuple[str, ...] = ()

    def device_at(self, address: str | None) -> PciDevice | None:
        """Return the PCI device at `address`."""
        return next((device for device in self.pci if device.address == address), None) if address else None
