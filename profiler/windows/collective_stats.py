"""Sums up the collectives of a profiled step by operation: count, duration, size and bus bandwidth.

They come from exact windows, because none of the always-on sources suffices (torch 2.13; for NCCL according to torch's
source and release notes):

- The flight recorder has the size and group of each collective.  With gloo it never learns when one ended; with NCCL it
  has durations only if the user set TORCH_NCCL_ENABLE_TIMING.  It can only be read as a whole: 2000 entries are 0.9 MB
  of JSON, 38 ms with the GIL held, and 18 ms to decode (measured on CPU, two busy cores).
- `_register_on_completion_hook` is for NCCL only, is deprecated since 2.6 in favor of the flight recorder, needs the
  same variable, and runs Python with the GIL at each completion.
- `Work._get_duration` does not work with gloo, needs that variable with NCCL, and DDP does not expose its works.
- DDP's logging data gives the communication of a whole backward, in the last sampled step, and waits for the device on
  CUDA.

Windows are taken anyway, and each of their rows is exact.  On CUDA a kernel's `record_param_comms` row gives operation,
elements, type and group.  gloo's rows give the operation but no size: they are counted and timed, without bandwidth.

Pure: rows in, sums out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from pacecar.analysis.trace.collectives import from_metadata
from pacecar.analysis.trace.columns import CollectiveColumns
from pacecar.analysis.trace.decoding.events import Args
from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor
from pacecar.ledger.classification import collective_operation
from pacecar.records import BackwardWindow, CollectiveSum
from pacecar.records.measurements.collectives import OPERATIONS, OPERATIONS_MAX

__all__ = ["REDUCES_MAX", "UNNAMED", "SeenCollective", "backward_window", "sum_collectives"]

UNNAMED = "unknown"

_args = msgspec.json.Decoder(Args)

REDUCES_MAX = 512
"""The most all-reduces listed for one backward; a job with more has a bucket for each of its layers."""


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
    """Return the all-reduces that began between the start of `backward` and `end_ns`; None if there are too many.

    On a device job gloo's rows are omitted: they are pacecar's own votes or the job's barriers, not gradients.
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
    """Return the collective described by Kineto's metadata (JSON without its braces); None if there is none."""
    if metadata is None:
        return None
    with contextlib.suppress(msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        args = _args.decode(f"{{{metadata}}}")
        if args.operation is not None:
            return from_metadata(args)
    return None
