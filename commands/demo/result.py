"""Defines the result of a demo: its report, and what result.json holds beside that.

A field is None where the run did not get that far or nothing was measured: a run that was stopped in its warm-up has
a result too.  `pacecar.commands.demo.summary` computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pacecar.records import JobHello, KnobValue, Ledger, WhatIf
from pacecar.run_statistics import EstimateError

from ..report.document import Report, ReportChange, RunSide

__all__ = ["DemoLosses", "DemoOverhead", "LedgerSum", "RankCount", "Result", "as_document"]

METHOD = (
    "median over windows of {} consecutive unprofiled steps, low and high their 10th and 90th percentile;"
    " a window takes as long as its slowest rank, samples of all ranks"
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class LedgerSum:
    """The ledgers of `steps` steps of one rank, added up; `estimate` and `exact` count where they came from."""

    rank: int
    steps: int
    estimate: int
    exact: int
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class RankCount:
    """What one rank recorded: steps, records, drops, and the reason in its goodbye."""

    rank: int
    steps: int
    records: int
    dropped_records: int | None
    last_words: str | None


@dataclass(frozen=True, slots=True)
class DemoOverhead:
    """What pacecar cost, over the wall time, on all ranks together.

    `late_ratio` is that of the last stretch in which nothing was turned, None where it was too short to tell.
    """

    ratio: float
    wall_seconds: float
    late_ratio: float | None = None

    def paid_by_seconds(self, budget: float) -> float | None:
        """Return after how many seconds of training all is within `budget`, if it goes on as it did last.

        None: it never gets there, or that cannot be computed.  Where it is within `budget` already: the time until now.
        """
        if self.ratio <= budget:
            return self.wall_seconds
        if self.late_ratio is None or self.late_ratio >= budget:
            return None
        debt_seconds = (self.ratio - budget) * self.wall_seconds
        return self.wall_seconds + debt_seconds / (budget - self.late_ratio)


@dataclass(frozen=True, slots=True)
class DemoLosses:
    """First and last of what the training script reported; None where it did not get that far."""

    first: float | None = None
    last: float | None = None
    validation_first: float | None = None
    validation_last: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The whole run.  None stands for what was not reached or not measured.

    `report` is what `pacecar report` says of the folder, None where no step was recorded.  `applied` is (start of the
    job, decision) -> rank -> the step of its first switch.
    """

    report: Report | None = None
    world_size: int | None = None
    steps: int = 0
    ledger_before: LedgerSum | None = None
    ledger_after: LedgerSum | None = None
    exact_before: LedgerSum | None = None
    exact_after: LedgerSum | None = None
    knobs_before: dict[str, KnobValue] = field(default_factory=dict)
    knobs_after: dict[str, KnobValue] = field(default_factory=dict)
    changes: tuple[ReportChange, ...] = ()
    applied: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    switches: int = 0
    overhead: DemoOverhead | None = None
    overhead_budget: float | None = None
    exploration_ns: int | None = None
    tuner: str | None = None
    losses: DemoLosses = field(default_factory=DemoLosses)
    ranks: tuple[RankCount, ...] = ()
    estimate_error: EstimateError | None = None
    what_if: WhatIf | None = None
    hello: JobHello | None = None
    refused_lines: int = 0

    @property
    def before(self) -> RunSide | None:
        """The steps before tuning; all steps where nothing was turned."""
        return None if self.report is None else self.report.before

    @property
    def after(self) -> RunSide | None:
        """The steps at the kept settings; where nothing was turned the same as before."""
        if self.report is None:
            return None
        return self.report.after if self.report.is_tuned else self.report.before

    @property
    def speedup(self) -> float | None:
        """Throughput after over before, or None when one of them is missing."""
        report = self.report
        if report is None or report.rate_unit != "samples" or self.before is None:
            return None
        if not report.is_tuned:
            return 1.0
        return None if report.change is None else 1 + report.change.change_ratio

    @property
    def overhead_ratio(self) -> float | None:
        """What pacecar cost over the wall time (0..1)."""
        return None if self.overhead is None else self.overhead.ratio

    @property
    def overhead_paid_by_seconds(self) -> float | None:
        """After how many seconds of training that is within the budget; None: never, or it cannot be computed."""
        if self.overhead is None or self.overhead_budget is None:
            return None
        return self.overhead.paid_by_seconds(self.overhead_budget)


def as_document(result: Result) -> dict[str, Any]:
    """Return `result` as plain values for result.json."""
    report, hello = result.report, result.hello
    return {
        "schema_version": SCHEMA_VERSION,
        "world_size": result.world_size,
        "steps": result.steps,
        "ledger_before": _ledger_document(result.ledger_before),
        "ledger_after": _ledger_document(result.ledger_after),
        "ledger_exact_before": _ledger_document(result.exact_before),
        "ledger_exact_after": _ledger_document(result.exact_after),
        "knobs_before": result.knobs_before,
        "knobs_after": result.knobs_after,
        "throughput_before": _throughput_document(result.report, result.before),
        "throughput_after": _throughput_document(result.report, result.after),
        "speedup": result.speedup,
        "proven_gain_ratio": None if report is None else report.proven_gain_ratio,
        "proven_gain_low": None if report is None else report.proven_gain_low,
        "proven_gain_high": None if report is None else report.proven_gain_high,
        "steps_before": _steps(result.before),
        "steps_after": _steps(result.after),
        "decisions": [
            {
                "decision": change.decision,
                "kind": change.kind,
                "knob": change.knob,
                "from": change.from_value,
                "to": change.to_value,
                "step_applied": {
                    str(rank): step
                    for rank, step in sorted(result.applied.get((change.life, change.decision), {}).items())
                },
                "expected_gain_ratio": change.expected_gain_ratio,
                "measured_gain_ratio": change.measured_gain_ratio,
                "gain_low": change.gain_low,
                "gain_high": change.gain_high,
                "verdict": change.outcome,
                "reason": change.reason,
            }
            for change in result.changes
        ],
        "switches": result.switches,
        "overhead_ratio": result.overhead_ratio,
        "overhead_late_ratio": None if result.overhead is None else result.overhead.late_ratio,
        "overhead_budget": result.overhead_budget,
        "overhead_paid_by_seconds": result.overhead_paid_by_seconds,
        "exploration_ns": result.exploration_ns,
        "estimate_error": None if result.estimate_error is None else msgspec.to_builtins(result.estimate_error),
        "what_if": None if result.what_if is None else msgspec.to_builtins(result.what_if),
        "tuner": result.tuner,
        "losses": {name: _finite(getattr(result.losses, name)) for name in DemoLosses.__slots__},
        "ranks": [{name: getattr(count, name) for name in RankCount.__slots__} for count in result.ranks],
        "job": None if hello is None else hello.job,
        "device": None if hello is None else hello.device,
        "backend": None if hello is None else hello.backend,
        "framework": None if hello is None else hello.framework,
        "pacecar_version": None if hello is None else hello.pacecar_version,
    }


def _ledger_document(total: LedgerSum | None) -> dict[str, Any] | None:
    if total is None:
        return None
    return {
        "rank": total.rank,
        "steps": total.steps,
        "source": {"estimate": total.estimate, "exact": total.exact},
        **{name: getattr(total.ledger, name) for name in Ledger.__struct_fields__},
    }


def _throughput_document(report: Report | None, side: RunSide | None) -> dict[str, Any] | None:
    """Return the report's rates; None where samples were not counted."""
    if report is None or side is None or side.rate is None or report.rate_unit != "samples":
        return None
    return {
        "samples_per_second": side.rate.median,
        "low": side.rate.p10,
        "high": side.rate.p90,
        "steps": side.steps,
        "windows": side.windows,
        "unit": "samples/s of the whole job",
        "method": METHOD.format(side.window_steps),
    }


def _steps(side: RunSide | None) -> tuple[int, int] | None:
    return None if side is None else (side.first[1], side.last[1])


def _finite(value: float | None) -> float | None:
    """Return `value`, or None where it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
