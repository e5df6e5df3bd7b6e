"""Finds where each row of a trace came from: its operator, shapes, module and python line.

A device row has only its launch.  The launching call is a host row, and the operator open around it on its thread
launched the work.  The same goes for modules and python frames, which are rows too.  No module is open in the backward
pass, which autograd runs on a thread of its own, but an operator and its backward share autograd's sequence number: the
backward gets the module of its forward.

    python    |nn.Module: Net_0  |nn.Module: Linear_1          ||
    operator       |aten::linear   |aten::addmm             ||
    call                                    |cudaLaunchKernel|        correlation 7
    device                                                       |sgemm      |     correlation 7

Pure.  Left out: the sums (the modules beside this one).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE, HostKind, Trace
from pacecar.analysis.trace.details.detail_columns import TraceDetails
from pacecar.analysis.trace.kernel_links import first_at

from .nesting import Nesting, values_at
from .python_frames import Frames, frames_of, own_line

__all__ = ["Calls", "calls_of"]

Index = NDArray[np.int64]

DESCRIPTION = "record_param_comms"

OPERATOR_KINDS = (HostKind.OPERATOR, HostKind.COLLECTIVE_CALL)


@dataclass(frozen=True)
class Calls:
    """Columns parallel to `Trace.host_rows` and, if named `row_...`, to `Trace.device`; NONE for none.

    `signature` indexes `TraceDetails.signatures`, `module` indexes `modules`, `line` indexes `lines`.  `row_call` is
    the host row that launched a device row, `row_operator` the innermost operator around that.
    """

    trace: Trace
    nesting: Nesting
    is_operator: NDArray[np.bool_]
    signature: NDArray[np.int32]
    module: Index
    line: Index
    modules: tuple[str, ...]
    lines: tuple[str, ...]
    row_call: Index
    row_operator: Index

    def name(self, row: int) -> str:
        """Return the name of a host row."""
        return self.trace.names[int(self.trace.host_rows.name[row])]


def calls_of(trace: Trace) -> Calls:
    """Return where the rows of `trace` came from; without details, only the operators."""
    host = trace.host_rows
    nesting = Nesting(host.start_ns, host.end_ns, host.thread)
    is_operator = _operators(trace, nesting)
    launches = np.flatnonzero(host.kind == HostKind.LAUNCH)
    call = first_at(host.correlation[launches], trace.device.correlation)
    row_call = values_at(launches, call)
    details = trace.details
    nothing = np.full(len(host.start_ns), NONE, dtype=np.int64)
    frames = frames_of(details, trace) if details is not None else Frames(nothing, nothing, (), ())
    module, lines = frames.module, list(frames.lines)
    line = frames.line
    if details is not None:
        module = _with_backward(details, nesting, module, host.thread)
        line = _with_stacks(details, line, lines)
    return Calls(
        trace=trace,
        nesting=nesting,
        is_operator=is_operator,
        signature=details.signature if details is not None else nothing.astype(np.int32),
        module=module,
        line=line,
        modules=frames.modules,
        lines=tuple(lines),
        row_call=row_call,
        row_operator=nesting.nearest(row_call, is_operator),
    )


def _operators(trace: Trace, nesting: Nesting) -> NDArray[np.bool_]:
    """Return which host rows are operators; a collective's description inside its own operator does not count."""
    host = trace.host_rows
    is_operator = np.isin(host.kind, OPERATOR_KINDS)
    is_description = np.array([name == DESCRIPTION for name in trace.names] or [False], dtype=np.bool_)[host.name]
    rows = np.flatnonzero(is_description)
    is_call = (host.kind == HostKind.COLLECTIVE_CALL) & ~is_description
    is_operator[rows[nesting.nearest(rows, is_call) != NONE]] = False
    return is_operator


def _with_stacks(details: TraceDetails, line: Index, lines: list[str]) -> Index:
    """Add the lines of operators that have a stack of their own, as torch before 1.13 wrote them."""
    if not details.stacks:
        return line
    numbers = {text: number for number, text in enumerate(lines)}
    table = np.full(len(details.stacks) + 1, NONE, dtype=np.int64)  # the last place is for NONE
    for number, stack in enumerate(details.stacks):
        own = own_line(stack.split(";"))
        if own is not None:
            table[number] = numbers.setdefault(own, len(numbers))
    lines[:] = list(numbers)
    return np.where(details.stack == NONE, line, table[details.stack])


def _with_backward(details: TraceDetails, nesting: Nesting, module: Index, thread: NDArray[np.int32]) -> Index:
    """Add the modules of backward operators: those of the forward with the same number.

    Numbers count per thread, so one that several threads used in the forward is ambiguous and ignored.
    """
    has = details.sequence != NONE
    forward = np.flatnonzero(has & (details.forward_thread == 0) & (module != NONE))
    backward = has & (details.forward_thread != 0)
    if len(forward) == 0 or not backward.any():
        return module
    numbers, first, inverse = np.unique(details.sequence[forward], return_index=True, return_inverse=True)
    low, high = (np.full(len(numbers), fill) for fill in (np.iinfo(np.int64).max, -1))
    np.minimum.at(low, inverse, thread[forward])
    np.maximum.at(high, inverse, thread[forward])
    known = low == high
    around = nesting.nearest(np.arange(len(module)), backward)
    bare = np.flatnonzero((around != NONE) & (module == NONE))
    at = first_at(numbers[known], details.sequence[around[bare]])
    found = np.flatnonzero(at != NONE)
    filled = module.copy()
    filled[bare[found]] = module[forward[first[known][at[found]]]]
    return filled
