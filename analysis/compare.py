"""Compares two runs by their trace reports: both ledgers per step and rank, and the greatest changes.

Totals would compare how long the profiler was on.  So each figure is for one step of one rank or, if a side has no step
marks, for one trace, with a warning.  Steps are also compared by medians, because one odd step moves a mean; the job's
pace is that of its slowest rank.

Pure: reports in, a comparison out.  Left out: whether the difference is more than noise.  Two traces are two samples;
a proof needs interleaved trials, as the controller runs them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from pacecar.records import LEDGER_HEADINGS, Ledger

from .document.report import CollectiveTotal, Difference, TraceComparison, TraceReport, TraceSide
from .trace.columns import TraceWarning

__all__ = ["HEADINGS", "WARNING_CODES", "compare"]

WARNING_CODES = ("compared_without_steps", "different_step_counts", "different_rank_counts")
"""The warnings of a comparison, besides those of its traces."""

HEADINGS = (*LEDGER_HEADINGS, "wall", "communication", "overlapped_communication")
"""The parts of the ledgers that are compared, in this order."""

Totals = Mapping[str, tuple[float, float]]
"""Name -> nanoseconds and how many."""


def compare(
    before: tuple[str, Sequence[TraceReport]], after: tuple[str, Sequence[TraceReport]]
) -> tuple[TraceComparison, list[TraceWarning]]:
    """Return how two runs differ, and warnings about the comparison; each run is a name and at least one report."""
    sides = (before[1], after[1])
    has_steps = all(report.window == "steps" and report.steps for reports in sides for report in reports)
    shares = [1 / (_steps(reports) if has_steps else len(reports)) for reports in sides]
    old, new = (_ledger(reports) for reports in sides)
    headings = [
        _difference(name, getattr(old, f"{name}_ns") * shares[0], getattr(new, f"{name}_ns") * shares[1])
        for name in HEADINGS
    ]
    comparison = TraceComparison(
        before=_side(*before, has_steps),
        after=_side(*after, has_steps),
        per="step" if has_steps else "trace",
        headings=headings,
        families=_differences(*(_families(reports, share) for reports, share in zip(sides, shares, strict=True))),
        collectives=_differences(*_collectives(sides, shares)),
        kernels=_with_status(_differences(*(_kernels(*side) for side in zip(sides, shares, strict=True)))),
        operators=_with_status(_differences(*(_operators(*side) for side in zip(sides, shares, strict=True)))),
        operators_host=_with_status(_differences(*(_on_host(*side) for side in zip(sides, shares, strict=True)))),
    )
    return comparison, _warnings(before, after, has_steps)


def _warnings(
    before: tuple[str, Sequence[TraceReport]], after: tuple[str, Sequence[TraceReport]], has_steps: bool
) -> list[TraceWarning]:
    warnings = []
    if not has_steps:
        message = "a side has no steps marked in all its traces: whole traces are compared, not steps"
        warnings.append(TraceWarning("compared_without_steps", message))
    elif _steps(before[1]) / len(before[1]) != _steps(after[1]) / len(after[1]):
        counts = f"{_steps(before[1])} steps before, {_steps(after[1])} after"
        warnings.append(TraceWarning("different_step_counts", f"{counts}: every figure is for one step"))
    if len(before[1]) != len(after[1]):
        counts = f"{len(before[1])} traces before, {len(after[1])} after"
        warnings.append(TraceWarning("different_rank_counts", f"{counts}: every figure is the mean of the ranks"))
    return warnings


def _steps(reports: Iterable[TraceReport]) -> int:
    return sum(len(report.steps) for report in reports)


def _ledger(reports: Iterable[TraceReport]) -> Ledger:
    total = Ledger(wall_ns=0)
    for report in reports:
        total = total + report.ledger
    return total


def _side(name: str, reports: Sequence[TraceReport], has_steps: bool) -> TraceSide:
    medians = [
        float(statistics.median(step.ledger.wall_ns for step in report.steps)) for report in reports if report.steps
    ]
    return TraceSide(
        name=name,
        files=[report.file for report in reports],
        ranks=len(reports),
        steps=_steps(reports) if has_steps else None,
        median_step_ns=max(medians) if has_steps else None,
    )


def _families(reports: Iterable[TraceReport], share: float) -> Totals:
    rows = ((family.family, family.duration_ns, family.count) for report in reports for family in report.families)
    return _totals(rows, share)


def _collectives(sides: Sequence[Sequence[TraceReport]], shares: Sequence[float]) -> list[Totals]:
    """Return both sides by operation and size, or by operation alone if the sizes differ."""

    def by(name: Callable[[CollectiveTotal], str]) -> list[Totals]:
        return [
            _totals(((name(row), row.duration_ns, row.count) for r in reports for row in r.collectives), share)
            for reports, share in zip(sides, shares, strict=True)
        ]

    detailed = by(lambda row: row.operation if row.bytes is None else f"{row.operation} {row.bytes} B")
    return detailed if detailed[0].keys() == detailed[1].keys() else by(lambda row: row.operation)


def _kernels(reports: Iterable[TraceReport], share: float) -> Totals:
    tables = [report.tables for report in reports if report.tables is not None]
    return _totals(((row.name, row.duration_ns, row.count) for its in tables for row in its.kernels), share)


def _operators(reports: Iterable[TraceReport], share: float) -> Totals:
    """Return the device time of the work that each operator launched itself; on a CPU job its own host time."""
    tables = [report.tables for report in reports if report.tables is not None]
    rows = (
        (row, row.host_self_ns if row.exposed_ns is None else row.device_ns) for its in tables for row in its.operators
    )
    return _totals(((row.name, time, row.count) for row, time in rows), share)


def _on_host(reports: Iterable[TraceReport], share: float) -> Totals:
    tables = [report.tables for report in reports if report.tables is not None]
    return _totals(((row.name, row.host_self_ns, row.count) for its in tables for row in its.operators), share)


def _with_status(rows: list[Difference]) -> list[Difference]:
    """Return the rows with their change: new, gone, slower, faster or the same."""
    for row in rows:
        if not row.before_count and not row.before_ns:
            row.status = "new"
        elif not row.after_count and not row.after_ns:
            row.status = "gone"
        else:
            row.status = "slower" if row.change_ns > 0 else "faster" if row.change_ns < 0 else "same"
    return rows


def _totals(rows: Iterable[tuple[str, int, int]], share: float) -> Totals:
    sums: dict[str, tuple[int, int]] = {}
    for name, duration_ns, count in rows:
        duration_before, count_before = sums.get(name, (0, 0))
        sums[name] = (duration_before + duration_ns, count_before + count)
    return {name: (duration_ns * share, count * share) for name, (duration_ns, count) in sums.items()}


def _differences(before: Totals, after: Totals) -> list[Difference]:
    """Return one row for each name, the greatest change first."""
    nothing = (0.0, 0.0)
    rows = []
    for name in {**before, **after}:
        (old, old_count), (new, new_count) = before.get(name, nothing), after.get(name, nothing)
        row = _difference(name, old, new)
        row.before_count, row.after_count = old_count, new_count
        rows.append(row)
    return sorted(rows, key=lambda row: (-abs(row.change_ns), row.name))


def _difference(name: str, before: float, after: float) -> Difference:
    change = after - before
    return Difference(
        name=name,
        before_ns=before,
        after_ns=after,
        change_ns=change,
        change_ratio=change / before if before else None,
    )
