"""Asks the NVIDIA driver through pynvml.  Only this file knows pynvml; the others see `gpu.driver.Nvml`.

pynvml raises one exception class per error code, returns ctypes structures and grows with every driver.  So each
function is looked up by name when it is called: one that this pynvml or this driver lacks raises UnsupportedError, and
an old driver loses only its newer numbers.

The GPM array has grown (98, 210, 333, 477 entries) without a new version number, so a driver may write more than the
binding allocated.  The structure here has room for the largest.

Left out: nvmlDeviceGetPcieThroughput, which blocks for 20 ms a direction (the cumulative fields 197 and 198 cost a
hundredth of that and lose nothing between ticks), and everything that sets something.
"""

from __future__ import annotations

import ctypes
import struct
import sys
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from .driver import (
    DriverEvent,
    DriverMemory,
    DriverMissingError,
    DriverProcess,
    DriverStoppedError,
    DriverUtilization,
    Fabric,
    FieldId,
    FieldValue,
    GpmSample,
    GpuLostError,
    Handle,
    Identity,
    Instance,
    NothingNewError,
    Number,
    NvmlError,
    Platform,
    ProcessShare,
    RemoteLink,
    SpareRows,
    SramErrors,
    UnsupportedError,
)

__all__ = ["GPM_ENTRIES_MAX", "PyNvml"]

GPM_ENTRIES_MAX = 477
"""NVML_GPM_METRIC_MAX of the newest known driver; earlier drivers had 98, 210 and 333, all with version 1."""

REQUESTS_MAX = 64
"""Encoded field lists that are cached: each GPU asks for the same few, slice by slice."""

LISTED_MAX = 4096
"""Processes in a list; a longer list is garbage."""

SPARE_PROCESSES = 16
"""Room for processes that start between the call for their number and the call for the list."""

MIG_DEVICES_MAX = 8
"""A GPU has at most seven instances today."""

_GPM_VERSION = 1
_XID = 0x8  # nvmlEventTypeXidCriticalError
_MEMORY_V2 = 0x02000028  # nvmlMemory_v2: the structure's size and version

_NVLINK_VERSIONS = {
    1: "1.0",
    2: "2.0",
    3: "2.2",
    4: "3.0",
    5: "3.1",
    6: "4.0",
    7: "5.0",
    8: "6.0",
}  # NVML_NVLINK_VERSION_*
_LINK_DEVICES = {0: "gpu", 1: "npu", 2: "switch"}  # NVML_NVLINK_DEVICE_TYPE_*


class _GpmMetrics(ctypes.Structure):
    """nvmlGpmMetricsGet_t with room for the largest array."""

    _fields_ = [
        ("version", ctypes.c_uint),
        ("numMetrics", ctypes.c_uint),
        ("sample1", ctypes.c_void_p),
        ("sample2", ctypes.c_void_p),
        ("metrics", pynvml.c_nvmlGpmMetric_t * max(GPM_ENTRIES_MAX, pynvml.NVML_GPM_METRIC_MAX)),
    ]  # fmt: skip


class PyNvml:
    """The real driver through pynvml."""

    def __init__(self) -> None:
        self._events: object | None = None
        self._watched: dict[int | None, int] = {}
        self._samples: list[object] = []
        self._first_version: set[int | None] = set()  # addresses of GPUs that know only version 1 of the memory call
        self._requests: dict[tuple[FieldId, ...], bytes] = {}

    def start(self) -> None:
        """Load libnvidia-ml.so.1 and initialize it."""
        _ask("nvmlInit")

    def stop(self) -> None:
        """Free what was allocated and shut the library down; it is no error if it is down already."""
        samples, self._samples = self._samples, []
        self._first_version.clear()
        events, self._events = self._events, None
        for name, things in (("nvmlGpmSampleFree", samples), ("nvmlEventSetFree", [] if events is None else [events])):
            for thing in things:
                _ask_gently(name, thing)
        _ask_gently("nvmlShutdown")

    def driver_version(self) -> str:
        """Ask nvmlSystemGetDriverVersion."""
        return _text(_ask("nvmlSystemGetDriverVersion"))

    def cuda_version(self) -> str:
        """Ask nvmlSystemGetCudaDriverVersion_v2: 1000 times the major version plus 10 times the minor."""
        version = int(_ask("nvmlSystemGetCudaDriverVersion_v2"))
        return f"{version // 1000}.{version % 1000 // 10}"

    def device_count(self) -> int:
        """Ask nvmlDeviceGetCount."""
        return int(_ask("nvmlDeviceGetCount"))

    def device(self, index: int) -> Handle:
        """Ask nvmlDeviceGetHandleByIndex."""
        return Handle(_ask("nvmlDeviceGetHandleByIndex", index))

    def identity(self, handle: Handle) -> Identity:
        """Ask for UUID, name, PCI address and, if available, the VBIOS version."""
        return Identity(
            uuid=_text(_ask("nvmlDeviceGetUUID", handle)),
            name=_text(_ask("nvmlDeviceGetName", handle)),
            pci_bus_id=_bus_id(_ask("nvmlDeviceGetPciInfo", handle)),
            vbios=_ask_gently("nvmlDeviceGetVbiosVersion", handle),
        )

    def number(self, handle: Handle, which: Number) -> int:
        """Ask the newest call of `which` that the driver has."""
        *newer, oldest = which.calls
        for name, *arguments in newer:
            try:
                return _number(_ask(str(name), handle, *arguments))
            except UnsupportedError as error:
                if error.code != pynvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    raise
        return _number(_ask(str(oldest[0]), handle, *oldest[1:]))

    def compute_capability(self, handle: Handle) -> tuple[int, int]:
        """Ask nvmlDeviceGetCudaComputeCapability."""
        major, minor = _ask("nvmlDeviceGetCudaComputeCapability", handle)
        return int(major), int(minor)

    def peer_status(self, handle: Handle, other: Handle) -> int:
        """Ask nvmlDeviceGetP2PStatus for reads: index 0, as pynvml's constant is a tuple because of a stray comma."""
        return int(_ask("nvmlDeviceGetP2PStatus", handle, other, 0))

    def utilization(self, handle: Handle) -> DriverUtilization:
        """Ask nvmlDeviceGetUtilizationRates."""
        rates = _ask("nvmlDeviceGetUtilizationRates", handle)
        return DriverUtilization(int(rates.gpu), int(rates.memory))

    def memory(self, handle: Handle) -> DriverMemory:
        """Ask nvmlDeviceGetMemoryInfo_v2, or version 1, which counts reserved memory as used."""
        if _address(handle) not in self._first_version:
            try:
                info = _ask("nvmlDeviceGetMemoryInfo", handle, _MEMORY_V2)
                return DriverMemory(int(info.total), int(info.used), int(info.free), int(info.reserved))
            except NvmlError as error:
                if error.code not in _OLDER_DRIVER:
                    raise
                self._first_version.add(_address(handle))
        info = _ask("nvmlDeviceGetMemoryInfo", handle)
        return DriverMemory(int(info.total), int(info.used), int(info.free))

    def fan_percent(self, handle: Handle, fan: int) -> int:
        """Ask nvmlDeviceGetFanSpeed_v2."""
        return int(_ask("nvmlDeviceGetFanSpeed_v2", handle, fan))

    def fan_rpm(self, handle: Handle, fan: int) -> int:
        """Ask nvmlDeviceGetFanSpeedRPM directly; pynvml's own function asks only for the first fan."""
        if not hasattr(pynvml, "c_nvmlFanSpeedInfo_t"):
            raise UnsupportedError("this pynvml has no nvmlDeviceGetFanSpeedRPM", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        info = pynvml.c_nvmlFanSpeedInfo_t(version=pynvml.nvmlFanSpeedInfo_v1, fan=fan)
        _call("nvmlDeviceGetFanSpeedRPM", handle, ctypes.byref(info))
        return int(info.speed)

    def bar1(self, handle: Handle) -> DriverMemory:
        """Ask nvmlDeviceGetBAR1MemoryInfo."""
        info = _ask("nvmlDeviceGetBAR1MemoryInfo", handle)
        return DriverMemory(int(info.bar1Total), int(info.bar1Used), int(info.bar1Free))

    def fields(self, handle: Handle, ids: Sequence[FieldId]) -> list[FieldValue | NvmlError]:
        """Ask nvmlDeviceGetFieldValues once for all; each value has its own return code."""
        request = self._requests.get(asked := tuple(ids))
        if request is None:
            if len(self._requests) >= REQUESTS_MAX:
                self._requests.clear()
            request = b"".join(_FIELD_VALUE.pack(field.number, field.scope, 0, 0, 0, 0, 0) for field in asked)
            self._requests[asked] = request
        values = (pynvml.c_nvmlFieldValue_t * len(asked)).from_buffer_copy(request)
        _call("nvmlDeviceGetFieldValues", handle, ctypes.c_int(len(asked)), ctypes.byref(values))
        return [
            FieldValue(union, 64)
            if kind == _UNSIGNED_64 and code == _SUCCESS
            else FieldValue(union & 0xFFFFFFFF, 32)
            if kind == _UNSIGNED_32_LOW and code == _SUCCESS
            else _field(number, kind, code, union.to_bytes(8, sys.byteorder))
            for number, _, _, _, kind, code, union in _FIELD_VALUE.iter_unpack(memoryview(values).cast("B"))
        ]

    def processes(self, handle: Handle) -> list[DriverProcess]:
        """Ask nvmlDeviceGetComputeRunningProcesses in two calls: how many, and which."""
        return _processes("nvmlDeviceGetComputeRunningProcesses_v3", handle)

    def process_shares(self, handle: Handle, since_us: int) -> list[ProcessShare]:
        """Ask nvmlDeviceGetProcessUtilization, also in two calls; NOT_FOUND means no sample since."""
        name, since = "nvmlDeviceGetProcessUtilization", ctypes.c_ulonglong(since_us)
        row = pynvml.c_nvmlProcessUtilizationSample_t
        try:
            found = _listed(name, row, 0, lambda count, rows: _call(name, handle, rows, ctypes.byref(count), since))
        except NvmlError as error:
            if error.code == pynvml.NVML_ERROR_NOT_FOUND:
                raise NothingNewError(str(error), error.code) from error
            raise
        if not found:
            raise NothingNewError("no sample since")
        return [ProcessShare(int(p.pid), int(p.timeStamp), int(p.smUtil)) for p in found]

    def mps_processes(self, handle: Handle) -> list[DriverProcess]:
        """Ask nvmlDeviceGetMPSComputeRunningProcesses, also in two calls."""
        return _processes("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle)

    def mig_modes(self, handle: Handle) -> tuple[int, int]:
        """Ask nvmlDeviceGetMigMode."""
        now, pending = _ask("nvmlDeviceGetMigMode", handle)
        return int(now), int(pending)

    def power_limits(self, handle: Handle) -> tuple[int, int]:
        """Ask nvmlDeviceGetPowerManagementLimitConstraints."""
        lowest, highest = _ask("nvmlDeviceGetPowerManagementLimitConstraints", handle)
        return int(lowest), int(highest)

    def sram_errors(self, handle: Handle) -> SramErrors:
        """Ask nvmlDeviceGetSramEccErrorStatus, which came with driver 535; the counts by unit are left out."""
        read = _read("nvmlDeviceGetSramEccErrorStatus", handle, _SRAM_ERRORS, version=1)
        aggregate_parity, aggregate_sec_ded, aggregate, volatile_parity, volatile_sec_ded, volatile, *_, is_over = read
        return SramErrors(
            volatile, volatile_parity, volatile_sec_ded, aggregate, aggregate_parity, aggregate_sec_ded, is_over != 0
        )

    def spare_rows(self, handle: Handle) -> SpareRows:
        """Ask nvmlDeviceGetRowRemapperHistogram."""
        banks = _ask("nvmlDeviceGetRowRemapperHistogram", handle)
        return SpareRows(int(banks.max), int(banks.high), int(banks.partial), int(banks.low), int(banks.none))

    def platform(self, handle: Handle) -> Platform:
        """Ask nvmlDeviceGetPlatformInfo; its two versions differ in names only."""
        try:
            reported = _read("nvmlDeviceGetPlatformInfo", handle, _PLATFORM, version=2)
        except NvmlError as error:
            if error.code not in _OLDER_DRIVER:
                raise
            reported = _read("nvmlDeviceGetPlatformInfo", handle, _PLATFORM, version=1)
        _, chassis, slot, tray, host, _, module = reported
        serial = _text(chassis.partition(b"\0")[0])
        return Platform(serial, slot, tray, host, module) if serial else Platform("", None, None, None, module)

    def fabric(self, handle: Handle) -> Fabric:
        """Ask nvmlDeviceGetGpuFabricInfoV, whose health mask came with driver 545, or its predecessor.

        Each call tries the newest structure first: a driver may refuse it just once, and calls are rare.
        """
        for version, layout in _FABRIC_VERSIONS:
            try:
                cluster, status, clique, state, *health = _read("nvmlDeviceGetGpuFabricInfoV", handle, layout, version)
            except NvmlError as error:
                if error.code not in _OLDER_DRIVER:
                    raise
                continue
            return Fabric(state, status, _uuid(cluster), clique, *health)
        info = pynvml.c_nvmlGpuFabricInfo_t()
        _ask("nvmlDeviceGetGpuFabricInfo", handle, ctypes.byref(info))
        return Fabric(int(info.state), int(info.status), _uuid(bytes(info.clusterUuid)), int(info.cliqueId))

    def link_active(self, handle: Handle, link: int) -> bool:
        """Ask nvmlDeviceGetNvLinkState."""
        return bool(_ask("nvmlDeviceGetNvLinkState", handle, link))

    def link_remote(self, handle: Handle, link: int) -> RemoteLink:
        """Ask for version, kind and address of the remote end; what is not reported stays empty."""
        version = _ask_gently("nvmlDeviceGetNvLinkVersion", handle, link)
        kind = _LINK_DEVICES.get(_ask_gently("nvmlDeviceGetNvLinkRemoteDeviceType", handle, link), "")
        try:
            address = _bus_id(_ask("nvmlDeviceGetNvLinkRemotePciInfo", handle, link))
        except UnsupportedError:
            if not kind:  # the version alone is that of this end
                raise
            address = ""
        return RemoteLink(_NVLINK_VERSIONS.get(version, ""), kind, address)

    def instance_slots(self, handle: Handle) -> int:
        """Ask nvmlDeviceGetMaxMigDeviceCount."""
        return min(_number(_ask("nvmlDeviceGetMaxMigDeviceCount", handle)), MIG_DEVICES_MAX)

    def instance_key(self, handle: Handle, slot: int) -> int | None:
        """Ask nvmlDeviceGetMigDeviceHandleByIndex for a handle, which stays the same while the instance lives."""
        try:
            return _address(_ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot))
        except NvmlError as error:
            if error.code in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT):
                return None
            raise

    def instance(self, handle: Handle, slot: int) -> Instance:
        """Ask for the MIG device's handle, numbers, UUID and name: five calls."""
        device = _ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, slot)
        return Instance(
            Handle(device),
            _number(_ask("nvmlDeviceGetGpuInstanceId", device)),
            _number(_ask("nvmlDeviceGetComputeInstanceId", device)),
            _text(_ask("nvmlDeviceGetUUID", device)),
            _text(_ask("nvmlDeviceGetName", device)),
        )

    def gpm_sample(self) -> GpmSample:
        """Ask nvmlGpmSampleAlloc."""
        sample = _ask("nvmlGpmSampleAlloc")
        self._samples.append(sample)
        return GpmSample(sample)

    def gpm_free(self, sample: GpmSample) -> None:
        """Ask nvmlGpmSampleFree."""
        if sample in self._samples:
            self._samples.remove(sample)
            _ask_gently("nvmlGpmSampleFree", sample)

    def gpm_read(self, handle: Handle, into: GpmSample, gpu_instance: int | None = None) -> None:
        """Ask nvmlGpmSampleGet, or nvmlGpmMigSampleGet for a MIG instance of the GPU."""
        if gpu_instance is None:
            _ask("nvmlGpmSampleGet", handle, into)
        else:
            _ask("nvmlGpmMigSampleGet", handle, gpu_instance, into)

    def gpm_metrics(self, before: GpmSample, after: GpmSample, ids: Sequence[int]) -> list[float | NvmlError]:
        """Ask nvmlGpmMetricsGet once for all; each metric has its own return code."""
        query = _GpmMetrics(
            version=_GPM_VERSION, numMetrics=len(ids), sample1=_address(before), sample2=_address(after)
        )
        rows = memoryview(query).cast("B")[_GpmMetrics.metrics.offset :]
        for slot, number in enumerate(ids):
            _GPM_METRIC.pack_into(rows, slot * _GPM_METRIC.size, number, 0, 0.0)
        _ask("nvmlGpmMetricsGet", query)
        answers = (_GPM_METRIC.unpack_from(rows, slot * _GPM_METRIC.size) for slot in range(len(ids)))
        return [
            value if code == pynvml.NVML_SUCCESS else _named(code, str(pynvml.NVMLError(code)))
            for _, code, value in answers
        ]

    def watch(self, handles: Sequence[tuple[int, Handle]]) -> list[NvmlError | None]:
        """Ask nvmlEventSetCreate once and nvmlDeviceRegisterEvents for each GPU."""
        self._events = _ask("nvmlEventSetCreate")
        self._watched = {_address(handle): index for index, handle in handles}
        answers: list[NvmlError | None] = []
        for _, handle in handles:
            try:
                _ask("nvmlDeviceRegisterEvents", handle, _XID, self._events)
                answers.append(None)
            except NvmlError as error:
                answers.append(error)
        return answers

    def event(self) -> DriverEvent:
        """Ask nvmlEventSetWait without waiting; a timeout means that there is no event."""
        assert self._events is not None, "watch comes first"
        try:
            data = _ask("nvmlEventSetWait", self._events, 0)
        except NvmlError as error:
            if error.code == pynvml.NVML_ERROR_TIMEOUT:
                raise NothingNewError(str(error), error.code) from error
            raise
        index = self._watched.get(_address(data.device))
        if index is None or int(data.eventType) != _XID:
            raise NothingNewError(f"an event of type {data.eventType} on a GPU that is not watched")
        return DriverEvent(index, int(data.eventData))


def _call(name: str, *arguments: object) -> None:
    """Call the driver's own function, bypassing pynvml."""
    try:
        pynvml._nvmlCheckReturn(pynvml._nvmlGetFunctionPointer(name)(*arguments))
    except pynvml.NVMLError as error:
        raise _named(error.value, str(error)) from error


def _listed(name: str, row: Any, spare: int, ask: Callable[[ctypes.c_uint, Any], None]) -> list[Any]:  # noqa: ANN401
    """Return the rows of a list whose length the driver reports first, with `spare` rows of room for late ones.

    This bypasses pynvml, which allocates as many rows as the driver reports: for four billion, all of the memory.
    """
    count = ctypes.c_uint(0)
    try:
        ask(count, None)
    except NvmlError as error:
        if error.code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
            raise
    else:
        return []
    if count.value > LISTED_MAX:
        raise NvmlError(f"{name}: implausible list length {count.value}")
    rows = (row * (count.value + spare))()
    count.value = len(rows)
    ask(count, rows)
    return list(rows[: min(count.value, len(rows))])


def _processes(name: str, handle: Handle) -> list[DriverProcess]:
    def ask(count: ctypes.c_uint, rows: Any) -> None:  # noqa: ANN401
        _call(name, handle, ctypes.byref(count), rows)

    unknown = pynvml.NVML_VALUE_NOT_AVAILABLE_ulonglong.value
    found = _listed(name, pynvml.c_nvmlProcessInfo_v3_t, SPARE_PROCESSES, ask)
    return [DriverProcess(int(p.pid), None if p.usedGpuMemory == unknown else int(p.usedGpuMemory)) for p in found]


def _read(name: str, handle: Handle, layout: struct.Struct, version: int) -> tuple[Any, ...]:
    """Return what a function writes after the version into the structure of that layout.

    This bypasses pynvml, because only some releases know the newer structures; every release finds the function itself.
    """
    buffer = ctypes.create_string_buffer(layout.size)
    ctypes.c_uint.from_buffer(buffer).value = layout.size | version << 24  # NVML_STRUCT_VERSION
    _call(name, handle, ctypes.byref(buffer))
    return layout.unpack(buffer.raw)[1:]


def _ask(name: str, *arguments: object) -> Any:  # noqa: ANN401  pynvml has no types
    function = getattr(pynvml, name, None)
    if function is None:
        raise UnsupportedError(f"this pynvml has no {name}", pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        raise _named(error.value, str(error)) from error
    except UnicodeDecodeError as error:  # pynvml decodes texts, but those of some boards are not UTF-8
        return error.object


def _ask_gently(name: str, *arguments: object) -> Any:  # noqa: ANN401
    """Return the answer, or an empty text if it is missing; a lost GPU and a stopped driver still raise."""
    try:
        answer = _ask(name, *arguments)
    except (GpuLostError, DriverStoppedError) as error:
        if name in ("nvmlShutdown", "nvmlGpmSampleFree", "nvmlEventSetFree"):
            return ""
        raise error
    except NvmlError:
        return ""
    return _text(answer) if isinstance(answer, bytes) else answer


_SRAM_ERRORS = struct.Struct("I4x11QI4x")  # nvmlEccSramErrorStatus_v1_t
_PLATFORM = struct.Struct("I16s16s5B3x")  # nvmlPlatformInfo_v2_t, and v1 with other names
_FABRIC_VERSIONS = (
    (3, struct.Struct("I16s4IB3x")),  # nvmlGpuFabricInfo_v3_t, since driver 580
    (2, struct.Struct("I16s4I")),
)
_VERSION_MISMATCH = 25  # NVML_ERROR_ARGUMENT_VERSION_MISMATCH; pynvml 12.0 has no name for it
_OLDER_DRIVER = (_VERSION_MISMATCH, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
"""A driver's answer to a structure or a function that is newer than itself."""

_KINDS: tuple[tuple[type[NvmlError], tuple[int, ...]], ...] = (
    (DriverMissingError, (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)),
    (
        UnsupportedError,
        (
            pynvml.NVML_ERROR_NOT_SUPPORTED,
            pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,  # a driver older than the call
            pynvml.NVML_ERROR_INVALID_ARGUMENT,  # old drivers answer this for a field or a clock that they do not know
            pynvml.NVML_ERROR_NO_PERMISSION,  # is not granted while we run
            _VERSION_MISMATCH,
            26,  # NVML_ERROR_DEPRECATED
        ),
    ),
    (GpuLostError, (pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED, 28)),  # 28: GPU_NOT_FOUND
    (DriverStoppedError, (pynvml.NVML_ERROR_UNINITIALIZED, pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)),
)
_KIND_OF_CODE = {code: kind for kind, codes in _KINDS for code in codes}


def _named(code: int, words: str) -> NvmlError:
    return _KIND_OF_CODE.get(code, NvmlError)(f"{words} (NVML error {code})", code)


_FIELD_VALUE = struct.Struct("=IIqqIIQ")
"""nvmlFieldValue_t: field, scope, timestamp, latency, type, return code, and the union as most fields use it.  Unpacked
this way because pynvml's structures take a microsecond per attribute, and a tick reads a hundred fields."""

_SUCCESS: int = pynvml.NVML_SUCCESS
_UNSIGNED_64 = 3  # NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
_UNSIGNED_32_LOW = 1 if sys.byteorder == "little" else -1  # NVML_VALUE_TYPE_UNSIGNED_INT in the union's low half

_GPM_METRIC = struct.Struct("=IId24x")
"""nvmlGpmMetric_t: metric, return code, value and three pointers to texts; unpacked this way for the same reason."""

_VALUE_OF_TYPE = {  # NVML_VALUE_TYPE_* -> (bytes in the union, bits of the number, signed)
    1: (4, 32, False),
    2: (ctypes.sizeof(ctypes.c_ulong), 8 * ctypes.sizeof(ctypes.c_ulong), False),
    3: (8, 64, False),
    4: (8, 63, True),
    5: (4, 31, True),
    6: (2, 16, False),
}


def _field(number: int, kind: int, code: int, union: bytes) -> FieldValue | NvmlError:
    """Return the field's number; its type says which member of the C union holds it."""
    if code != pynvml.NVML_SUCCESS:
        return _named(code, str(pynvml.NVMLError(code)))
    if kind not in _VALUE_OF_TYPE:  # type 0 is a double
        return UnsupportedError(f"field {number} has value type {kind}, which is not an integer")
    size, bits, is_signed = _VALUE_OF_TYPE[kind]
    return FieldValue(int.from_bytes(union[:size], sys.byteorder, signed=is_signed), bits)


def _number(answer: Any) -> int:  # noqa: ANN401
    """Return the number in an answer: itself, the first of a list (now, pending) or a flag in a structure."""
    if isinstance(answer, int):  # nearly always
        return int(answer)
    if isinstance(answer, (list, tuple)):
        return int(answer[0])
    for yes_or_no in ("isSupportedDevice", "isC2cEnabled"):
        answer = getattr(answer, yes_or_no, answer)
    return int(answer)


def _address(handle: object) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value  # type: ignore[arg-type]  # a ctypes pointer that mypy cannot see


def _uuid(value: bytes) -> str:
    return str(uuid.UUID(bytes=value)) if any(value) else ""


def _bus_id(pci: ctypes.Structure) -> str:
    """Return the PCI address; pynvml's own attribute raises for one that is not UTF-8."""
    return _text(ctypes.Structure.__getattribute__(pci, "busId"))


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
