"""Extracts the events of a run, one row each: decisions with verdicts, orders, stragglers, hangs and stops.

Records repeat a straggler or a hang while it lasts; here it is one row, from its start to its last report.
"""

from __future__ import annotations

from pacecar.formatting.plain_text import clean
from pacecar.knobs import setting
from pacecar.records.judged_decision import pair

from ..document import ReportChange, ReportHang, ReportHangVerdict, Slowdown, Stopped
from ..reading.notices import TEXT_CHARACTERS_MAX
from ..reading.run_index import Key, RunIndex
from ..reading.step_sums import StepSums

__all__ = ["changes_of", "hang_verdicts_of", "hangs_of", "orders_of", "slowdowns_of", "stops_of"]


def changes_of(index: RunIndex) -> tuple[ReportChange, ...]:
    """Return every decision, in order."""
    in_force = _in_force(index)
    return tuple(
        ReportChange(
            life=key[0],
            decision=decision.decision,
            kind=decision.kind,
            knob=clean(decision.knob, TEXT_CHARACTERS_MAX),
            from_value=decision.from_value,
            to_value=decision.to_value,
            step=decision.step,
            applied_step=index.applied.get(key),
            verdict_step=None if verdict is None else verdict.step,
            wall_ns=decision.wall_ns,
            verdict_wall_ns=None if verdict is None else verdict.wall_ns,
            expected_gain_ratio=decision.expected_gain_ratio,
            measured_gain_ratio=judged.measured_gain_ratio,
            gain_low=judged.gain_low,
            gain_high=judged.gain_high,
            outcome=judged.outcome,
            trial_steps=None if verdict is None else verdict.trial_steps,
            exploration_ns=None if verdict is None else verdict.exploration_ns,
            is_in_force=key in in_force,
            reason=clean(judged.reason, TEXT_CHARACTERS_MAX),
        )
        for key, judged in pair(index.decisions, index.verdicts).items()
        for decision, verdict in (judged,)
        if decision is not None
    )


def _in_force(index: RunIndex) -> set[Key]:
    """Return the kept decisions whose value was still set at the end of the job.

    A restarted job proves the same change again, so only the last start that kept any counts: otherwise the same gain
    would count twice.  A knob that a user or the compression rollback changed later does not count.
    """
    kept = [key for key, verdict in index.verdicts.items() if verdict.outcome == "kept" and key in index.decisions]
    last_life = max((life for life, _ in kept), default=0)
    settled = index.settled()
    by_knob: dict[str, list[Key]] = {}
    for key in sorted(key for key in kept if key[0] == last_life):
        by_knob.setdefault(index.decisions[key].knob, []).append(key)
    found: set[Key] = set()
    for knob, keys in by_knob.items():
        to_value = index.decisions[keys[-1]].to_value
        if settled.get(knob, to_value) == to_value:
            found.update(keys)
    return found


def orders_of(index: RunIndex) -> tuple[str, ...]:
    """Return one sentence for each manual order to the tuner."""
    said = []
    for (_, step), order in index.orders:
        who = "an unknown user" if order.uid is None else f"uid {order.uid}"
        values = ", ".join(f"{knob} {setting(knob, value)}" for knob, value in order.values.items())
        named = f" {values}" if values else ""
        said.append(f"step {step}: {who} ordered {order.action}{named}: {order.outcome}: {order.detail}")
    return tuple(clean(sentence, TEXT_CHARACTERS_MAX) for sentence in said)


def slowdowns_of(index: RunIndex) -> tuple[Slowdown, ...]:
    """Return each straggler once."""
    found: dict[tuple[int, int | None, str, str, int], Slowdown] = {}
    for (life, _), one in index.stragglers:
        key = (life, one.late_rank, one.cause, one.phase, one.since_step)
        before = found.get(key)
        excess_ns = max(one.excess_ns, 0 if before is None else before.excess_ns)
        found[key] = Slowdown(
            life=life,
            rank=one.late_rank,
            cause=one.cause,
            phase=clean(one.phase, TEXT_CHARACTERS_MAX),
            since_step=one.since_step,
            last_step=one.step,
            excess_ns=excess_ns,
            lost_ns=excess_ns * max(1, one.step - one.since_step + 1),
            is_over=one.ended,
            evidence=clean(one.evidence, TEXT_CHARACTERS_MAX),
        )
    return tuple(found.values())


def hangs_of(index: RunIndex, sums: StepSums) -> tuple[ReportHang, ...]:
    """Return one row for each suspected hang of a rank; it is over if the rank said so or continued."""
    found: dict[tuple[Key, int], ReportHang] = {}
    for key, one in index.hangs:
        before = found.get((key, one.rank))
        found[key, one.rank] = ReportHang(
            life=key[0],
            rank=one.rank,
            step=one.step,
            phase=clean(one.phase if before is None else before.phase, TEXT_CHARACTERS_MAX),
            wall_ns=one.wall_ns - one.silent_ns if before is None else before.wall_ns,
            silent_ns=max(one.silent_ns, 0 if before is None else before.silent_ns),
            last_collective=None if one.last_collective is None else clean(one.last_collective, TEXT_CHARACTERS_MAX),
            is_over=one.ended or _continued(index, sums, key, one.rank),
        )
    return tuple(found.values())


def hang_verdicts_of(index: RunIndex) -> tuple[ReportHangVerdict, ...]:
    """Return one row for each hang on which its ranks reached a verdict."""
    found: dict[tuple[int, int | None, int | None], ReportHangVerdict] = {}
    for life, one in index.hang_verdicts:
        key = life, one.rank, one.step
        before = found.get(key)
        began_ns = max(0, one.wall_ns - one.waited_ns) if before is None else before.wall_ns
        found[key] = ReportHangVerdict(
            life=life,
            step=one.step,
            kind=one.kind.value,
            culprits=one.culprits,
            wall_ns=began_ns,
            waited_ns=one.wall_ns - began_ns if one.wall_ns > began_ns else one.waited_ns,
            summary=clean(one.summary, TEXT_CHARACTERS_MAX),
            is_over=one.ended,
        )
    return tuple(found.values())


def _continued(index: RunIndex, sums: StepSums, hung: Key, rank: int) -> bool:
    """Return whether the rank finished the step in which it hung, closed without a failure, or was restarted."""
    (life, step), total = hung, sums.ranks.get(rank)
    if total is not None and any((its_life, last.step) >= hung for its_life, last in total.lives.items()):
        return True
    bye = index.goodbyes.get((life, rank))
    counted = None if bye is None else bye.total_steps
    return bye is not None and (not bye.reason.startswith("failed") or (counted is not None and counted > step))


def stops_of(index: RunIndex) -> tuple[Stopped, ...]:
    """Return one row for each time that a rank's process was stopped."""
    return tuple(
        Stopped(
            life=life,
            rank=one.rank,
            step=one.step,
            phase=clean(one.phase),
            wall_ns=one.wall_ns,
            stopped_ns=one.stopped_ns,
            cause=one.cause,
        )
        for (life, _), one in index.stops
    )
