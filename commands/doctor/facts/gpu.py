"""Reads the state of each NVIDIA GPU once, through the NVML interface that the daemon uses.

A GPU that hangs delays every call for it, by 45 s in one measurement.  So a separate thread makes all calls, and the
answers before the deadline count; the GPU that was being asked at that time is the one that hangs.

Left out: values that change from second to second, which the daemon's metrics have over time.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeVar

import msgspec

from pacecar.clock import NS_PER_SECOND
from pacecar.kernel_files.reader import integer
from pacecar.monitor.gpu.driver import (
    DriverMissingError,
    DriverStoppedError,
    Fabric,
    FieldId,
    FieldValue,
    GpuLostError,
    Handle,
    Number,
    Nvml,
    NvmlError,
    UnsupportedError,
)
from pacecar.monitor.gpu.known_gpus import KnownGpu, read_known
from pacecar.monitor.gpu.queries.queries import fabric_samples

from ..host_access import FactReader
from .model import GpuFacts, Gpus, Seen
from .pci import pci_key

__all__ = ["ANSWER_SECONDS", "read_gpus"]

ANSWER_SECONDS = 20.0
"""For all GPUs together: a call takes about 1 ms, or 2 s if the driver has to initialize the GPU first."""

LINKS_MAX = 36
"""NVML_NVLINK_MAX_LINKS of the newest header."""

GPUS_MAX = 64

PEERMEM = ("module/nvidia_peermem/initstate", "kernel/mm/memory_peers/nv_mem/version")
"""Files of the driver's module and of the older nv_peer_mem; NCCL checks the same (transport/net_ib.cc)."""

# Fields of nvml.h: link count, volatile uncorrected ECC errors, retired pages pending, row remap pending and failed,
# links of NVLink-C2C.
_WANTED = tuple(FieldId(number) for number in (91, 4, 31, 144, 145, 170))
_LINK_COUNT, _UNCORRECTED, _RETIRE_PENDING, _REMAP_PENDING, _REMAP_FAILED, _CHIP_LINK_COUNT = _WANTED

T = TypeVar("T")


def read_gpus(reader: FactReader, *, answer_seconds: float = ANSWER_SECONDS) -> Gpus:
    """Query the driver.  `absent` says why there is none; a GPU for which it does not answer is `lost`."""
    proc, system = reader.access.proc, reader.access.sys
    gpus = Gpus(
        kernel_module=reader.word(proc / "driver/nvidia/version"),
        peermem=next((seen for path in PEERMEM if (seen := reader.word(system / path)) is not None), None),
        known=_known(reader),
        uptime_ns=_uptime_ns(reader),
    )
    nvml = reader.access.nvml
    if nvml is None:
        return dataclasses.replace(gpus, absent="not asked")
    nvml_reader = _NvmlReader(nvml, reader)
    thread = threading.Thread(target=nvml_reader.run, name="pacecar-doctor-nvml", daemon=True)
    thread.start()
    thread.join(answer_seconds)
    return nvml_reader.result(gpus, hangs=thread.is_alive(), after_seconds=answer_seconds)


def _known(reader: FactReader) -> tuple[Seen[KnownGpu], ...]:
    """Return the GPUs that the daemon has seen on this node; only its user and root may read the list."""
    path = reader.access.known_gpus
    if path is None:
        return ()
    try:
        return tuple(
            Seen(msgspec.structs.replace(known, pci_bus_id=pci_key(known.pci_bus_id)), str(path))
            for known in read_known(path)
        )
    except FileNotFoundError:
        return ()
    except PermissionError:
        reader.limit(f"{path}: only the daemon's user and root may read which GPUs were here before")
    except (OSError, ValueError) as error:
        reader.note(f"{path}: {error}")
    return ()


def _uptime_ns(reader: FactReader) -> int | None:
    seen = reader.parsed(
        reader.access.proc / "uptime", lambda text: integer(text.partition(".")[0]) * NS_PER_SECOND
    )  # proc_uptime(5): seconds with two digits after the point, then the idle time
    return None if seen is None else seen.value


class _FabricFacts(NamedTuple):
    """State, status, conditions and health, named as in the metrics; empty for a GPU without a fabric."""

    fabric_state: str | None = None
    fabric_status: int | None = None
    fabric_conditions: tuple[tuple[str, bool], ...] = ()
    fabric_health: str | None = None
    fabric_problem: str | None = None


def _fabric_facts(fabric: Fabric | None) -> _FabricFacts:
    facts = _FabricFacts()
    for sample in () if fabric is None else fabric_samples("", fabric):
        if sample.metric == "pacecar_gpu_fabric_state" and sample.value:
            facts = facts._replace(fabric_state=sample.labels[1])
        elif sample.metric == "pacecar_gpu_fabric_status":
            facts = facts._replace(fabric_status=int(sample.value))
        elif sample.metric == "pacecar_gpu_fabric_condition":
            condition = (sample.labels[1], sample.value != 0)
            facts = facts._replace(fabric_conditions=(*facts.fabric_conditions, condition))
        elif sample.metric == "pacecar_gpu_fabric_health" and sample.value:
            facts = facts._replace(fabric_health=sample.labels[1])
        elif sample.metric == "pacecar_gpu_fabric_info":
            facts = facts._replace(fabric_problem=sample.labels[-1])
    return facts


class _NvmlReader:
    """Makes all calls of the driver, in one thread; another thread may take the results so far at any time."""

    def __init__(self, nvml: Nvml, reader: FactReader) -> None:
        self._nvml = nvml
        self._reader = reader
        self._boards: dict[int, GpuFacts] = {}
        self._peers: dict[tuple[int, int], int] = {}
        self._versions: tuple[str | None, str | None] = (None, None)
        self._absent: str | None = None
        self._asking: int | None = None
        self._is_started = False

    def run(self) -> None:
        try:
            self._nvml.start()
        except DriverMissingError as error:
            self._absent = str(error)
            return
        except NvmlError as error:
            self._absent = str(error)
            self._reader.note(f"NVML: {error}")
            return
        self._is_started = True
        try:
            self._ask_all()
        except NvmlError as error:
            self._reader.note(f"NVML: {error}")
        except Exception as error:  # noqa: BLE001  in a thread it would be lost, and the results so far still count
            self._reader.note(f"NVML: {type(error).__name__}: {error} (a bug in pacecar; please report it)")
        finally:
            self._nvml.stop()

    def _ask_all(self) -> None:
        nvml = self._nvml
        self._versions = (self._query("driver version", nvml.driver_version), self._query("CUDA", nvml.cuda_version))
        handles: dict[int, Handle] = {}
        for index in range(min(nvml.device_count(), GPUS_MAX)):
            self._asking = index
            try:
                handles[index] = handle = nvml.device(index)
                self._boards[index] = self._state(index, handle)
            except GpuLostError as error:
                handles.pop(index, None)
                self._boards[index] = GpuFacts(index, lost=str(error))
            except DriverStoppedError:
                raise
            except NvmlError as error:
                handles.pop(index, None)
                self._reader.note(f"NVML: GPU {index}: {error}")
        self._asking = None
        for index, handle in handles.items():
            for other, owner in handles.items():
                if other == index:
                    continue
                status = self._query(f"GPU {index}: P2P", partial(nvml.peer_status, handle, owner))
                if status is not None:
                    self._peers[index, other] = status

    def _query(self, what: str, ask: Callable[[], T]) -> T | None:
        """Return the answer; None if the driver does not support the call, or with a note if it fails."""
        try:
            return ask()
        except (UnsupportedError, GpuLostError) as error:
            if isinstance(error, GpuLostError):
                raise
            return None
        except NvmlError as error:
            self._reader.note(f"NVML: {what}: {error}")
            return None

    def _state(self, index: int, handle: Handle) -> GpuFacts:
        nvml = self._nvml

        def number(which: Number) -> int | None:
            return self._query(f"GPU {index}: {which}", lambda: nvml.number(handle, which))

        identity = nvml.identity(handle)
        memory = self._query(f"GPU {index}: memory", lambda: nvml.memory(handle))
        fabric = self._query(f"GPU {index}: fabric", lambda: nvml.fabric(handle))
        fields = self._fields(index, handle)
        up, down, has_switch = self._links(index, handle, fields.get(_LINK_COUNT))
        persistence, mig = number(Number.PERSISTENCE), number(Number.MIG_MODE)
        sram = self._query(f"GPU {index}: SRAM errors", lambda: nvml.sram_errors(handle))
        return GpuFacts(
            index=index,
            uuid=identity.uuid,
            name=identity.name,
            address=pci_key(identity.pci_bus_id),
            capability=self._query(f"GPU {index}: capability", lambda: nvml.compute_capability(handle)),
            memory_bytes=None if memory is None else memory.total,
            is_persistent=None if persistence is None else persistence == 1,
            power_limit=number(Number.POWER_LIMIT),
            power_limit_default=number(Number.POWER_LIMIT_DEFAULT),
            clock_reasons=number(Number.CLOCK_REASONS),
            clock_sm=number(Number.CLOCK_SM),
            clock_sm_max=number(Number.CLOCK_MAX_SM),
            performance_state=number(Number.PERFORMANCE_STATE),
            pcie_generation=number(Number.PCIE_GENERATION),
            pcie_generation_max=number(Number.PCIE_GENERATION_MAX),
            pcie_width=number(Number.PCIE_WIDTH),
            pcie_width_max=number(Number.PCIE_WIDTH_MAX),
            has_mig=None if mig is None else mig == 1,
            links_up=up,
            links_down=down,
            has_switch=has_switch,
            chip_links=fields.get(_CHIP_LINK_COUNT),
            sram_over_threshold=None if sram is None else sram.is_over_threshold,
            **_fabric_facts(fabric)._asdict(),
            uncorrected_errors=fields.get(_UNCORRECTED),
            remap_pending=fields.get(_REMAP_PENDING),
            remap_failed=fields.get(_REMAP_FAILED),
            retire_pending=fields.get(_RETIRE_PENDING),
            pids=tuple(self._pids(index, handle, is_cut=mig == 1)),
        )

    def _pids(self, index: int, handle: Handle, *, is_cut: bool) -> Iterator[int]:
        """Yield the compute processes on the GPU; in MIG mode, of its instances, as the GPU's list needs privileges."""
        handles = self._instances(index, handle) if is_cut else (handle,)
        for one in handles:
            processes = self._query(f"GPU {index}: processes", partial(self._nvml.processes, one))
            yield from () if processes is None else (process.pid for process in processes)

    def _instances(self, index: int, handle: Handle) -> Iterator[Handle]:
        slots = self._query(f"GPU {index}: MIG slots", lambda: self._nvml.instance_slots(handle))
        for slot in range(slots or 0):
            asked = f"GPU {index}: MIG slot {slot}"
            if self._query(asked, partial(self._nvml.instance_key, handle, slot)) is not None:
                instance = self._query(asked, partial(self._nvml.instance, handle, slot))
                if instance is not None:
                    yield instance.handle

    def _fields(self, index: int, handle: Handle) -> dict[FieldId, int]:
        answers = self._query(f"GPU {index}: fields", lambda: self._nvml.fields(handle, _WANTED)) or []
        return {
            field: answer.value
            for field, answer in zip(_WANTED, answers, strict=False)
            if isinstance(answer, FieldValue)
        }

    def _links(self, index: int, handle: Handle, count: int | None) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
        """Return the NVLinks that are up, those that are down, and whether they lead to a switch."""
        up: list[int] = []
        down: list[int] = []
        has_switch = False
        for link in range(min(LINKS_MAX if count is None else count, LINKS_MAX)):
            try:
                is_up = self._nvml.link_active(handle, link)
            except UnsupportedError:
                break
            (up if is_up else down).append(link)
            if is_up and not has_switch:
                remote = self._query(f"GPU {index}: NVLink {link}", partial(self._nvml.link_remote, handle, link))
                has_switch = remote is not None and remote.device == "switch"
        return tuple(up), tuple(down), has_switch

    def result(self, gpus: Gpus, *, hangs: bool, after_seconds: float) -> Gpus:
        boards = dict(self._boards)
        if hangs and self._asking is not None:
            boards[self._asking] = GpuFacts(self._asking, lost=f"no answer from the driver for {after_seconds:g} s")
        if hangs:
            self._reader.note(f"NVML: no answer within {after_seconds:g} s; answers until then are used")
        driver, cuda = self._versions
        return dataclasses.replace(
            gpus,
            boards=tuple(boards[index] for index in sorted(boards)),
            driver=driver,
            cuda=cuda,
            absent=f"no answer within {after_seconds:g} s" if hangs and not self._is_started else self._absent,
            peers=dict(self._peers),
        )
