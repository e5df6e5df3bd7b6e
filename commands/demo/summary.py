"""Computes the Result of a demo: the report of its run folder, and what result.json holds beside that.

What counts as before and after, rates, changes, proof and what-if bounds are the report's, so the demo's end,
result.json and `pacecar report` say the same of one run.  Its own are the ledgers of the lowest rank (a report has the
mean of all ranks), the step at which each rank applied a decision, and what pacecar cost of late.

A demo takes minutes, so its steps are held in memory here, which a report never does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pacecar.records import JobRecord, KnobSwitch, KnobValue, Ledger, StepRecord
from pacecar.run_statistics import SETTLE_STEPS, estimate_error

from ..report.build import BuildOptions, build_report, choose_job, empty_sums
from ..report.document import Report
from ..report.reading.before_after import SettingStretch
from ..report.reading.inputs import Row, find_inputs
from ..report.reading.notices import ReportError
from ..report.reading.run_index import Key, RunIndex, gather
from ..report.reading.step_join import weave
from ..report.reading.step_sums import StepSums
from ..report.sections.events import changes_of
from .result import DemoLosses, DemoOverhead, LedgerSum, RankCount, Result

__all__ = ["summarize"]

LATE_NS_MIN = 3_000_000_000
"""A shorter stretch shows the cost of one window, and not what pacecar goes on costing."""


@dataclass(frozen=True, slots=True)
class _Step:
    """A step of all ranks that recorded it, by rank; `stretch` is None where it counts in no pace."""

    key: Key
    stretch: SettingStretch | None
    records: dict[int, StepRecord]


def summarize(folder: Path, losses: DemoLosses | None = None, *, overhead_budget: float | None = None) -> Result:
    """Return what the records in `folder` show.  No record is needed: what is missing is None."""
    losses = losses or DemoLosses()
    try:
        inputs = find_inputs(folder)
        rows = list(inputs.told())
        story = choose_job(gather(rows), inputs, None)
    except ReportError:
        return Result(losses=losses, overhead_budget=overhead_budget)
    counts = _Counts()
    counts.add(record for _, _, _, record in rows)
    sums = empty_sums(inputs, story)
    steps: list[_Step] = []
    for key, measured in weave(inputs.measured(), story.job, inputs.notices):
        stretch = sums.add(key, measured)
        counts.add(record for _, record in measured)
        steps.append(_Step(key, stretch, {rank: one for rank, one in measured if isinstance(one, StepRecord)}))
    sums.complete(story.goodbyes, story.lives)
    report = _report(folder)
    lead = min((rank for step in steps for rank in step.records), default=None)
    leads = [(step, step.records[lead]) for step in steps if lead in step.records] if lead is not None else []
    after = sums.stretches_after() if story.first_switch is not None else [SettingStretch.BEFORE]
    exact = [(step.key, record) for step, record in leads if record.source == "exact"]
    knobs_before = _knobs_before(report, leads)
    return Result(
        report=report,
        world_size=story.world_size,
        steps=0 if report is None else report.steps,
        ledger_before=_ledger([record for step, record in leads if step.stretch is SettingStretch.BEFORE]),
        ledger_after=_ledger([record for step, record in leads if step.stretch in after]),
        exact_before=_ledger([one for key, one in exact if story.first_switch is None or key <= story.first_switch]),
        exact_after=_ledger([one for key, one in exact if story.last_switch is None or key > story.last_switch]),
        knobs_before=knobs_before,
        knobs_after=story.settled() or knobs_before,
        changes=changes_of(story),
        applied=_applied(rows),
        switches=len({(life, row.epoch) for _, life, _, row in rows if isinstance(row, KnobSwitch)}),
        overhead=_overhead(story, sums, steps),
        overhead_budget=overhead_budget,
        exploration_ns=story.explored_ns,
        tuner=story.tuner,
        losses=losses,
        ranks=counts.ranks(story, sums),
        estimate_error=estimate_error(story.checks),
        what_if=story.last_ladder,
        hello=story.hellos.get(min(story.hellos, default=0)),
        refused_lines=inputs.notices.count("malformed", "long", "kind"),
    )


def _report(folder: Path) -> Report | None:
    try:
        return build_report(find_inputs(folder), BuildOptions()).report
    except ReportError:
        return None  # not one step


class _Counts:
    """Counts the records of each rank, and the steps among them."""

    def __init__(self) -> None:
        self._records: dict[int, int] = {}
        self._steps: dict[int, int] = {}

    def add(self, records: Iterable[JobRecord]) -> None:
        """Count `records`; what is said of the whole job belongs to no rank."""
        for record in records:
            rank = getattr(record, "rank", None)
            if rank is not None:
                self._records[rank] = self._records.get(rank, 0) + 1
                self._steps[rank] = self._steps.get(rank, 0) + isinstance(record, StepRecord)

    def ranks(self, story: RunIndex, sums: StepSums) -> tuple[RankCount, ...]:
        """Return what was counted, with each rank's drops and last words."""
        byes = {rank: bye for (_, rank), bye in story.goodbyes.items()}
        return tuple(
            RankCount(
                rank=rank,
                steps=self._steps[rank],
                records=count,
                dropped_records=_last(sums, rank).dropped_records if self._steps[rank] else None,
                last_words=byes[rank].reason if rank in byes else None,
            )
            for rank, count in sorted(self._records.items())
        )


def _last(sums: StepSums, rank: int) -> StepRecord:
    lives = sums.ranks[rank].lives
    return lives[max(lives)]


def _knobs_before(report: Report | None, leads: Sequence[tuple[_Step, StepRecord]]) -> dict[str, KnobValue]:
    """Return the values in force in the last step before tuning, else in the first step of all."""
    if report is not None and report.before is not None:
        return report.before.knobs
    return dict(leads[0][1].knobs.values) if leads else {}


def _ledger(records: Sequence[StepRecord]) -> LedgerSum | None:
    """Return the sum over the calibrated steps, over all where none is (`StepSumPart`); None without any."""
    records = [one for one in records if one.calibration_age_steps is not None] or records
    if not records:
        return None
    total = Ledger(wall_ns=0, data_wait_ns=None)
    for record in records:
        total = total + record.ledger
    exact = sum(record.source == "exact" for record in records)
    return LedgerSum(records[0].rank, len(records), len(records) - exact, exact, total)


def _applied(rows: Iterable[Row]) -> dict[Key, dict[int, int]]:
    """Return decision -> rank -> the step of its first switch; later ones are the trial going to and fro."""
    applied: dict[Key, dict[int, int]] = {}
    for rank, life, _, record in rows:
        if isinstance(record, KnobSwitch):
            steps = applied.setdefault((life, record.decision), {})
            steps[rank] = min(record.step, steps.get(rank, record.step))
    return applied


def _overhead(story: RunIndex, sums: StepSums, steps: Sequence[_Step]) -> DemoOverhead | None:
    """Return what pacecar cost in all, and in the last stretch of at least LATE_NS_MIN between two switches."""
    last = [_last(sums, rank) for rank, total in sums.ranks.items() if total.lives]
    wall_ns = sum(record.totals.wall_ns for record in last)
    if wall_ns <= 0:
        return None
    late = None
    edges = [*sorted({key for key, _ in story.switches}), steps[-1].key]
    ranks = {rank for step in steps for rank in step.records}
    for (life, begin), end in zip(reversed(edges[:-1]), reversed(edges[1:]), strict=True):
        inside = [step.records for step in steps if (life, begin + SETTLE_STEPS) <= step.key <= end]
        stretches = [_stretch([records[rank] for records in inside if rank in records]) for rank in ranks]
        stretch_wall_ns = sum(wall for wall, _ in stretches)
        if stretch_wall_ns >= LATE_NS_MIN * len(stretches):
            late = sum(cost for _, cost in stretches) / stretch_wall_ns
            break
    return DemoOverhead(
        ratio=sum(record.total_overhead_ns for record in last) / wall_ns,
        wall_seconds=max(record.totals.wall_ns for record in last) / 1e9,
        late_ratio=late,
    )


def _stretch(records: Sequence[StepRecord]) -> tuple[int, int]:
    """Return the wall time of one rank over `records`, and what pacecar cost in it."""
    if len(records) < 2:
        return 0, 0
    first, last = records[0], records[-1]
    return last.totals.wall_ns - first.totals.wall_ns, last.total_overhead_ns - first.total_overhead_ns
