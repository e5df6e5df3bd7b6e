"""Analyzes one trace: `Trace` in, `TraceReport` with ledger, steps, collectives, families and idle gaps out.

The work is what ran on the device; on a trace without a device, the operators of the training threads and the rows of
host process groups.  By default the window reaches from the first start to the last end of work: before the first
kernel nothing says when the device could have begun, so that time is not idle.

Idle time gets its cause from the host's rows (`trace.host_activity`).  It is unknown where the trace has no host rows,
where rows of the device are missing (idle time may have been work), and on a CPU job before the first operator.

On a device job, host process groups (gloo beside NCCL: barriers, object collectives, pacecar's own side group) count
as communication only if the device itself does not communicate.

`device_gaps` asks what the device was waiting for, where the ledger asks what the host was doing:

    host      sync.....|  launch            launch
    device    ####......................    ####..........####
                  ^ sync                        ^ launch_late (launched after the device ran dry)

A device that idles because the host launches late needs fewer or larger kernels, or a graph.  One that idles because
the host first waited for it needs that synchronization removed.  One that was launched in time but began late waits for
another stream or for the hardware.  The launch of the first row after the gap tells which; what made the host late is
not examined.

Left out: other ranks (`rank_comparison`), and kernel families on a CPU job, because operators contain others.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pacecar.ledger.attribution import LossCause, Work, attribute_windows, compute_on_host
from pacecar.ledger.intervals import EMPTY, Intervals, clip, covers, length, union
from pacecar.ledger.what_if_bounds import POINT_TO_POINT
from pacecar.records import Ledger

from ..document.report import Gap, Scenario, StepReport, TraceReport
from ..trace.columns import NONE, WORKS, HostKind, HostRows, Trace, TraceWarning
from ..trace.host_activity import host_activity, training_threads
from ..trace.steps import Step, rows_of_hta, step_windows
from .collectives import collective_totals
from .kernel_families import kernel_families
from .what_if_scenarios import what_if

__all__ = [
    "Charges",
    "analyze_trace",
    "charges_of",
    "device_gaps",
]

Window = Literal["trace", "steps", "hta"]


class Charges(NamedTuple):
    """The spans that a ledger of this trace is computed from: see `attribution.attribute`.

    `window` is from the first start to the last end of work, None when there is none.
    """

    work: dict[Work, Intervals]
    causes: dict[LossCause, Intervals]
    window: tuple[int, int] | None
    observed: tuple[int, int] | None


def charges_of(trace: Trace, rows: NDArray[np.bool_] | None = None) -> Charges:
    """Return the spans of work and the causes of idle time in `trace`; of its device rows only those in `rows`."""
    host, activity = trace.host_rows, host_activity(trace)
    causes = {
        LossCause.DATA_WAIT: _spans(host, activity.data_wait),
        LossCause.CHECKPOINT: _spans(host, activity.checkpoint),
        LossCause.HOOK: _spans(host, activity.garbage_collection),  # host-bound, also inside the optimizer
        LossCause.OPTIMIZER: _spans(host, activity.optimizer),
    }
    observed: tuple[int, int] | None = None
    if trace.has_device:
        work = _device_work(trace, rows)
        if len(host.start_ns) == 0 or not trace.is_device_complete:
            observed = (0, 0)
    else:
        operators = _spans(host, activity.operators)
        calls = _spans(host, activity.collective_calls)
        work = {Work.COMPUTE: compute_on_host(operators, calls, causes[LossCause.DATA_WAIT])}
        work[Work.COMMUNICATION] = _group_work(trace)
        observed = (int(operators[:, 0].min()), int(host.end_ns.max())) if len(operators) else (0, 0)
    kinds = [spans for spans in work.values() if len(spans)]
    window = None
    if kinds:
        window = min(int(spans[:, 0].min()) for spans in kinds), max(int(spans[:, 1].max()) for spans in kinds)
    return Charges(work, causes, window, observed)


def analyze_trace(trace: Trace, *, window: Window = "trace", steps: tuple[int, int] | None = None) -> TraceReport:
    """Return the report on `window` of `trace`.

    "trace" is the whole trace, "steps" from the first step to the end of the last, or of those numbered `steps`[0] to
    `steps`[1] where given; "hta" keeps what HolisticTraceAnalysis counts.  Where the steps are missing the whole trace
    is reported, and a warning says so.
    """
    found, warnings = step_windows(trace)
    rows = rows_of_hta(trace) if window == "hta" else None
    charges = charges_of(trace, rows)
    bounds, chosen = charges.window, found
    if window == "hta":
        chosen = []
    elif window == "steps" or steps is not None:
        window = "steps"
        chosen = [step for step in found if steps is None or steps[0] <= step.number <= steps[1]]
        if chosen:
            bounds = chosen[0].start_ns, chosen[-1].end_ns
        else:
            window, chosen = "trace", found
            warnings.append(_steps_missing(found, steps))
    warnings += _odd(trace, charges)
    return _report(trace, charges, bounds, window, chosen, rows, (*trace.warnings, *warnings))


def _report(
    trace: Trace,
    charges: Charges,
    bounds: tuple[int, int] | None,
    window: Window,
    steps: list[Step],
    rows: NDArray[np.bool_] | None,
    warnings: tuple[TraceWarning, ...],
) -> TraceReport:
    start, end = bounds or (0, 0)
    windows = [(start, end), *((step.start_ns, step.end_ns) for step in steps)]
    ledger, *of_steps = attribute_windows(charges.work, windows, causes=charges.causes, observed=charges.observed)
    merged = {kind: union(clip(spans, start, end)) for kind, spans in charges.work.items()}
    busy = union(np.concatenate([EMPTY, *merged.values()]))
    device = trace.device
    starts, ends = np.clip(device.start_ns, start, end), np.clip(device.end_ns, start, end)
    if rows is not None:
        ends = np.where(rows, ends, starts)
    return TraceReport(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        backend=trace.backend,
        gpus=list(trace.gpus),
        window=window,
        start_ns=None if bounds is None else start,
        span_ns=ledger.wall_ns,
        compute_ns=ledger.compute_ns,
        communication_ns=ledger.communication_ns,
        overlapped_communication_ns=ledger.overlapped_communication_ns,
        exposed_communication_ns=ledger.exposed_communication_ns,
        copy_ns=length(merged.get(Work.COPY, EMPTY)),
        exposed_copy_ns=ledger.exposed_copy_ns,
        idle_ns=ledger.wall_ns - length(busy),
        data_wait_ns=ledger.parts().get("data_wait", 0),
        host_bound_ns=ledger.host_bound_ns,
        optimizer_host_ns=ledger.optimizer_host_ns,
        checkpoint_ns=ledger.checkpoint_ns,
        unknown_ns=ledger.unknown_ns,
        overlap_ratio=ledger.overlap_ratio,
        ledger=ledger,
        steps=[
            StepReport(step=step.number, start_ns=step.start_ns, ledger=its)
            for step, its in zip(steps, of_steps, strict=True)
        ],
        collectives=collective_totals(
            trace, *_communication(trace, starts, ends, bounds), merged.get(Work.COMPUTE, EMPTY)
        ),
        families=kernel_families(trace, starts, ends),
        gaps=device_gaps(trace, busy) if trace.has_device and trace.is_device_complete else [],
        what_if=_what_if(trace, ledger, of_steps) if trace.is_device_complete else [],
        warnings=list(warnings),
        events=trace.events,
        is_truncated=trace.is_truncated,
    )


def _what_if(trace: Trace, ledger: Ledger, of_steps: list[Ledger]) -> list[Scenario]:
    """Return what-if bounds from the steps where there are any: time before and after them is not part of a step."""
    is_pipeline = any(one.operation in POINT_TO_POINT for one in trace.collectives)
    total = sum(of_steps, Ledger(wall_ns=0)) if of_steps else ledger
    return what_if(total, len(of_steps), is_pipeline=is_pipeline)


def _spans(host: HostRows, rows: NDArray[np.int64]) -> Intervals:
    return np.stack((host.start_ns[rows], host.end_ns[rows]), axis=1)


def _group_work(trace: Trace) -> Intervals:
    """Return the work of host process groups."""
    return _spans(trace.host_rows, np.flatnonzero(trace.host_rows.kind == HostKind.COLLECTIVE_WORK))


def _device_work(trace: Trace, rows: NDArray[np.bool_] | None) -> dict[Work, Intervals]:
    device = trace.device
    spans, kinds = np.stack((device.start_ns, device.end_ns), axis=1), device.work
    if rows is not None:
        spans, kinds = spans[rows], kinds[rows]
    work = {kind: spans[kinds == index] for index, kind in enumerate(WORKS)}
    if not _device_communicates(trace):
        work[Work.COMMUNICATION] = clip(_group_work(trace), *_bounds(spans))
    return work


def _bounds(spans: Intervals) -> tuple[int, int]:
    """Return the first start and the last end of device work, which alone bound the trace of a device job."""
    return (int(spans[:, 0].min()), int(spans[:, 1].max())) if len(spans) else (0, 0)


def _device_communicates(trace: Trace) -> bool:
    return bool((trace.device.work == WORKS.index(Work.COMMUNICATION)).any())


def _communication(
    trace: Trace, starts: NDArray[np.int64], ends: NDArray[np.int64], bounds: tuple[int, int] | None
) -> tuple[Intervals, NDArray[np.int32], NDArray[np.int32]]:
    """Return spans, names and collectives of the communication rows, cut to `bounds`.

    `starts` and `ends` are those of the device rows and are cut already.
    """
    device, host = trace.device, trace.host_rows
    if trace.has_device and _device_communicates(trace):
        mine = (device.work == WORKS.index(Work.COMMUNICATION)) & (ends > starts)
        return np.stack((starts[mine], ends[mine]), axis=1), device.name[mine], device.collective[mine]
    start, end = (np.clip(times, *(bounds or (0, 0))) for times in (host.start_ns, host.end_ns))
    mine = (host.kind == HostKind.COLLECTIVE_WORK) & (end > start)
    return np.stack((start[mine], end[mine]), axis=1), host.name[mine], host.collective[mine]


def _steps_missing(found: list[Step], steps: tuple[int, int] | None) -> TraceWarning:
    if not found:
        return TraceWarning("steps_missing", "the trace marks no steps: the whole trace is reported")
    numbers = [step.number for step in found]
    asked = "" if steps is None else f" {steps[0]}:{steps[1]}"
    message = f"no step{asked} among {min(numbers)}:{max(numbers)}: the whole trace is reported"
    return TraceWarning("steps_missing", message)


def _odd(trace: Trace, charges: Charges) -> list[TraceWarning]:
    warnings = []
    if charges.window is None:
        warnings.append(TraceWarning("no_work", "the trace has no work: no device rows, operators or collectives"))
    devices = len(np.unique(trace.device.device))
    if devices > 1:
        message = f"work of {devices} devices is combined: idle means that all of them are idle"
        warnings.append(TraceWarning("several_devices", message, devices))
    beside = int((trace.host_rows.kind == HostKind.COLLECTIVE_WORK).sum())
    if beside and trace.has_device and _device_communicates(trace):
        message = "collectives of host process groups (gloo) are not in the ledger, because the device has its own"
        warnings.append(TraceWarning("host_collectives", message, beside))
    return warnings


_CAUSES = ("launch_late", "launch_latency", "sync", "unknown")


def device_gaps(trace: Trace, busy: Intervals) -> list[Gap]:
    """Return the gaps between the rows of the union `busy` of device work by cause, the longest first.

    Before the first work and after the last nothing is known about the cause, so those do not count as gaps.
    """
    if len(busy) < 2:
        return []
    start, end = busy[:-1, 1], busy[1:, 0]
    # Rows are sorted by start, so the first row at or after the gap's end is one that ends it.
    device = trace.device
    ending = np.minimum(np.searchsorted(device.start_ns, end), len(device.start_ns) - 1)
    launch = np.where(device.start_ns[ending] == end, device.launch_ns[ending], NONE)
    waited = covers(_waits(trace), start)
    cause = np.where(launch >= start, np.where(waited, 2, 0), 1)
    cause[launch == NONE] = 3
    durations = end - start
    gaps = [
        Gap(cause=name, count=int((cause == index).sum()), duration_ns=int(durations[cause == index].sum()))
        for index, name in enumerate(_CAUSES)
    ]
    return sorted((gap for gap in gaps if gap.count), key=lambda gap: -gap.duration_ns)


def _waits(trace: Trace) -> Intervals:
    """Return when a thread that launches work was waiting for the device."""
    host = trace.host_rows
    waiting = np.flatnonzero((host.kind == HostKind.SYNC) & np.isin(host.thread, training_threads(trace)))
    # One nanosecond more: a wait that ends at the instant at which the device runs dry was a wait for the device.
    return union(_spans(host, waiting) + np.array([0, 1]))
