"""Defines the result of a demo: the values that the closing table and result.json show.

A field is None where the run did not get that far or nothing was measured: a run that was stopped in its warm-up has
a result too.  `pacecar.commands.demo.summary` computes them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pacecar.records import JobHello, KnobValue, Ledger, WhatIf
from pacecar.run_statistics import WINDOW_STEPS, EstimateError, Proven, proven

__all__ = [
    "METHOD",
    "DecisionOutcome",
    "DemoLosses",
    "DemoOverhead",
    "LedgerSum",
    "RankCount",
    "Result",
    "Throughput",
    "as_document",
]

METHOD = (
    f"median over windows of {WINDOW_STEPS} consecutive unprofiled steps, low and high their 10th and 90th percentile;"
    " a step takes as long as its slowest rank, samples of all ranks"
)

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Throughput:
    """Samples a second of the whole job, from `steps` steps in `windows` windows."""

    samples_per_second: float
    low: float
    high: float
    steps: int
    windows: int


@dataclass(frozen=True, slots=True)
class LedgerSum:
    """The ledgers of `steps` steps of one rank, added up; `estimate` and `exact` count where they came from."""

    rank: int
    steps: int
    estimate: int
    exact: int
    ledger: Ledger


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """A decision and what became of it; None where there is no verdict (yet) or nothing was measured."""

    decision: int
    kind: str
    knob: str
    from_value: KnobValue
    to_value: KnobValue
    step_applied: dict[int, int]
    expected_gain_ratio: float | None
    measured_gain_ratio: float | None
    gain_low: float | None
    gain_high: float | None
    verdict: str | None
    reason: str


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


@dataclass(frozen=True, slots=True)
class Result:
    """The whole run.  None stands for what was not reached or not measured."""

    world_size: int | None
    steps: int
    ledger_before: LedgerSum | None
    ledger_after: LedgerSum | None
    exact_before: LedgerSum | None
    exact_after: LedgerSum | None
    knobs_before: dict[str, KnobValue]
    knobs_after: dict[str, KnobValue]
    throughput_before: Throughput | None
    throughput_after: Throughput | None
    decisions: tuple[DecisionOutcome, ...]
    switches: int
    overhead: DemoOverhead | None
    exploration_ns: int | None
    tuner: str | None
    losses: DemoLosses
    ranks: tuple[RankCount, ...]
    steps_before: tuple[int, int] | None = None
    steps_after: tuple[int, int] | None = None
    estimate_error: EstimateError | None = None
    what_if: WhatIf | None = None
    overhead_budget: float | None = None
    hellos: tuple[JobHello, ...] = field(default=())

    @property
    def kept(self) -> tuple[DecisionOutcome, ...]:
        """The decisions that were kept."""
        return tuple(outcome for outcome in self.decisions if outcome.verdict == "kept")

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

    @property
    def proven(self) -> Proven:
        """Share of step time that the kept changes save together, each as its paired trial measured it.

        Unlike `speedup` it does not compare minutes that lie apart, so another load on the machine in between is
        not in it.
        """
        return proven(self.kept)

    @property
    def speedup(self) -> float | None:
        """Throughput after over before, or None when one of them is missing."""
        if self.throughput_before is None or self.throughput_after is None:
            return None
        return self.throughput_after.samples_per_second / self.throughput_before.samples_per_second


def as_document(result: Result) -> dict[str, Any]:
    """Return `result` as plain values for result.json; see docs for its keys."""
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
        "throughput_before": _throughput_document(result.throughput_before),
        "throughput_after": _throughput_document(result.throughput_after),
        "speedup": result.speedup,
        "proven_gain_ratio": result.proven.ratio,
        "proven_gain_low": result.proven.low,
        "proven_gain_high": result.proven.high,
        "steps_before": result.steps_before,
        "steps_after": result.steps_after,
        "decisions": [
            {
                "decision": outcome.decision,
                "kind": outcome.kind,
                "knob": outcome.knob,
                "from": outcome.from_value,
                "to": outcome.to_value,
                "step_applied": {str(rank): step for rank, step in sorted(outcome.step_applied.items())},
                "expected_gain_ratio": outcome.expected_gain_ratio,
                "measured_gain_ratio": outcome.measured_gain_ratio,
                "gain_low": outcome.gain_low,
                "gain_high": outcome.gain_high,
                "verdict": outcome.verdict,
                "reason": outcome.reason,
            }
            for outcome in result.decisions
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
        "job": result.hellos[0].job if result.hellos else None,
        "device": result.hellos[0].device if result.hellos else None,
        "backend": result.hellos[0].backend if result.hellos else None,
        "framework": result.hellos[0].framework if result.hellos else None,
        "pacecar_version": result.hellos[0].pacecar_version if result.hellos else None,
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


def _throughput_document(throughput: Throughput | None) -> dict[str, Any] | None:
    if throughput is None:
        return None
    return {
        **{name: getattr(throughput, name) for name in Throughput.__slots__},
        "unit": "samples/s of the whole job",
        "method": METHOD,
    }


def _finite(value: float | None) -> float | None:
    """Return `value`, or None where it is not finite: JSON has no NaN."""
    return value if value is not None and math.isfinite(value) else None
