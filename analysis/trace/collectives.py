"""Derives the operation, size and process group of a collective from trace metadata.

A kernel's name is not enough: NCCL's point-to-point kernel is called SendRecv for a send, a pipeline's exchange and an
all-to-all.  Depending on its version, torch gives the rest in one of three ways:

    2.2 and later     the kernel's own arguments ("Collective name", "In msg nelems", ...)
    2.1 to 2.2        only the host row `record_param_comms` that the kernel is linked to has these arguments
    1.8 to 2.0        the annotation `nccl:all_to_all` around the launch has the shapes ("Input Dims"), if recorded

Pure.  Left out: which kernel belongs to which row (`kernel_links`).
"""

from __future__ import annotations

import math
import re
from functools import lru_cache

import msgspec

from pacecar.ledger.classification import collective_operation, function_name

from .columns import CollectiveColumns
from .decoding.events import Args

__all__ = [
    "ELEMENT_BYTES", "element_type", "from_annotation", "from_kernel", "from_metadata", "operation_of", "tensors",
]  # fmt: skip

ELEMENT_BYTES = {
    **dict.fromkeys(("Byte", "Char", "Bool", "QInt8", "QUInt8", "Bits8"), 1),
    **dict.fromkeys(("Float8_e5m2", "Float8_e4m3fn", "Float8_e5m2fnuz", "Float8_e4m3fnuz", "Float8_e8m0fnu"), 1),
    **dict.fromkeys(("Half", "BFloat16", "Short", "UInt16", "Bits16"), 2),
    **dict.fromkeys(("Float", "Int", "UInt32", "ComplexHalf", "QInt32"), 4),
    **dict.fromkeys(("Double", "Long", "UInt64", "ComplexFloat"), 8),
    "ComplexDouble": 16,
}
"""Bytes of an element by its name in c10/core/ScalarType.h.  4-bit types are missing: two values share a byte."""

_C_TYPES = {
    "float": "Float",
    "double": "Double",
    "int": "Int",
    "long": "Long",
    "long int": "Long",
    "long long": "Long",
    "short": "Short",
    "short int": "Short",
    "signed char": "Char",
    "unsigned char": "Byte",
    "bool": "Bool",
    "unsigned short": "UInt16",
    "unsigned int": "UInt32",
    "unsigned long": "UInt64",
    "c10::complex<float>": "ComplexFloat",
    "c10::complex<double>": "ComplexDouble",
}
"""The C++ names that "Input type" uses; all others are "c10::" and a name of ELEMENT_BYTES."""

_WORDS = (
    ("all_reduce", "allreduce"),
    ("reduce_scatter", "reducescatter"),
    ("all_gather", "allgather"),
    ("all_to_all", "alltoall"),
    ("send_recv", "sendrecv"),
    ("broadcast", "broadcast"),
    ("scatter", "scatter"),
    ("gather", "gather"),
    ("reduce", "reduce"),
    ("barrier", "barrier"),
    ("send", "send"),
    ("recv", "recv"),
)
"""Operation and what its names contain; the first match wins.

torch writes `_allgather_base`, `all_gather_into_tensor_coalesced`, `allreduce_sparse`, ...
"""

_NO_LETTER = re.compile(r"[^a-z]")

TENSORS_MAX = 4096
"""The most shapes of one call that are read."""


@lru_cache(maxsize=4096)
def operation_of(word: str) -> str:
    """Return the normalized operation for torch's name of it, or that name itself (`coalesced`, `wait`)."""
    stem = word.lower().rpartition(":")[2].strip()
    letters = _NO_LETTER.sub("", stem)
    if "isend" in letters and "irecv" in letters:
        return "send_recv"
    return next((operation for operation, part in _WORDS if part in letters), stem)


def from_metadata(args: Args) -> CollectiveColumns:
    """Return the collective that these arguments describe; `args.operation` is not None."""
    size = ELEMENT_BYTES.get(args.dtype or "")
    counts = [count for count in (args.elements_in, args.elements_out) if count is not None]
    return CollectiveColumns(
        operation=operation_of(args.operation or ""),
        bytes=None if size is None or not counts else max(counts) * size,
        dtype=args.dtype,
        group=args.group,
        group_size=args.group_size,
        ranks=_ranks(args),
        sequence=args.sequence,
        source_rank=_peer(args.source_rank),
        destination_rank=_peer(args.destination_rank),
    )


def element_type(word: str) -> str:
    """Return the name in c10/core/ScalarType.h for a word of "Input type"; the word itself if it is not a tensor."""
    return _C_TYPES.get(word, word.removeprefix("c10::"))


def _peer(rank: int | None) -> int | None:
    """Return the global rank of a message's peer; None if torch did not know the group's ranks."""
    return rank if rank is not None and rank >= 0 else None


def _ranks(args: Args) -> tuple[int, ...] | None:
    """Return the global ranks: as listed, or from start and stride if the list was cut short."""
    listed = (args.ranks or "").strip().strip("[]")
    if listed and "..." not in listed:
        ranks = [part.strip() for part in listed.split(",")]
        return tuple(int(rank) for rank in ranks) if all(rank.isdecimal() for rank in ranks) else None
    start, stride, size = args.rank_start, args.rank_stride, args.group_size
    if start is None or stride is None or size is None or start < 0 or stride < 1 or not 0 < size <= TENSORS_MAX * 256:
        return None
    return tuple(range(start, start + stride * size, stride))


def from_annotation(name: str, args: Args) -> CollectiveColumns:
    """Return the collective of a row like `nccl:all_reduce`, whose inputs are its tensors.

    The input gives the larger of input and output for all operations except gathering ones.
    """
    operation = operation_of(name)
    moved = tensors(args)
    dtypes = {dtype for dtype, _ in moved}
    total = sum(size for _, size in moved)
    is_known = bool(moved) and operation not in ("all_gather", "gather", "coalesced")
    return CollectiveColumns(
        operation=operation, bytes=total if is_known else None, dtype=dtypes.pop() if len(dtypes) == 1 else None
    )


def from_kernel(name: str) -> CollectiveColumns:
    """Return the collective that a communication kernel's name implies; an unknown name becomes the operation."""
    return CollectiveColumns(operation=collective_operation(name) or function_name(name))


def tensors(args: Args) -> list[tuple[str, int]]:
    """Return the type and bytes of each tensor in "Input Dims" and "Input type", empty if they were not recorded."""
    try:
        shapes = msgspec.json.decode(args.shapes) if len(bytes(args.shapes)) else []
        types = msgspec.json.decode(args.types) if len(bytes(args.types)) else []
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return []
    if not isinstance(shapes, list) or not isinstance(types, list):
        return []
    found = []
    for shape, word in zip(shapes[:TENSORS_MAX], types, strict=False):
        dtype = element_type(word) if isinstance(word, str) else ""
        size = ELEMENT_BYTES.get(dtype)
        if size is not None and isinstance(shape, list) and all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
            found.append((dtype, min(math.prod(shape[:16]) * size, (1 << 62))))
    return found
