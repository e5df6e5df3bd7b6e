"""Decides from category and name which rows of a trace are kept, and the kind of a host row.

The category says where a row ran, the name what it is.  A category alone is not enough: torch 1.8 calls everything on
the host "Operator", including steps and data loading, and nearly every release has renamed categories.

    kernel, gpu_memcpy, ...                 work on a device: see `pacecar.ledger.classification`
    cpu_op, user_annotation                 by name
    cuda_runtime, hip_driver, ...           a call that launches, a call that waits, or another call
    cuda_sync, xpu_sync                     a wait for an event, a stream or a device
    python_function, ac2g, overhead, ...    left out on purpose
    anything else                           left out, with a warning

Pure: strings in, a kind out.
"""

from __future__ import annotations

from enum import StrEnum

from pacecar.ledger.classification import COLLECTIVE_CALLS, HostRow, classify_device, classify_host

from .columns import HostKind, SyncKind

__all__ = ["RowPlace", "canonical", "host_kind", "is_collective_call", "place_of", "sync_kind"]

_OLD = {
    "memcpy": "gpu_memcpy",
    "memset": "gpu_memset",
    "runtime": "cuda_runtime",
    "operator": "cpu_op",
    "hip_kernel": "kernel",
}
"""What torch 1.8 and 1.9 wrote ("Memcpy", in lower case here); see ActivityType.cpp of kineto for what came later."""

_LEFT_OUT = frozenset(
    {
        *("python_function", "cpu_instant_event", "overhead", "external_correlation", "python"),
        *("gpu_user_annotation", "mtia_user_annotation", "xpu_user_annotation", "privateuse1_user_annotation"),
        *("cuda_event", "gpu_pm_counter", "cuda_profiler_range"),  # on the GPU, but not work
        *("ac2g", "async_cpu_to_gpu", "async_gpu_to_cpu", "async", "fwdbwd", "forward_backward"),  # arrows
        *("mtia_counters", "hardware"),
    }
)
_SYNCS = frozenset({"cuda_sync", "xpu_sync"})
_SYNC_KINDS = {
    "Event Sync": SyncKind.EVENT,
    "Stream Wait Event": SyncKind.STREAM_WAIT,
    "Stream Sync": SyncKind.STREAM,
    "Context Sync": SyncKind.CONTEXT,
}
"""Kineto's names of CUpti_ActivitySynchronizationType; it calls all others "<unknown>"."""

_FRAMES = frozenset({"trace", ""})
"""Rows that frame the whole trace ("PyTorch Profiler (0)"), and metadata, which has no category."""

_CHECKPOINT = ("checkpoint", "save_state", "torch.save", "dcp.save", "dcp::save")


class RowPlace(StrEnum):
    """Where a row ran."""

    DEVICE = "device"
    HOST = "host"
    SYNC = "sync"
    LEFT_OUT = "left_out"
    FRAME = "frame"
    UNKNOWN = "unknown"


def canonical(category: str) -> str:
    """Return the present name of a category."""
    lower = category.lower()
    return _OLD.get(lower, lower)


def place_of(category: str) -> RowPlace:
    """Return the RowPlace of a canonical category."""
    if category in _FRAMES:
        return RowPlace.FRAME
    if classify_device(category, "") is not None:
        return RowPlace.DEVICE
    if category in ("cpu_op", "user_annotation") or category.endswith(("_runtime", "_driver")):
        return RowPlace.HOST
    if category in _SYNCS:
        return RowPlace.SYNC
    return RowPlace.LEFT_OUT if category in _LEFT_OUT else RowPlace.UNKNOWN


def host_kind(category: str, name: str) -> HostKind:
    """Return what a row of a host thread is; `category` is canonical."""
    if category not in ("cpu_op", "user_annotation"):
        if "Synchronize" in name or "EventQuery" in name:
            return HostKind.SYNC
        is_launch = "Launch" in name or "Memcpy" in name or "Memset" in name or "Enqueue" in name
        return HostKind.LAUNCH if is_launch else HostKind.RUNTIME
    if name.startswith("enumerate(DataLoader)#"):
        return HostKind.LOADER
    if name.startswith("Optimizer."):
        return HostKind.OPTIMIZER
    if name.startswith("ProfilerStep#"):
        return HostKind.ANNOTATION
    row = classify_host(category, name)
    if row is HostRow.LAUNCH:
        return HostKind.COLLECTIVE_CALL
    if row is HostRow.WORK:
        return HostKind.COLLECTIVE_WORK
    if category == "cpu_op":
        return HostKind.OPERATOR
    lower = name.lower()
    return HostKind.CHECKPOINT if any(word in lower for word in _CHECKPOINT) else HostKind.ANNOTATION


def sync_kind(name: str) -> SyncKind | None:
    """Return what waits in a row of this name, None if unknown."""
    return _SYNC_KINDS.get(name)


def is_collective_call(name: str) -> bool:
    """Return whether a row of this name can describe a collective: the call itself, or an annotation around it.

    `nccl:all_reduce` is an annotation around the launch, `gloo:all_reduce` the work, `c10d::allreduce_` the operator.
    """
    if name == "record_param_comms" or name.startswith(COLLECTIVE_CALLS):
        return True
    backend, colon, rest = name.partition(":")
    return bool(colon) and not rest.startswith(":") and backend in _BACKENDS


_BACKENDS = frozenset(
    {"nccl", "rccl", "gloo", "ucc", "mpi", "xccl", "oneccl", "hccl", "mccl", "cncl", "eccl", "fbnccl"}
)
