"""Computes what-if bounds of the running job every WHAT_IF_SECONDS: the most that removing one cost could save.

The last step alone is not enough: one step in ten waits for data and one in a hundred saves a checkpoint.  So the
bounds are computed from the mean of all steps since the last ones.  Each rank computes its own, from the totals that
its step records carry anyway.  Rank 0 also computes those of the whole job, from the totals of all ranks in the range
messages.

In a collective all ranks are busy from the moment they arrive until the last one has, and that is no work of the link.
What the link itself takes is at most what it takes the rank that waits least; all above that is waiting.

There are no bounds before the first calibration: a ledger that is mostly `unknown` would say that nothing helps.

Left out: how a bound is computed (`what_if_bounds`), and which rank is late (`straggler_detector`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import JobRecord, Ledger, Rung, StepRecord, WhatIf

from ..ledger.what_if_bounds import Runner, climb
from .exchange.totals import LedgerTotals, totals_of

__all__ = ["STEPS_MIN", "WHAT_IF_SECONDS", "JobWhatIf", "RankStretch", "RankWhatIf", "ladder_of"]

WHAT_IF_SECONDS = 10.0
"""Time between two records of bounds: a person reads them, and a single odd step is one of many by then."""

STEPS_MIN = 8
"""The fewest steps that bounds are computed from, however long the steps are."""


class RankStretch(NamedTuple):
    """The sum of the ledgers of `steps` steps of one rank."""

    ledger: Ledger
    steps: int


class RankWhatIf:
    """The what-if bounds of one rank: a `RecordSink` that reads step records and emits WhatIf.

    `is_job`: this rank is the whole job.
    """

    def __init__(self, emit: Callable[[JobRecord], None], *, is_job: bool) -> None:
        self._emit = emit
        self._is_job = is_job
        self._since: tuple[StepRecord, LedgerTotals] | None = None
        self._oldest_steps = 0
        self.dropped = 0

    def put(self, record: JobRecord) -> None:
        """Read `record`; emit bounds when it is a step record and they are due."""
        if not isinstance(record, StepRecord):
            return
        since = self._since
        if record.calibration_age_steps is not None:
            self._oldest_steps = max(self._oldest_steps, record.calibration_age_steps)
        if since is not None and record.ended_wall_ns - since[0].ended_wall_ns < WHAT_IF_SECONDS * NS_PER_SECOND:
            return
        totals = totals_of(record)
        if totals is None:
            return
        if since is None:  # the totals before the first calibration are mostly unknown
            self._since = (record, totals)
            return
        stretch = _between(since[1], totals)
        if stretch.steps < STEPS_MIN:
            return
        said = ladder_of(
            [stretch],
            job=record.job,
            of_rank=None if self._is_job else record.rank,
            step=record.step,
            wall_ns=record.ended_wall_ns,
            straggler_saved_ns=None,
            age_steps=self._oldest_steps,
        )
        self._since, self._oldest_steps = (record, totals), 0
        if said is not None:
            self._emit(said)

    def close(self, timeout_seconds: float) -> None:
        """Hold nothing."""


class JobWhatIf:
    """The what-if bounds of the whole job, on rank 0, from the totals received from all ranks."""

    def __init__(self, job: str, emit: Callable[[JobRecord], None]) -> None:
        self._job = job
        self._emit = emit
        self._since: tuple[int, list[LedgerTotals]] | None = None
        self._oldest_steps = 0

    def record(
        self,
        ranks: Sequence[LedgerTotals | None],
        *,
        now_ns: int,
        wall_ns: int,
        excesses_ns: Iterable[int],
    ) -> None:
        """Add the totals of all ranks at monotonic time `now_ns`; emit bounds when they are due.

        `excesses_ns` are those of the ranks that are late now; the job would gain the largest.
        """
        known = [totals for totals in ranks if totals is not None]
        if len(known) < len(ranks):
            return
        self._oldest_steps = max(self._oldest_steps, *(totals.age_steps for totals in known))
        if self._since is None:
            self._since = now_ns, known
            return
        since_ns, before = self._since
        if now_ns - since_ns < WHAT_IF_SECONDS * NS_PER_SECOND:
            return
        stretches = [_between(old, new) for old, new in zip(before, known, strict=True)]
        if min(stretch.steps for stretch in stretches) < STEPS_MIN:
            return
        said = ladder_of(
            stretches,
            job=self._job,
            of_rank=None,
            step=min(totals.step for totals in known),
            wall_ns=wall_ns,
            straggler_saved_ns=float(max(excesses_ns, default=0)),
            age_steps=self._oldest_steps,
        )
        self._since, self._oldest_steps = (now_ns, known), 0
        if said is not None:
            self._emit(said)


def ladder_of(
    ranks: Sequence[RankStretch],
    *,
    job: str,
    of_rank: int | None,
    step: int,
    wall_ns: int,
    straggler_saved_ns: float | None,
    age_steps: int,
) -> WhatIf | None:
    """Return the what-if bounds of `ranks` together; None when no time passed."""
    link_ns = min(one.ledger.communication_ns / one.steps for one in ranks)
    climbs = climb(
        [Runner(one.ledger, one.steps, one.ledger.communication_ns - int(link_ns * one.steps)) for one in ranks],
        straggler_saved_ns,
    )
    if not climbs:
        return None
    return WhatIf(
        job=job,
        of_rank=of_rank,
        step=step,
        wall_ns=wall_ns,
        steps=min(one.steps for one in ranks),
        pace_ns=round(climbs[0].pace_ns),
        source="estimate" if age_steps else "exact",
        calibration_age_steps=age_steps,
        rungs=tuple(Rung(rung.name, round(rung.step_ns), rung.gain_ratio, rung.bound) for rung in climbs),
    )


def _between(before: LedgerTotals, after: LedgerTotals) -> RankStretch:
    parts = {
        name: _gained(getattr(before.ledger, name), getattr(after.ledger, name)) for name in Ledger.__struct_fields__
    }
    return RankStretch(Ledger(**parts), after.steps - before.steps)


def _gained(before: int | None, after: int | None) -> Any:  # noqa: ANN401  as the field's type
    return None if after is None else after - (0 if before is None else before)
