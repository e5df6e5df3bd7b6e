"""Defines the instructions of a host lane and the program of one step that is made of them.

A rank's host executes its program one instruction after the other, as python does.  An instruction takes time on the
host, and may put work on a stream of the device, let a stream wait, or wait itself:

    |before|inside|call|after|      before: python between two operators; it leaves no row in a trace
           |== operator row ==|
                  |call|            the runtime call (cudaLaunchKernel, ...), inside the operator's row

`Program` holds the same program for all ranks with the same role.  What differs from rank to rank and step to step
(noise, faults) is drawn in `durations`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import HostKind
from pacecar.ledger.attribution import Work

__all__ = ["ALL", "AUTOGRAD", "MAIN", "Code", "Instruction", "Phase", "Program", "Stream"]

MAIN, AUTOGRAD = 0, 1
"""Host threads: the one that runs the loop, and that of autograd, for which the first waits during backward."""

ALL = -1
"""As a stream: all streams of the device."""


class Code(IntEnum):
    """What an instruction does besides taking time on the host; all up to BATCH put work on a stream."""

    LAUNCH = 0  # puts a kernel or a copy on `stream`
    COLLECTIVE = 1  # puts a collective's kernel on `stream`, which waits for `on_stream` as it is now, if another
    SEND = 2  # as COLLECTIVE, with a peer; one that `is_batched` only joins the next BATCH
    RECV = 3
    BATCH = 4  # puts one kernel on `stream` that sends and receives all that was batched since the last
    WAIT = 5  # `stream` waits for `event`
    RECORD = 6  # `event` is what was last put on `stream`
    HOST = 7  # nothing else: python, data, checkpoint, operators of a CPU job
    SYNC = 8  # the host waits for `stream` or, where it has one, for `event`
    OPEN = 9  # a row begins that ends at its CLOSE: a step, an annotation around operators
    CLOSE = 10


class Stream(IntEnum):
    """Streams of a device, by the numbers that CUPTI might give them."""

    COMPUTE = 7
    COPY_IN = 13
    DATA = 20
    TENSOR = 24
    SEND_FORWARD = 28
    RECV_FORWARD = 32
    SEND_BACKWARD = 36
    RECV_BACKWARD = 40
    PIPELINE = 44


class Phase(IntEnum):
    """Which part of a step an instruction is in; faults hit some of them."""

    OTHER = 0
    DATA = 1
    INPUT = 2
    FORWARD = 3
    BACKWARD = 4
    OPTIMIZER = 5
    CHECKPOINT = 6
    END = 7


class Instruction(NamedTuple):
    """One instruction; durations in nanoseconds and as they are without noise and faults.

    `row` is the name of the host's row, of kind `kind` ("" for none), `call` the runtime call inside it.  `power` is
    how device time follows from the length of a sequence: linearly, or squared in attention.  `microbatch` says whose
    sequence that is.  `event` numbers the events of one step.  `peer` is how many stages away the other one is.
    """

    code: Code
    row: str = ""
    kind: HostKind = HostKind.OPERATOR
    before_ns: int = 0
    inside_ns: int = 0
    call: str = ""
    call_ns: int = 0
    after_ns: int = 0
    thread: int = MAIN
    phase: Phase = Phase.OTHER
    stream: int = Stream.COMPUTE
    on_stream: int = Stream.COMPUTE
    event: int = -1
    kernel: str = ""
    work: Work = Work.COMPUTE
    device_ns: int = 0
    grid: tuple[int, ...] | None = None
    power: int = 1
    microbatch: int = 0
    is_blocking: bool = False
    is_batched: bool = False
    is_extra: bool = False
    role: str = ""
    operation: str = ""
    bytes: int = 0
    peer: int = 0


class Program:
    """The instructions of one step and their columns, one entry for each instruction."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self.instructions = tuple(instructions)

    def __len__(self) -> int:
        return len(self.instructions)

    def column(self, name: str) -> NDArray[np.int64]:
        return np.array([int(getattr(one, name)) for one in self.instructions], dtype=np.int64)

    @cached_property
    def code(self) -> NDArray[np.int64]:
        return self.column("code")

    @cached_property
    def phase(self) -> NDArray[np.int64]:
        return self.column("phase")

    @cached_property
    def host_ns(self) -> NDArray[np.int64]:
        """The four parts of each instruction's time on the host, in four rows."""
        return np.stack([self.column(name) for name in ("before_ns", "inside_ns", "call_ns", "after_ns")])

    @cached_property
    def device_ns(self) -> NDArray[np.int64]:
        return self.column("device_ns")

    @cached_property
    def power(self) -> NDArray[np.int64]:
        return self.column("power")

    @cached_property
    def microbatch(self) -> NDArray[np.int64]:
        return self.column("microbatch")

    @cached_property
    def is_extra(self) -> NDArray[np.bool_]:
        return self.column("is_extra").astype(np.bool_)

    @cached_property
    def is_launch(self) -> NDArray[np.bool_]:
        """Whether the instruction puts work on the device."""
        puts: NDArray[np.bool_] = (self.code <= Code.BATCH) & (self.column("is_batched") == 0)
        return puts

    @cached_property
    def is_operator(self) -> NDArray[np.bool_]:
        """Whether the instruction is an operator of a CPU job: work, and not what surrounds it."""
        return np.array(
            [one.code == Code.HOST and one.kind == HostKind.OPERATOR and bool(one.row) for one in self.instructions]
        )

    @cached_property
    def exchanges(self) -> dict[str, list[int]]:
        """Of each role of groups, the places of its collectives, sends and receives in their order."""
        found: dict[str, list[int]] = {}
        for place, one in enumerate(self.instructions):
            if one.role:
                found.setdefault(one.role, []).append(place)
        return found
