"""Builds one job's part of the status document from the job's view.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND
from pacecar.records import Decision, JobHello, Knobs, Verdict, WhatIf
from pacecar.records.commands import KnobValue
from pacecar.records.judged_decision import JudgedDecision, by_number, pair
from pacecar.records.status_document import HangStatus, JobStatus, Ladder, LateRank, Move, Rank, Saving, TunerView

from ..jobs.cgroup_identity import Residence
from ..jobs.tracked_job import JobView, RankView

__all__ = ["MOVES_MAX", "Elapsed", "job_document", "seconds"]

MOVES_MAX = 16
"""Decisions in a document; `pacecar tune status` has them all."""

TEXT_MAX = 400
"""Characters kept of a text that a job sent: every viewer gets it at every tick."""


class Elapsed(NamedTuple):
    """What a job's ranks did during `window_ns`: time by heading, steps (mean of the ranks), samples and tokens (sums).

    Samples or tokens are None if a rank does not count them.
    """

    window_ns: int
    parts_ns: dict[str, int]
    steps: float
    samples: int | None
    tokens: int | None


def job_document(
    job: JobView, title: str, lately: Elapsed | None, ranks_max: int, residence: Callable[[JobHello], Residence]
) -> JobStatus:
    """Return the document of `job`, called `title`; `lately` is what its ranks did recently."""
    steps = [rank.step for rank in job.ranks if rank.step is not None]
    shown = _shown(job, ranks_max)
    ledger = job.health.ledger
    pace_ns = max((step.wall_ns for step in steps), default=None) if ledger is None else ledger.pace_ns
    mfus = [
        rank.vitals.mfu_ratio for rank in job.ranks if rank.vitals is not None and rank.vitals.mfu_ratio is not None
    ]
    ages = [rank.step_age_ns for rank in job.ranks if rank.step_age_ns is not None]
    return JobStatus(
        job=job.job,
        launch=job.launch,
        title=title,
        uid=job.uid,
        world_size=max((rank.hello.world_size for rank in job.ranks), default=None),
        ranks=tuple(_rank(rank, residence(rank.hello)) for rank in shown),
        ranks_left_out=len(job.ranks) - len(shown),
        finished=all(rank.goodbye is not None or not rank.connected for rank in job.ranks),
        step=max((step.step for step in steps), default=None),
        pace_seconds=seconds(pace_ns),
        median_pace_seconds=None if ledger is None else seconds(ledger.median_ns),
        samples_per_second=_rate(lately, "samples", pace_ns),
        samples_guessed=any(step.samples_guessed for step in steps),
        tokens_per_second=_rate(lately, "tokens", pace_ns),
        mfu_ratio=sum(mfus) / len(mfus) if mfus else None,
        last_record_age_seconds=seconds(min(ages, default=None)),
        ledger_seconds=_ledger(job, lately),
        ledger_window_seconds=None if lately is None else lately.window_ns / NS_PER_SECOND,
        knobs=_knobs(job.ranks),
        stragglers=tuple(
            LateRank(
                rank=late.late_rank,
                cause=late.cause,
                phase=late.phase,
                since_step=late.since_step,
                excess_seconds=late.excess_ns / NS_PER_SECOND,
                evidence=late.evidence[:TEXT_MAX],
            )
            for late in job.health.stragglers
        ),
        hangs=_hangs(job),
        hang_verdict=None if job.health.verdict is None else job.health.verdict.summary[:TEXT_MAX],
        tuner=_tuner(job),
        moves=_moves(job.decisions, job.verdicts),
        what_if=None if job.what_if is None else _ladder(job.what_if),
    )


def _shown(job: JobView, most: int) -> list[RankView]:
    """Return at most `most` ranks, by number; late and hung ones take precedence, then those with the longest step."""
    if len(job.ranks) <= most:
        return list(job.ranks)
    named = {late.late_rank for late in job.health.stragglers}
    named |= {rank for rank, (_, is_suspected) in job.health.hangs.items() if is_suspected}

    def precedence(rank: RankView) -> tuple[bool, int]:
        return rank.hello.rank not in named, 0 if rank.step is None else -rank.step.wall_ns

    return sorted(sorted(job.ranks, key=precedence)[:most], key=lambda rank: rank.hello.rank)


def _rank(rank: RankView, where: Residence) -> Rank:
    hello, step, vitals = rank.hello, rank.step, rank.vitals
    memory = None if vitals is None else vitals.memory
    return Rank(
        rank=hello.rank,
        host=hello.host,
        pid=hello.pid,
        device=hello.device,
        device_uuid=hello.device_uuid,
        connected=rank.connected,
        finished=rank.goodbye is not None,
        step=None if step is None else step.step,
        step_duration_seconds=None if step is None else seconds(step.wall_ns),
        last_record_age_seconds=seconds(rank.step_age_ns),
        ledger_seconds=None if step is None else _in_seconds(step.ledger.parts()),
        ledger_source=None if step is None else step.source,
        ledger_uncalibrated=None if step is None else step.uncalibrated,
        mfu_ratio=None if vitals is None else vitals.mfu_ratio,
        memory_allocated_bytes=None if memory is None else memory.allocated_bytes,
        memory_reserved_bytes=None if memory is None else memory.reserved_bytes,
        pod_name=where.pod_name or None,
        pod_namespace=where.pod_namespace or None,
        slurm_job=where.slurm_job or None,
    )


def _ledger(job: JobView, lately: Elapsed | None) -> dict[str, float] | None:
    if lately is not None:
        return _in_seconds(lately.parts_ns)
    ledgers = [rank.step.ledger for rank in job.ranks if rank.step is not None]
    if not ledgers:
        return None
    return _in_seconds(sum(ledgers[1:], ledgers[0]).parts())


def _knobs(ranks: Sequence[RankView]) -> dict[str, KnobValue]:
    known = [rank.knobs for rank in ranks if rank.knobs is not None]
    return dict(max(known, key=lambda knobs: knobs.epoch, default=Knobs()).values)


def _hangs(job: JobView) -> tuple[HangStatus, ...]:
    suspected = {rank for rank, (_, is_suspected) in job.health.hangs.items() if is_suspected}
    silent = {rank for rank, is_silent in job.health.silent.items() if is_silent}
    return tuple(
        HangStatus(rank=rank, suspected=rank in suspected, silent=rank in silent) for rank in sorted(suspected | silent)
    )


def _tuner(job: JobView) -> TunerView | None:
    if job.tuner is None:
        return None
    return TunerView(
        state=job.tuner.state,
        detail=job.tuner.detail[:TEXT_MAX],
        step=job.tuner.step,
        trials=job.tuner.trials,
        exploration_seconds=job.tuner.exploration_ns / NS_PER_SECOND,
    )


def _moves(decisions: Sequence[Decision], verdicts: Sequence[Verdict]) -> tuple[Move, ...]:
    """Return decisions with their verdicts, newest first; a verdict may have outlived its decision."""
    judged = pair(by_number(decisions), by_number(verdicts))
    return tuple(_move(one) for one in list(reversed(judged.values()))[:MOVES_MAX])


def _move(judged: JudgedDecision) -> Move:
    decision, verdict = judged
    return Move(
        decision=judged.said.decision,
        time_seconds=judged.said.wall_ns / NS_PER_SECOND,
        kind=judged.kind,
        knob=judged.said.knob,
        from_value=judged.from_value,
        to_value=judged.to_value,
        step=judged.said.step,
        reason="" if decision is None else decision.reason[:TEXT_MAX],
        expected_gain_ratio=judged.expected_gain_ratio,
        outcome=judged.outcome,
        outcome_reason=None if verdict is None else verdict.reason[:TEXT_MAX],
        measured_gain_ratio=judged.measured_gain_ratio,
    )


def _ladder(what_if: WhatIf) -> Ladder:
    return Ladder(
        step=what_if.step,
        steps=what_if.steps,
        pace_seconds=what_if.pace_ns / NS_PER_SECOND,
        source=what_if.source,
        calibration_age_steps=what_if.calibration_age_steps,
        rungs=tuple(
            Saving(
                scenario=scenario.name,
                step_seconds=scenario.step_ns / NS_PER_SECOND,
                gain_ratio=scenario.gain_ratio,
                bound=scenario.bound.value,
            )
            for scenario in what_if.rungs
        ),
    )


def _rate(lately: Elapsed | None, what: str, pace_ns: int | None) -> float | None:
    """Return what a mean step holds, divided by the displayed pace, so that the two always agree.

    A rate over the clock's seconds would lag behind the pace for half a minute after each switch.
    """
    count = None if lately is None else getattr(lately, what)
    if lately is None or count is None or not pace_ns or lately.steps <= 0:
        return None
    return float(count / lately.steps * NS_PER_SECOND / pace_ns)


def _in_seconds(parts_ns: dict[str, int]) -> dict[str, float]:
    return {heading: value / NS_PER_SECOND for heading, value in parts_ns.items()}


def seconds(duration_ns: int | None) -> float | None:
    """Return a duration in seconds; None stays None."""
    return None if duration_ns is None else duration_ns / NS_PER_SECOND
