"""Sums up the collectives of a profiled step by operation: count, duration, size and bus bandwidth.

They come from exact windows, because no always-on source will do (torch 2.13; NCCL by torch's source and release
notes):

- The flight recorder knows size and group of each collective.  For gloo it never learns when one ended.  For NCCL it
  has durations only where the user set TORCH_NCCL_ENABLE_TIMING.  It is read whole or not at all: 2000 entries are
  0.9 MB of JSON, 38 ms with the GIL held, and 18 ms to decode (measured on CPU, two busy cores).
- `_register_on_completion_hook`: NCCL only, deprecated since 2.6 in favour of the flight recorder, needs the same
  variable, and runs python, with the GIL, at each completion.
- `Work._get_duration`: not on gloo; on NCCL with that variable only; and DDP does not hand out its works.
- DDP's logging data: backward's communication as one duration, of the last sampled step, so no single collective; on
  CUDA it waits for the device.

A window is taken anyway, and each of its rows is exact.  On CUDA a kernel's `record_param_comms` row gives operation,
elements, type and group.  gloo's rows give the operation and no size: they are counted and timed, without bandwidth.

Pure: rows in, sums out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from pacecar.records import BackwardWindow, CollectiveSum
from pacecar.records.measurements.collectives import OPERATIONS, OPERATIONS_MAX

from ..ledger.bus_bandwidth import bus_bandwidth_factor
from ..ledger.classification import collective_operation
from ..trace.collectives import from_metadata
from ..trace.columns import CollectiveColumns
from ..trace.decoding.events import Args

__all__ = ["REDUCES_MAX", "UNNAMED", "SeenCollective", "backward_window", "sum_collectives"]

UNNAMED = "unknown"

REDUCES_MAX = 512
"""The most all-reduces of one backward that are listed; a job with more has one bucket for each of its layers."""


class SeenCollective(msgspec.Struct, frozen=True, gc=False):
    """One row of communication: name of the kernel or gloo row, its span, and the metadata of its launching row."""

    name: str
    start_ns: int
    end_ns: int
    metadata: str | None = None


class _Sum:
    def __init__(self) -> None:
        self.count = self.duration_ns = 0
        self.bytes: int | None = 0
        self.bus_bytes: int | None = 0

    def add(self, seen: SeenCollective, size: int | None, factor: float | None) -> None:
        self.count += 1
        self.duration_ns += seen.end_ns - seen.start_ns
        self.bytes = None if self.bytes is None or size is None else self.bytes + size
        is_known = self.bus_bytes is not None and size is not None and factor is not None
        self.bus_bytes = (self.bus_bytes or 0) + round((size or 0) * (factor or 0.0)) if is_known else None


def sum_collectives(rows: Iterable[SeenCollective], window: tuple[int, int]) -> tuple[CollectiveSum, ...]:
    """Return a sum for each operation of the collectives that began in `window`, the longest first."""
    sums: dict[str, _Sum] = {}
    for seen in rows:
        if not window[0] <= seen.start_ns < window[1]:
            continue
        said = _said(seen.metadata)
        operation = (said.operation if said is not None else collective_operation(seen.name)) or UNNAMED
        if operation not in OPERATIONS or (operation not in sums and len(sums) >= OPERATIONS_MAX - 1):
            operation = UNNAMED
        size, ranks = (None, None) if said is None else (said.bytes, said.group_size)
        sums.setdefault(operation, _Sum()).add(seen, size, bus_bandwidth_factor(operation, ranks))
    return tuple(
        CollectiveSum(
            operation=operation, count=s.count, duration_ns=s.duration_ns, bytes=s.bytes, bus_bytes=s.bus_bytes
        )
        for operation, s in sorted(sums.items(), key=lambda item: (-item[1].duration_ns, item[0]))
    )


def backward_window(
    rows: Iterable[SeenCollective], backward: tuple[int, int], end_ns: int, *, on_device: bool
) -> BackwardWindow | None:
    """Return the all-reduces that began from `backward`'s start on and before `end_ns`; None with too many of them.

    On a device job gloo's rows are left out: they are pacecar's own votes or the job's barriers, not gradients.
    """
    reduces = []
    for seen in rows:
        if not backward[0] <= seen.start_ns < end_ns or (on_device and seen.name.startswith("gloo:")):
            continue
        said = _said(seen.metadata)
        if ((said.operation if said is not None else collective_operation(seen.name)) or UNNAMED) == "all_reduce":
            reduces.append((seen.start_ns - backward[0], seen.end_ns - backward[0]))
    if len(reduces) > REDUCES_MAX:
        return None
    return BackwardWindow(work_ns=backward[1] - backward[0], reduces=tuple(sorted(reduces)))


def _said(metadata: str | None) -> CollectiveColumns | None:
    """Return the collective that kineto's metadata (JSON without its braces) describe; None when they do not."""
    if metadata is None:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        args = msgspec.json.decode(f"{{{metadata}}}", type=Args)
        if args.operation is not None:
            return from_metadata(args)
    return None
