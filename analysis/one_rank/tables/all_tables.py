"""Makes all tables of one trace, in the window of its report.

Shapes, modules and memory need columns that a plain reading leaves out (`TraceDetails`); without them the rest is made.

Pure: a `Trace` in, `TraceTables` out, and the place of each device row in them, so that later results about rows (the
critical path of a job) can be added.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.document.report import TraceReport
from pacecar.analysis.document.report_tables import TraceTables
from pacecar.analysis.trace.columns import NONE, Trace
from pacecar.analysis.trace.steps import rows_of_hta

from ..origins.calls import Calls, calls_of
from ..origins.grouping import origins_of
from ..origins.nesting import values_at
from ..origins.window import window_of
from .allocator_memory import memory_timelines
from .annotations import annotation_totals
from .kernels import kernel_totals
from .launches import launch_statistics
from .operators import operator_totals
from .roofline import operation_shapes

__all__ = ["RowModules", "TablePlaces", "tables_of"]


@dataclass(frozen=True, slots=True)
class RowModules:
    """The module of each host row, and of the launch of each device row; indices into `names`, NONE for none."""

    of_device: NDArray[np.int32]
    of_host: NDArray[np.int32]
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TablePlaces:
    """The place of each device row in `TraceTables.kernels`, in the kernel's `launchers`, and in `operators`.

    NONE marks rows outside the window, unlisted launchers, and rows that no operator launched.  `modules` are those of
    all rows, None if the trace has none.
    """

    kernel: NDArray[np.int32]
    launcher: NDArray[np.int32]
    operator: NDArray[np.int32]
    modules: RowModules | None = None


def tables_of(trace: Trace, report: TraceReport) -> tuple[TraceTables, TablePlaces]:
    """Return the tables of `trace` in the window of its `report`."""
    start = report.start_ns or 0
    starts, ends = (
        np.clip(times, start, start + report.span_ns) for times in (trace.device.start_ns, trace.device.end_ns)
    )
    if report.window == "hta":
        ends = np.where(rows_of_hta(trace), ends, starts)
    calls = calls_of(trace)
    window = window_of(trace, starts, ends, (start, start + report.span_ns) if report.window == "steps" else None)
    origins = origins_of(calls)
    origin_of_row = values_at(origins.of_host, calls.row_operator)
    origin_of_row[origin_of_row == NONE] = len(origins.texts) - 1
    kernels = kernel_totals(calls, window, origins.texts, origin_of_row)
    operators = operator_totals(calls, window, origins)
    tables = TraceTables(
        kernels=kernels.totals,
        operators=operators.totals,
        roofline=operation_shapes(calls, window, origins),
        launches=launch_statistics(calls, window) if trace.has_device else None,
        memory=memory_timelines(calls),
        annotations=annotation_totals(calls, window),
    )
    places = TablePlaces(
        kernel=kernels.place_of_row.astype(np.int32),
        launcher=kernels.launcher_of_row.astype(np.int32),
        operator=operators.place_of_row.astype(np.int32),
        modules=_modules(calls),
    )
    return tables, places


def _modules(calls: Calls) -> RowModules | None:
    if (calls.module == NONE).all():
        return None
    by_operator = values_at(calls.module, calls.row_operator)
    of_device = np.where(by_operator == NONE, values_at(calls.module, calls.row_call), by_operator)
    return RowModules(of_device.astype(np.int32), calls.module.astype(np.int32), calls.modules)
