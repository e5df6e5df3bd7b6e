"""Computes what-if bounds of the running job every WHAT_IF_SECONDS: the most that removing one cost could save.

One step is not enough: one step in ten waits for data and one in a hundred saves a checkpoint.  So the bounds are
computed from the mean of all steps since the last record.  Each rank computes its own from the totals in its step
records.  Rank 0 also computes those of the job from all ranks' totals in the range messages.

In a collective all ranks are busy from when they arrive until the last one does.  The link itself takes at most as long
as for the rank that waits least; everything above that is waiting.

There are no bounds before the first calibration: a ledger that is mostly `unknown` would show no gain anywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from pacecar.clock import NS_PER_SECOND
from pacecar.ledger.what_if_bounds import POINT_TO_POINT, RankLedger, bounds_of
from pacecar.records import Cause, CollectiveWindow, JobRecord, Ledger, StepRecord, Straggler, WhatIf

from .exchange.totals import LedgerTotals, totals_of

__all__ = ["STEPS_MIN", "WHAT_IF_SECONDS", "RankWhatIf", "WhatIfSchedule", "what_if_of"]

WHAT_IF_SECONDS = 10.0
"""Time between two records of bounds: people read them, and a single odd step is one of many by then."""

STEPS_MIN = 8
"""The fewest steps that bounds are computed from, however long the steps are."""

_IN_ALL = frozenset({Cause.DATA_WAIT, Cause.HOST_BOUND, Cause.LINK})
"""Causes whose heading the bound "all" removes by itself."""


class WhatIfSchedule:
    """Emits the what-if bounds of a job (`of_rank` None) or of one of its ranks when they are due.

    A pipeline has no bound for communication.
    """

    def __init__(
        self, job: str, of_rank: int | None, emit: Callable[[JobRecord], None], is_pipeline: Callable[[], bool]
    ) -> None:
        self._job = job
        self._of_rank = of_rank
        self._emit = emit
        self._is_pipeline = is_pipeline
        self._since: tuple[int, list[LedgerTotals]] | None = None
        self._oldest_steps = 0

    def is_due(self, record: StepRecord) -> bool:
        """Return whether the totals of `record` are needed; keeps the age of its estimate.

        Most records are not: this costs a fifth of `record`, and each measured step pays for it.
        """
        age_steps = record.calibration_age_steps
        if age_steps is not None and record.source != "exact" and age_steps > self._oldest_steps:
            self._oldest_steps = age_steps
        return self._since is None or record.ended_wall_ns - self._since[0] >= WHAT_IF_SECONDS * NS_PER_SECOND

    def record(
        self,
        ranks: Sequence[LedgerTotals | None],
        *,
        now_ns: int,
        wall_ns: int,
        stragglers: Collection[Straggler] | None = None,
    ) -> None:
        """Add the totals of the ranks at `now_ns`, on one clock for all calls; emit bounds when they are due.

        `stragglers` are late now; None if the ranks are not compared.
        """
        known = [totals for totals in ranks if totals is not None]
        if len(known) < len(ranks):
            return
        step = min(totals.step for totals in known)
        ages = (totals.age_steps and max(1, totals.age_steps - (totals.step - step)) for totals in known)
        self._oldest_steps = max(self._oldest_steps, *ages)
        if self._since is None:  # the totals before the first calibration are mostly unknown
            self._since = now_ns, known
            return
        since_ns, before = self._since
        if now_ns - since_ns < WHAT_IF_SECONDS * NS_PER_SECOND:
            return
        if min(new.steps - old.steps for old, new in zip(before, known, strict=True)) < STEPS_MIN:
            return
        found = what_if_of(
            list(zip(before, known, strict=True)),
            job=self._job,
            of_rank=self._of_rank,
            step=step,
            wall_ns=wall_ns,
            stragglers=stragglers,
            age_steps=self._oldest_steps,
            is_pipeline=self._is_pipeline(),
        )
        self._since, self._oldest_steps = (now_ns, known), 0
        if found is not None:
            self._emit(found)


class RankWhatIf:
    """The what-if bounds of one rank: a `RecordSink` that reads step records.  `is_job`: it is the whole job."""

    def __init__(self, job: str, rank: int, emit: Callable[[JobRecord], None], *, is_job: bool) -> None:
        self._schedule = WhatIfSchedule(job, None if is_job else rank, emit, lambda: self.is_pipeline)
        self.dropped = 0
        self.is_pipeline = False
        """Whether any window saw point-to-point communication."""

    def put(self, record: JobRecord) -> None:
        """Read `record`; emit bounds if it is a step record and they are due."""
        if isinstance(record, CollectiveWindow):
            self.is_pipeline |= any(one.operation in POINT_TO_POINT for one in record.sums)
        elif isinstance(record, StepRecord) and self._schedule.is_due(record):
            self._schedule.record([totals_of(record)], now_ns=record.ended_wall_ns, wall_ns=record.ended_wall_ns)

    def close(self, timeout_seconds: float) -> None:
        """Do nothing: no record is held."""


def what_if_of(
    totals: Sequence[tuple[LedgerTotals, LedgerTotals]],
    *,
    job: str,
    of_rank: int | None,
    step: int,
    wall_ns: int,
    age_steps: int,
    stragglers: Collection[Straggler] | None = None,
    is_pipeline: bool = False,
) -> WhatIf | None:
    """Return the what-if bounds of ranks together, from each one's totals before and after; None if no time passed."""
    ranks = [(_between(before.ledger, after.ledger), after.steps - before.steps) for before, after in totals]
    link_ns = min(ledger.communication_ns / steps for ledger, steps in ranks)
    pace, bounds = bounds_of(
        [RankLedger(ledger, steps, ledger.communication_ns - int(link_ns * steps)) for ledger, steps in ranks],
        straggler_saved_ns=None if stragglers is None else _most_excess(stragglers),
        straggler_beside_ns=_most_excess(late for late in stragglers or () if late.cause not in _IN_ALL),
        is_pipeline=is_pipeline,
    )
    if not bounds:
        return None
    return WhatIf(
        job=job,
        of_rank=of_rank,
        step=step,
        wall_ns=wall_ns,
        steps=min(steps for _, steps in ranks),
        pace_ns=round(pace),
        source="estimate" if age_steps else "exact",
        calibration_age_steps=age_steps,
        rungs=tuple(bounds),
    )


def _most_excess(stragglers: Iterable[Straggler]) -> float:
    return float(max((late.excess_ns for late in stragglers), default=0))


def _between(before: Ledger, after: Ledger) -> Ledger:
    return Ledger(
        **{name: _difference(getattr(before, name), getattr(after, name)) for name in Ledger.__struct_fields__}
    )


def _difference(before: int | None, after: int | None) -> Any:  # noqa: ANN401  as the field's type
    return None if after is None else after - (0 if before is None else before)
