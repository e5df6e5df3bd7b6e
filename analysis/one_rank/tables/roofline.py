"""Compares matmuls, attentions and convolutions of each shape with the peaks of the device.

The roofline (Williams, Waterman, Patterson, 2009): an operation takes at least its FLOPs over the peak FLOP/s, and at
least its bytes over the memory's bandwidth; the longer of the two is its bound.  A better
kernel can save the time beyond the bound; only another shape or fewer bits can lower the bound itself.

FLOPs are torch's own if it counted them (`with_flops`), else those of `formulas`.  No argument tells whether fp32 ran
as TF32, but kernel names usually do; without such a name, or without known peaks of the device, there is no ratio.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report_tables import OperationShape
from pacecar.analysis.trace.columns import NONE, Trace
from pacecar.device_peaks import TF32, has_tf32, peak_bytes_per_second, peak_flops_per_second
from pacecar.ledger.intervals import length, union

from ..origins.calls import Calls
from ..origins.grouping import Groups, Origins
from ..origins.nesting import values_at
from ..origins.window import TableWindow
from .formulas import OPERATIONS

__all__ = ["arithmetic_of", "operation_shapes"]

Index = NDArray[np.int64]

TF32_WORDS = ("tf32", "s1688", "s16816gemm_f32", "f32f32f32_f32_tn_align1_tf32")
FP32_WORDS = ("sgemm", "ffma", "simt", "scudnn", "winograd")
"""Words in kernel names of cuBLAS, cuDNN and CUTLASS that tell the two arithmetics for fp32 apart."""


def operation_shapes(calls: Calls, window: TableWindow, origins: Origins) -> list[OperationShape]:
    """Return the operations that began in `window` by operator and inputs, those with the most time first."""
    trace, host = calls.trace, calls.trace.host_rows
    has_formula = np.array([name in OPERATIONS for name in trace.names] or [False], dtype=np.bool_)
    is_operation = calls.is_operator & has_formula[host.name] & (calls.signature != NONE)
    if not is_operation.any():
        return []
    above = calls.nesting.nearest(calls.nesting.parent, is_operation)
    rows = np.flatnonzero(is_operation & (above == NONE) & window.has_host)
    groups = Groups.of(host.name[rows].astype(np.int64), calls.signature[rows].astype(np.int64))
    place = np.full(len(host.start_ns), NONE, dtype=np.int64)
    place[rows] = groups.number
    around = calls.nesting.outermost(calls.row_call, is_operation)
    of_row = values_at(place, around)
    launched = Groups.of(of_row)
    device_rows = {number: launched.rows(group) for group, number in enumerate(launched.keys[0])}
    gpu = _gpu(trace)
    found = []
    for group in range(groups.count):
        mine = device_rows.get(group, np.empty(0, dtype=np.int64))
        row = _shape(calls, origins, rows[groups.rows(group)], mine, around, gpu)
        if row is not None:
            found.append(row)
    return sorted(found, key=lambda row: (-row.busy_ns, row.operator, row.shapes, row.types))


def _shape(
    calls: Calls, origins: Origins, rows: Index, device_rows: Index, around: Index, gpu: str | None
) -> OperationShape | None:
    """Return one shape's row: its calls are the host rows `rows`, which launched the `device_rows`."""
    trace = calls.trace
    name = calls.name(int(rows[0]))
    inputs = origins.inputs[int(calls.signature[rows[0]])]
    operation = OPERATIONS[name]
    work = operation.work(inputs)
    if work is None or inputs.shapes_text is None:
        return None
    flops, source = work.flops, work.formula if work.flops is not None else None
    assert trace.details is not None  # there are no signatures without
    counted = int(trace.details.flops[rows[0]])
    if counted > 0:
        flops, source = counted, "with_flops"
    typed = inputs.tensor(operation.typed)
    dtype = typed.dtype if typed is not None else ""
    if trace.has_device:
        starts, ends = trace.device.start_ns[device_rows], trace.device.end_ns[device_rows]
        launched = len(np.unique(around[device_rows]))
        kernels = {trace.names[number] for number in np.unique(trace.device.name[device_rows]).tolist()}
        arithmetic = arithmetic_of(dtype, kernels, gpu)
    else:
        starts, ends, launched, arithmetic = (
            trace.host_rows.start_ns[rows],
            trace.host_rows.end_ns[rows],
            len(rows),
            None,
        )
    busy = length(union(np.stack((starts, ends), axis=1)))
    seconds = busy / 1e9 / launched if launched else 0.0
    rate, speed = ((value / seconds if value is not None and seconds else None) for value in (flops, work.bytes))
    peak = peak_flops_per_second(gpu, arithmetic) if gpu is not None and arithmetic is not None else None
    bandwidth = peak_bytes_per_second(gpu) if gpu is not None else None
    bounds = [
        value / limit if value is not None and limit is not None else None
        for value, limit in ((flops, peak), (work.bytes, bandwidth))
    ]
    longest = max((bound for bound in bounds if bound is not None), default=None) if None not in bounds else None
    return OperationShape(
        kind=operation.kind,
        operator=name,
        shapes=inputs.shapes_text,
        types=inputs.types_text or "",
        arithmetic=arithmetic,
        count=len(rows),
        launched=launched,
        busy_ns=busy,
        flops=flops,
        flops_source=source,
        bytes=work.bytes,
        flops_per_second=rate,
        bytes_per_second=speed,
        intensity=flops / work.bytes if flops is not None and work.bytes else None,
        peak_flops_per_second=peak,
        peak_bytes_per_second=bandwidth,
        flops_ratio=rate / peak if rate is not None and peak else None,
        bandwidth_ratio=speed / bandwidth if speed is not None and bandwidth else None,
        roofline_ratio=longest / seconds if longest is not None and seconds else None,
        bound=None if longest is None else "compute" if bounds[0] == longest else "memory",
    )


def arithmetic_of(dtype: str, kernels: Iterable[str], gpu: str | None) -> str | None:
    """Return the arithmetic whose peak applies to work on tensors of `dtype` by kernels of these names.

    Only fp32 on a device with TF32 is ambiguous: there the kernels' names must agree.
    """
    if dtype != "float32" or (gpu is not None and not has_tf32(gpu)):
        return dtype or None
    names = [name.lower() for name in kernels]
    is_tf32 = any(word in name for name in names for word in TF32_WORDS)
    is_fp32 = any(word in name for name in names for word in FP32_WORDS)
    if is_tf32 == is_fp32:
        return None
    return TF32 if is_tf32 else "float32"


def _gpu(trace: Trace) -> str | None:
    """Return the name of the device that ran the work; None if the header does not tell."""
    used = np.unique(trace.device.device).tolist()
    names = {trace.gpus[number] for number in used if 0 <= number < len(trace.gpus)}
    if len(names) != 1 or any(number >= len(trace.gpus) for number in used):
        names = set(trace.gpus)
    name = next(iter(names)) if len(names) == 1 else ""
    return name or None
