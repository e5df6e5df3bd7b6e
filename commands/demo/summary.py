"""Computes the Result of a demo from the records of all ranks: before and after, decisions, overhead and losses.

The obvious comparison, mean speed of the first half against the second, is wrong three times: it counts warm-up, it
counts trials (which are half spent in the setting that lost), and it counts profiled steps.  So *before* is the
unprofiled steps after warm-up up to the first switch, and *after* the unprofiled steps since the last switch at the
settings that were kept, without those in which a switch still settles.

The job's pace is that of its slowest rank, step by step.  Before and after lie minutes apart and a machine drifts: the
proof of a single change is its verdict, which was measured interleaved; this comparison is of the run as a whole.

Everything here is pure: no files, no clock, no terminal.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pacecar.records import (
    Decision,
    EstimateCheck,
    Goodbye,
    JobHello,
    JobRecord,
    KnobSwitch,
    KnobValue,
    StepRecord,
    TunerStatus,
    Verdict,
    WhatIf,
)
from pacecar.records.final_totals import completed
from pacecar.run_statistics import AFTER_STEPS_MIN, SETTLE_STEPS, WARMUP_STEPS, WINDOW_STEPS, estimate_error, percentile

from .result import DecisionOutcome, DemoLosses, DemoOverhead, LedgerSum, RankCount, Result, Throughput

__all__ = ["summarize"]


@dataclass(frozen=True, slots=True)
class _Run:
    """The records, sorted out: by rank and step, whatever order they were read in."""

    hellos: dict[int, JobHello]
    steps: dict[int, dict[int, StepRecord]]
    switches: list[KnobSwitch]
    decisions: list[Decision]
    verdicts: list[Verdict]
    statuses: list[TunerStatus]
    goodbyes: dict[int, Goodbye]
    counts: dict[int, int]
    checks: list[EstimateCheck]
    ladders: list[WhatIf]


LATE_NS_MIN = 3_000_000_000
"""A shorter stretch shows the cost of one window, and not what pacecar goes on costing."""


def summarize(
    records: Iterable[JobRecord], losses: DemoLosses | None = None, *, overhead_budget: float | None = None
) -> Result:
    """Return what `records` of all ranks, in any order, show.  No record is needed: what is missing is None."""
    run = _sort_out(records)
    lead = min(run.steps, default=None)
    world_size = max((hello.world_size for hello in run.hellos.values()), default=None)
    switch_steps = sorted({switch.step for switch in run.switches})
    judged = _judged(run, world_size)
    before = [step for step in judged if not switch_steps or step <= switch_steps[0]]
    knobs_before = _knobs_at(run, before, lead)
    settled = _settled(knobs_before, run)
    after = _after(run, judged, switch_steps, settled, lead) if switch_steps else before
    last = {rank: completed(steps[max(steps)], run.goodbyes.get(rank)) for rank, steps in run.steps.items()}
    status = max(run.statuses, key=lambda s: (s.step, s.wall_ns), default=None)
    return Result(
        world_size=world_size,
        steps=max((record.total_steps for record in last.values()), default=0),
        ledger_before=_ledger(run, before, lead),
        ledger_after=_ledger(run, after, lead),
        exact_before=_ledger(run, _profiled(run, lead, 0, switch_steps[0] if switch_steps else None), lead),
        exact_after=_ledger(run, _profiled(run, lead, switch_steps[-1] if switch_steps else 0, None), lead),
        knobs_before=knobs_before,
        knobs_after=settled,
        throughput_before=_throughput(run, before),
        throughput_after=_throughput(run, after),
        decisions=_outcomes(run),
        switches=len({switch.epoch for switch in run.switches}),
        overhead=_overhead(run, switch_steps, list(last.values())),
        overhead_budget=overhead_budget,
        exploration_ns=status.exploration_ns if status is not None else None,
        tuner=f"{status.state}: {status.detail}" if status is not None else None,
        losses=losses or DemoLosses(),
        ranks=_ranks(run),
        steps_before=(before[0], before[-1]) if before else None,
        steps_after=(after[0], after[-1]) if after else None,
        estimate_error=estimate_error([check.error for check in run.checks if check.error is not None]),
        what_if=_last_ladder(run.ladders),
        hellos=tuple(run.hellos[rank] for rank in sorted(run.hellos)),
    )


def _sort_out(records: Iterable[JobRecord]) -> _Run:
    run = _Run({}, {}, [], [], [], [], {}, {}, [], [])
    for record in records:
        rank = getattr(record, "rank", None)
        if rank is not None:
            run.counts[rank] = run.counts.get(rank, 0) + 1
        match record:
            case StepRecord():
                run.steps.setdefault(record.rank, {})[record.step] = record
            case JobHello():
                run.hellos[record.rank] = record
            case KnobSwitch():
                run.switches.append(record)
            case Decision():
                run.decisions.append(record)
            case Verdict():
                run.verdicts.append(record)
            case TunerStatus():
                run.statuses.append(record)
            case EstimateCheck():
                run.checks.append(record)
            case WhatIf():
                run.ladders.append(record)
            case Goodbye():
                run.goodbyes[record.rank] = record
    return run


def _judged(run: _Run, world_size: int | None) -> list[int]:
    """Return, ascending, the steps that every rank reported, unprofiled on all, after warm-up."""
    if not run.steps or (world_size is not None and len(run.steps) < world_size):
        return []  # the pace of the slowest rank is not known when a rank is silent
    ranks = list(run.steps.values())
    first = min(min(steps) for steps in ranks)
    return sorted(
        step
        for step in ranks[0]
        if step >= first + WARMUP_STEPS and all(step in s and s[step].source == "estimate" for s in ranks)
    )


def _profiled(run: _Run, lead: int | None, above: int, upto: int | None) -> list[int]:
    """Return the profiled steps of the lead rank in (above, upto]."""
    steps = run.steps.get(lead, {}) if lead is not None else {}
    return sorted(
        step
        for step, record in steps.items()
        if record.source == "exact" and step > above and (upto is None or step <= upto)
    )


def _knobs_at(run: _Run, steps: Sequence[int], lead: int | None) -> dict[str, KnobValue]:
    """Return the values in force in the last of `steps`, else in the first step of all."""
    if lead is None:
        return {}
    step = steps[-1] if steps else min(run.steps[lead])
    return dict(run.steps[lead][step].knobs.values)


def _settled(initial: Mapping[str, KnobValue], run: _Run) -> dict[str, KnobValue]:
    """Return the values that the verdicts left: the initial ones with every kept change."""
    wanted = {decision.decision: decision for decision in run.decisions}
    settled = dict(initial)
    for verdict in sorted(run.verdicts, key=lambda v: (v.step, v.decision)):
        if verdict.outcome == "kept" and verdict.decision in wanted:
            settled[verdict.knob] = wanted[verdict.decision].to_value
    return settled


def _after(
    run: _Run, judged: Sequence[int], switch_steps: Sequence[int], settled: Mapping[str, KnobValue], lead: int | None
) -> list[int]:
    """Return the judged steps at the kept settings since the last switch.

    When those are too few (the run ended inside a trial) all since the last kept change count, so the trial's
    windows at the kept settings too.
    """
    if lead is None:
        return []
    kept = max((v.step for v in run.verdicts if v.outcome == "kept"), default=switch_steps[0])
    settling = {switch + offset for switch in switch_steps for offset in range(1, SETTLE_STEPS + 1)}
    at_settled = [
        step
        for step in judged
        if step not in settling and step > switch_steps[0] and run.steps[lead][step].knobs.values == settled
    ]
    latest = [step for step in at_settled if step > switch_steps[-1]]
    if len(latest) >= AFTER_STEPS_MIN:
        return latest
    return [step for step in at_settled if step > kept] or at_settled


def _ledger(run: _Run, steps: Sequence[int], lead: int | None) -> LedgerSum | None:
    if lead is None or not steps:
        return None
    records = [run.steps[lead][step] for step in steps]
    total = records[0].ledger
    for record in records[1:]:
        total = total + record.ledger
    exact = sum(record.source == "exact" for record in records)
    return LedgerSum(lead, len(records), len(records) - exact, exact, total)


def _throughput(run: _Run, steps: Sequence[int]) -> Throughput | None:
    windows = []
    for window in _windows(steps):
        rows = [[ranks[step] for ranks in run.steps.values()] for step in window]
        samples = [record.samples for row in rows for record in row]
        wall_ns = sum(max(record.wall_ns for record in row) for row in rows)
        if wall_ns > 0 and None not in samples:
            windows.append(sum(s for s in samples if s is not None) / (wall_ns / 1e9))
    if not windows:
        return None
    ordered = sorted(windows)
    low, high = percentile(ordered, 0.1), percentile(ordered, 0.9)
    return Throughput(statistics.median(windows), low, high, len(steps), len(windows))


def _windows(steps: Sequence[int]) -> list[Sequence[int]]:
    """Cut `steps` into windows of WINDOW_STEPS neighbours in time; a shorter rest counts when there is no other."""
    whole = [steps[i : i + WINDOW_STEPS] for i in range(0, len(steps) - WINDOW_STEPS + 1, WINDOW_STEPS)]
    return whole or ([steps] if steps else [])


def _overhead(run: _Run, switch_steps: Sequence[int], last: Sequence[StepRecord]) -> DemoOverhead | None:
    """Return what pacecar cost in all, and in the last stretch of at least LATE_NS_MIN between two switches."""
    wall_ns = sum(record.totals.wall_ns for record in last)
    if wall_ns <= 0:
        return None
    late = None
    edges = [*switch_steps, max(record.step for record in last)]
    for begin, end in zip(reversed(edges[:-1]), reversed(edges[1:]), strict=True):
        stretches = [_stretch(steps, begin + SETTLE_STEPS, end) for steps in run.steps.values()]
        stretch_wall_ns = sum(wall for wall, _ in stretches)
        if stretch_wall_ns >= LATE_NS_MIN * len(stretches):
            late = sum(cost for _, cost in stretches) / stretch_wall_ns
            break
    return DemoOverhead(
        ratio=sum(record.total_overhead_ns for record in last) / wall_ns,
        wall_seconds=max(record.totals.wall_ns for record in last) / 1e9,
        late_ratio=late,
    )


def _stretch(steps: Mapping[int, StepRecord], begin: int, end: int) -> tuple[int, int]:
    """Return the wall time of one rank from `begin` to `end`, and what pacecar cost in it."""
    inside = [record for step, record in steps.items() if begin <= step <= end]
    if len(inside) < 2:
        return 0, 0
    first, last = min(inside, key=lambda r: r.step), max(inside, key=lambda r: r.step)
    return last.totals.wall_ns - first.totals.wall_ns, last.total_overhead_ns - first.total_overhead_ns


def _outcomes(run: _Run) -> tuple[DecisionOutcome, ...]:
    verdicts = {verdict.decision: verdict for verdict in run.verdicts}
    applied: dict[int, dict[int, int]] = {}
    for switch in sorted(run.switches, key=lambda s: s.step, reverse=True):
        # The first switch of a decision counts; later ones are the trial alternating between its two settings.
        applied.setdefault(switch.decision, {})[switch.rank] = switch.step
    outcomes = []
    for decision in sorted({d.decision: d for d in run.decisions}.values(), key=lambda d: d.decision):
        verdict = verdicts.get(decision.decision)
        outcomes.append(
            DecisionOutcome(
                decision=decision.decision,
                kind=decision.kind,
                knob=decision.knob,
                from_value=decision.from_value,
                to_value=decision.to_value,
                step_applied=applied.get(decision.decision, {}),
                expected_gain_ratio=decision.expected_gain_ratio,
                measured_gain_ratio=verdict.measured_gain_ratio if verdict is not None else None,
                gain_low=verdict.gain_low if verdict is not None else None,
                gain_high=verdict.gain_high if verdict is not None else None,
                verdict=verdict.outcome if verdict is not None else None,
                reason=verdict.reason if verdict is not None else decision.reason,
            )
        )
    return tuple(outcomes)


def _last_ladder(ladders: Sequence[WhatIf]) -> WhatIf | None:
    """Return the job's last what-if record; without one the last of the lowest rank that has any."""
    whole = [ladder for ladder in ladders if ladder.of_rank is None]
    if whole:
        return max(whole, key=lambda ladder: ladder.step)
    return min(ladders, key=lambda ladder: (ladder.of_rank or 0, -ladder.step), default=None)


def _ranks(run: _Run) -> tuple[RankCount, ...]:
    counts = []
    for rank in sorted(run.counts):
        steps = run.steps.get(rank, {})
        counts.append(
            RankCount(
                rank=rank,
                steps=len(steps),
                records=run.counts[rank],
                dropped_records=steps[max(steps)].dropped_records if steps else None,
                last_words=run.goodbyes[rank].reason if rank in run.goodbyes else None,
            )
        )
    return tuple(counts)
