r"""Classifies a row of a trace as compute, communication, copy or other work.

Streams do not identify work: DDP, FSDP and users put anything on any stream.  Names alone are unreliable: they differ
between releases and vendors.  So metadata comes first: torch records `record_param_comms` around each collective, and a
kernel linked to it is communication, whatever its name.  Otherwise the name decides.  A device row of an unknown type
is OTHER (charged to unknown), never compute.

    kernel linked to record_param_comms   COMMUNICATION
    ncclDevKernel_AllReduce_Sum_bf16_RING COMMUNICATION by name
    gpu_memcpy, gpu_memset                COPY
    any other kernel                      COMPUTE
    gpu_user_annotation, cuda_sync, ...   not work

Pure.
"""

from __future__ import annotations

import re
from enum import StrEnum
from functools import lru_cache

from .attribution import Work

__all__ = [
    "COLLECTIVE_CALLS",
    "METADATA_ROW",
    "HostRow",
    "classify_device",
    "classify_host",
    "collective_operation",
    "function_name",
    "is_closed",
]

NAMES_MAX = 16_384
"""Distinct names that are cached.  Generated kernels have thousands; a look-up is 30 times faster than a search."""

NESTING_MAX = 64
"""Levels of template brackets removed from a name; CUTLASS has 15, a broken file may have thousands."""

_DEVICE_KERNELS = frozenset({"kernel", "concurrent_kernel", "xpu_kernel", "mtia_kernel", "mtia_ccp_events"})
"""`mtia_ccp_events` is kineto's old type for work on an MTIA device; since 2025 it writes "kernel" there too."""
_DEVICE_COPIES = frozenset({"gpu_memcpy", "gpu_memset"})
_COLLECTIVE_ROWS = frozenset({"collective_comm"})
_DEVICE_UNKNOWN = frozenset({"mtia_workloadd", "hpu_op", "privateuse1_kernel", "mtia_insight"})
"""Types of device work of unknown kind."""

LIBRARY = re.compile(
    r"""
      (?<![a-z]) nccl                             # NCCL of any age, torchcomms' ncclKernelAllGatherCtran..., ncclx
    | rccl | (?<![a-z0-9]) hccl | (?<![a-z]) hcom_ # AMD, Habana and Ascend
    | mscclpp | (?<![a-z]) msccl                  # also inside RCCL
    | (?<![a-z]) (?: nv | roc | i | x ) shmem     # NVSHMEM, rocSHMEM, Intel SHMEM
    | (?<![a-z]) (?: deep | hybrid | uccl | hybrid_deep ) _? ep (?![a-z])
    | (?: inter | intra ) node (?: _? ll )? (?: :: | \d+ ) (?: dispatch | combine | notify | cached_notify | clean )
    | (?<![a-z]) mori (?: :: | \d* moe ) | (?<![a-z]) ep (?: dispatch | combine ) (?: intra | inter | low | copy )
    | (?<![a-z]) pplx | (?<![a-z]) a2a _? (?: dispatch | combine | prepare | send | recv )
    | moea2a (?: dispatch | combine | prepare ) | (?<![a-z]) moe_comm
    | (?<![a-z]) ctran (?= kern | :: | \d | _ | [a-z]* (?: all | reduce | send ) )
    | oneccl | (?<![a-z]) ccl :: | (?<![a-z]) ucc_ | reduce_local_ (?: in | outof ) place_kernel    # Intel and UCC
    | (?<![a-z]) (?! cccl ) [a-z]{1,3} ccl (?: kernel | dev | _ ) | flagcx    # everybody else's *CCL
    | cross_device_reduce | quick_? (?: all _? )? reduce    # vLLM, SGLang, AITER on ROCm
    | (?: one | two ) _? shot _? (?: hier | kernel | all | reduce | lamport | push | pull )
    | lamport | (?<![a-z]) multimem_ | symmetric_memory | exchangesplitandoffset
    | userbuffers_ | kuserbuffers                 # Transformer Engine and what was taken from it
    | (?<![a-z]) barrier_all | ipc_? barrier | ipcbarrier
    | (?<![a-z]) kernel_ (?: dispatch | combine ) _token    # Triton-distributed
    """,
    re.VERBOSE,
)
"""Names that only communication libraries give to kernels; matched against the lower-case function name."""

COLLECTIVE = re.compile(
    r"all_?reduce | all_?gather | reduce_?scatter | all_?(?: to | 2 )_?all | (?<![a-z]) a2a (?![a-z]) | send_?recv",
    re.VERBOSE,
)
"""Common names of collectives.  They identify a kernel of an unknown library, unless NOT_ACROSS matches."""

NOT_ACROSS = re.compile(
    r"""
      # all threads of a block get the sum, but no other device
      (?: warp | block | thread | wave (?: front)? | sub_?group | simd | lane | quad | cta | tile | row
        | shuffle | shfl )
      _? (?: all | reduce )
    | gemm | matmul | (?<![a-z]) mm (?![a-z]) | attn | attention | flash (?! infer )  # computes, communicates inside
    | gemv | deepep_ (?: permute | post_reorder | compute | run_moe )    # SGLang's shuffling around DeepEP
    | ^at::native | ^cub:: | ^thrust | (?: _ | ::) cub ::
    | ^triton_ (?: poi | red | per | tem | for | foreach | mm | bmm ) _   # torch.compile, after operators it fused
    """,
    re.VERBOSE,
)

HOST_GROUPS = ("gloo:", "ucc:", "mpi:")
"""Prefixes of the work rows of host process groups."""

_HINTS = (
    "ccl", "shmem", "reduce", "gather", "scatter", "all", "ep", "a2a", "mori", "pplx", "moe", "ctran", "ucc", "shot",
    "lamport", "multimem", "symmetric", "userbuffers", "barrier", "dispatch", "combine", "node", "exchange", "recv",
    "flagcx",
)  # fmt: skip
"""Every communication kernel's name has one of these, so nine names in ten need only this check."""

METADATA_ROW = "record_param_comms"
"""The operator around each collective of a device; its metadata has group, sizes and type."""

COLLECTIVE_CALLS = ("c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::")
"""Prefixes of the operators that start a collective or wait for one (`wait_tensor`)."""

_ANONYMOUS = re.compile(r"\(anonymous namespace\)::|<unnamed>::")
_INNERMOST = re.compile(r"<[^<>]*>")


def function_name(kernel: str) -> str:
    """Return the qualified function of a demangled kernel name, without result type, template arguments or parameters.

    The function tells the purpose of a kernel; template arguments only name its parts
    (`softmax<WarpAllReduce<...>>`).  A mangled name is returned unchanged.
    """
    if kernel.startswith("_Z") or not ("<" in kernel or "(" in kernel or " " in kernel):
        return kernel
    name = _ANONYMOUS.sub("", kernel)
    for _ in range(NESTING_MAX):  # inside out, because brackets nest
        shorter = _INNERMOST.sub("", name)
        if shorter == name:
            break
        name = shorter
    return name.partition("(")[0].partition("<")[0].rpartition(" ")[2] or kernel


@lru_cache(maxsize=NAMES_MAX)
def _is_communication(name: str) -> bool:
    if name.startswith(HOST_GROUPS):
        return True
    lowered = name.lower()
    if not any(hint in lowered for hint in _HINTS):
        return False
    function = function_name(name).lower()
    if LIBRARY.search(function) is not None:
        return NOT_ACROSS.search(function) is None or function.startswith(("nccl", "rccl"))
    return COLLECTIVE.search(function) is not None and NOT_ACROSS.search(function) is None


_OPERATIONS = (
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|quick_?reduce|one_?shot_?(?:kernel|reduce)|allreduce")),
    ("all_gather", re.compile(r"all_?gather")),
    ("reduce_scatter", re.compile(r"reduce_?scatter")),
    ("all_to_all", re.compile(r"all_?(?:to|2)_?all|a2a(?!_?(?:dispatch|combine))")),
    ("dispatch", re.compile(r"dispatch")),
    ("combine", re.compile(r"combine")),
    ("send_recv", re.compile(r"send_?recv|push_?recv|pull_?recv")),
    ("broadcast", re.compile(r"broadcast|bcast")),
    ("barrier", re.compile(r"barrier")),
    ("send", re.compile(r"push_?send|pull_?send|(?<![a-z])send(?![a-z])")),
    ("recv", re.compile(r"(?<![a-z])recv(?![a-z])")),
    ("reduce", re.compile(r"reduce(?!_local|[a-z])")),
)


@lru_cache(maxsize=NAMES_MAX)
def collective_operation(name: str) -> str | None:
    """Return the collective that a communication kernel (or a `gloo:` row) of this name runs; None if unclear."""
    function = function_name(name).lower()
    for words in (function.rpartition("::")[2], function):
        for operation, pattern in _OPERATIONS:
            if pattern.search(words) is not None:
                return operation
    return None


_COPY_NAMES = ("Memcpy ", "Memset ", "dma_")
"""Prefixes of copies that have the same row type as kernels (MTIA's)."""


def classify_device(row_type: str, name: str, linked_name: str | None = None) -> Work | None:
    """Return the kind of a device row, None if it is not work (annotation, synchronization, not on a device).

    `linked_name` is the name of the host row that launched it, if the trace links them.
    """
    if row_type in _DEVICE_KERNELS:
        if linked_name == METADATA_ROW or _is_communication(name):
            return Work.COMMUNICATION
        return Work.COPY if name.startswith(_COPY_NAMES) else Work.COMPUTE
    if row_type in _DEVICE_COPIES:
        # NCCL's copy engine and symmetric-memory collectives move bytes by plain copies: still communication.
        return Work.COMMUNICATION if linked_name == METADATA_ROW else Work.COPY
    if row_type in _COLLECTIVE_ROWS:
        return Work.COMMUNICATION
    if row_type in _DEVICE_UNKNOWN:
        return Work.OTHER
    return None


class HostRow(StrEnum):
    """The kind of a row of a host thread.

    LAUNCH starts a collective (`c10d::allreduce_`) or waits for one: neither compute nor communication, because the
    work runs elsewhere.  WORK is that work, on the process group's own threads.  LOADER is `DataLoader.__next__`, whose
    operators are data wait and not training.
    """

    OPERATOR = "operator"
    LAUNCH = "launch"
    WORK = "work"
    LOADER = "loader"


@lru_cache(maxsize=NAMES_MAX)
def classify_host(row_type: str, name: str) -> HostRow | None:
    """Return the kind of a host row, None if it does not concern work (annotations, Python, runtime)."""
    if row_type == "cpu_op":
        if name.startswith("ProfilerStep#"):  # torch < 1.10 marked steps as operators
            return None
        if name.startswith(COLLECTIVE_CALLS) or name == METADATA_ROW:
            return HostRow.LAUNCH
        return HostRow.WORK if name.startswith(HOST_GROUPS) else HostRow.OPERATOR
    if row_type == "user_annotation":
        if name.startswith("enumerate(DataLoader)#"):
            return HostRow.LOADER
        return HostRow.WORK if name.startswith(HOST_GROUPS) else None
    return None


_CLOSED = re.compile(r"^aten:: | Backward [0-9]+ $", re.VERBOSE)


@lru_cache(maxsize=NAMES_MAX)
def is_closed(name: str) -> bool:
    """Return whether an operator of this name contains only operators.

    True for ATen's own operators and autograd's generated nodes (`AddmmBackward0`), whose hooks run outside their row.
    False for the engine's rows (DDP launches collectives in one) and for functions written in Python, whose names end
    without a number.  Tensor subclasses that implement ATen in Python are an exception: see `may_communicate_inside` in
    `trace_spans`.
    """
    return _CLOSED.search(name) is not None and not name.startswith("autograd::engine::")
