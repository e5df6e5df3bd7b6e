"""Defines the columns of details: inputs and call sites of operators, python frames, and memory events.

Strings are kept once, as in `Trace`; shapes stay in the file's JSON, because most are never needed.

Left out: how they are read (`detail_rows`), and which operator is inside which module (`analysis.one_rank.tables`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["FrameRows", "MemoryRows", "Signature", "TraceDetails"]


class Signature(NamedTuple):
    """The inputs of a call in the JSON of the file; empty if they were not recorded."""

    shapes: bytes
    """"Input Dims": a list of integers for each tensor, a list of lists for a list of tensors, [] for anything else."""
    types: bytes
    """"Input type": float, c10::Half, Scalar, ..."""
    concrete: bytes
    """"Concrete Inputs": the values of inputs other than tensors, as text."""


@dataclass(frozen=True, slots=True)
class FrameRows:
    """Calls of python functions (`with_stack`), sorted by start.

    `name` indexes `names` ("nn.Module: Linear_0", "train.py(12): step"), `thread` indexes `Trace.threads`, NONE for a
    thread without host rows.
    """

    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    thread: NDArray[np.int32]
    name: NDArray[np.int32]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryRows:
    """Allocations (`bytes` above zero) and frees (below) of torch's allocators, in order of time.

    `device` indexes `devices` (c10's number of the device type, and the device's own).  `allocated` and `reserved` are
    the totals after the event, NONE if the file lacks them.
    """

    time_ns: NDArray[np.int64]
    thread: NDArray[np.int32]
    bytes: NDArray[np.int64]
    device: NDArray[np.int32]
    allocated: NDArray[np.int64]
    reserved: NDArray[np.int64]
    devices: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class TraceDetails:
    """Details of one file.  The first columns have a value for each of `Trace.host_rows`, in its order.

    `signature` indexes `signatures`, `stack` indexes `stacks` ("inner.py(3): f;outer.py(9): g") and `hierarchy`
    indexes `hierarchies`, each NONE for none.  `sequence` is autograd's number, shared by an operator and its
    backward; `forward_thread` is not 0 in a backward; `flops` are torch's count.
    """

    signature: NDArray[np.int32]
    sequence: NDArray[np.int64]
    forward_thread: NDArray[np.int64]
    flops: NDArray[np.int64]
    stack: NDArray[np.int32]
    hierarchy: NDArray[np.int32]
    signatures: tuple[Signature, ...]
    stacks: tuple[str, ...]
    hierarchies: tuple[str, ...]
    frames: FrameRows
    memory: MemoryRows
