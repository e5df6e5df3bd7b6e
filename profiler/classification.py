r"""What kind of work is this row of a trace?

By stream is the wrong answer: DDP, FSDP and users put anything on any stream.  By name alone is nearly wrong: names
change from release to release and vendor to vendor.  So metadata first: torch records `record_param_comms` around each
collective, and a kernel linked to it is communication whatever its name.  Only then the name decides, and a device row
of a type that is not known here is OTHER (charged to unknown), never compute.

    kernel linked to record_param_comms   COMMUNICATION
    ncclDevKernel_AllReduce_Sum_bf16_RING COMMUNICATION by name
    gpu_memcpy, gpu_memset                COPY
    any other kernel                      COMPUTE
    gpu_user_annotation, cuda_sync, ...   not work

Pure: strings in, a kind out.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from pacecar.profiler.attribution import Work

__all__ = ["HostRow", "classify_device", "classify_host", "is_closed"]

NAMES_MAX = 16_384
"""Distinct names that are remembered; generated kernels have thousands, and a look-up is 30 times a search."""

_DEVICE_KERNELS = frozenset({"kernel", "concurrent_kernel", "xpu_kernel", "mtia_kernel"})
_DEVICE_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
_COLLECTIVE_ROWS = frozenset({"collective_comm"})
_DEVICE_UNKNOWN = frozenset({"mtia_workloadd", "hpu_op", "privateuse1_kernel", "mtia_insight"})
"""Work on a device of which this table cannot say what it is."""

COMMUNICATION_NAME = re.compile(
    r"""
      ^nccl (?: Dev )? Kernel                     # NCCL < 2.19 ncclKernel_..., later ncclDevKernel_...
    | ncclSym (?: Dev )? k?                       # NCCL 2.27 symmetric-memory kernels
    | ^rccl | rcclGenericKernel | ^hccl           # AMD, Habana
    | ^mscclpp | ^msccl | ^mscclKernel            # MSCCL and MSCCL++
    | nvshmem | deep_?ep | (?: internode | intranode ) :: (?: dispatch | combine | notify | cached_notify )
    | cross_device_reduce                         # vLLM and SGLang custom all-reduce
    | (?: one | two ) _? shot _? all_? reduce     # torch symmetric memory, FlashInfer, TensorRT-LLM
    | allreduce_ (?: fusion | kernel ) | lamport.*all_?reduce | multimem_ (?: all | one_shot | two_shot | reduce )
    | userbuffers_ | ^ub_ (?: all | reduce )      # Transformer Engine user buffers
    | ^gloo: | ^ucc: | ^mpi:                      # the work rows of host process groups
    """,
    re.VERBOSE | re.IGNORECASE,
)

_METADATA_ROW = "record_param_comms"


@lru_cache(maxsize=NAMES_MAX)
def _is_communication(name: str) -> bool:
    return COMMUNICATION_NAME.search(name) is not None


def classify_device(row_type: str, name: str, linked_name: str | None = None) -> Work | None:
    """Return what a row on a device is, None when it is no work (annotation, synchronization, not on a device).

    `linked_name` is the name of the host row that launched it, when the trace links them.
    """
    if row_type in _DEVICE_KERNELS:
        if linked_name == _METADATA_ROW or _is_communication(name):
            return Work.COMMUNICATION
        return Work.COMPUTE
    if row_type in _DEVICE_COPIES:
        # NCCL's copy engine and symmetric-memory collectives move bytes by plain copies: still communication.
        return Work.COMMUNICATION if linked_name == _METADATA_ROW else Work.COPY
    if row_type in _COLLECTIVE_ROWS:
        return Work.COMMUNICATION
    if row_type in _DEVICE_UNKNOWN:
        return Work.OTHER
    return None


class HostRow(StrEnum):
    """What a row of a host thread is.

    LAUNCH is the call that starts a collective (`c10d::allreduce_`): no compute, and no communication either, because
    the call returns while the work runs elsewhere.  WORK is that work, on the process group's own threads.  LOADER is
    `DataLoader.__next__`, whose operators are waiting for data, not training.
    """

    OPERATOR = "operator"
    LAUNCH = "launch"
    WORK = "work"
    LOADER = "loader"


@lru_cache(maxsize=NAMES_MAX)
def classify_host(row_type: str, name: str) -> HostRow | None:
    """Return what a row on a host thread is, None when it says nothing about work (annotations, python, runtime)."""
    if row_type == "cpu_op":
        if name.startswith(("c10d::", "_c10d_functional::", "c10d_functional::")) or name == _METADATA_ROW:
            return HostRow.LAUNCH
        return HostRow.WORK if _is_communication(name) else HostRow.OPERATOR
    if row_type == "user_annotation":
        if name.startswith("enumerate(DataLoader)#"):
            return HostRow.LOADER
        return HostRow.WORK if name.startswith(("gloo:", "ucc:", "mpi:")) else None
    return None


_CLOSED = re.compile(r"^aten:: | Backward [0-9]+ $", re.VERBOSE)


@lru_cache(maxsize=NAMES_MAX)
def is_closed(name: str) -> bool:
    """Return whether an operator of this name has nothing but operators inside it.

    ATen's own do, and autograd's generated nodes (`AddmmBackward0`), whose hooks run outside their row.  Not so the
    engine's rows (DDP launches collectives in one) and functions written in python, whose names end without a number.
    """
    return _CLOSED.search(name) is not None and not name.startswith("autograd::engine::")
