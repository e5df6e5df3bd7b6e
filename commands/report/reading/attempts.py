"""Collects the attempts of a job while its steps are read, for `pacecar.ledger.attempts`.

One rank stands for the job in each attempt: the lowest that has its first step, as all ranks end a step together.
Beginning and end are those of all ranks, but for one whose clock is wrong.  Rows are differences of the totals in its
records, so that steps without a record count.

An attempt keeps ROWS_MAX rows at most.  Where there are more, pairs of its older half are joined: what a restart loses
are the last steps, and of a joined row the time is lost in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from statistics import median_high, median_low
from typing import NamedTuple

import msgspec

from pacecar.ledger.attempt_rows import row_between
from pacecar.ledger.attempts import CLOCK_JUMP_NS, Attempt, JobLife, StepRow, charge
from pacecar.records import Goodbye, HangSuspicion, StepRecord
from pacecar.records.final_totals import completed

from ..formatting import elapsed
from .notices import ReportNotices
from .run_index import Key, RunIndex
from .step_join import Measured

__all__ = ["ROWS_MAX", "AttemptSums"]

ROWS_MAX = 2048
"""Rows of an attempt: the last thousand steps one by one."""

FAILED = "failed"
"""The beginning of a Goodbye's reason if the script raised."""


class _Cost(NamedTuple):
    """Nanoseconds that the steps from `first` to `last` took longer together."""

    first: int
    last: int
    total_ns: int

    def within(self, first: int, last: int) -> int:
        steps = min(last, self.last) - max(first, self.first) + 1
        return self.total_ns * steps // (self.last - self.first + 1) if steps > 0 else 0


class _Costs:
    """Costs of one kind in one life, asked for in the order of its steps: there may be a cost for every few of them."""

    def __init__(self, costs: Iterable[_Cost]) -> None:
        self._later = sorted(costs, key=lambda cost: -cost.first)
        self._now: list[_Cost] = []

    def within(self, first: int, last: int) -> int:
        while self._later and self._later[-1].first <= last:
            self._now.append(self._later.pop())
        self._now = [cost for cost in self._now if cost.last >= first]
        return sum(cost.within(first, last) for cost in self._now)


class _CostsOfLife(NamedTuple):
    hangs: _Costs
    stragglers: _Costs
    trials: _Costs


class _Rows:
    """The rows of one attempt, of the rank `rank`."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: StepRecord | None = None
        self._rows: list[StepRow] = []
        self._evaluation_ns = 0  # seen, but not in a row yet: a record may already tell of what followed its step

    def add(self, record: StepRecord, costs: _CostsOfLife) -> None:
        """Add what happened since the record before."""
        before = self.last
        self.last = record
        seen_ns = (record.total_evaluation_ns or 0) - (0 if before is None else before.total_evaluation_ns or 0)
        row = row_between(before, record, self._evaluation_ns + max(0, seen_ns))
        if row is None:
            return  # damaged: the next record makes up for it
        self._evaluation_ns += max(0, seen_ns) - row.parts["evaluation"]
        first, last = record.step - row.steps + 1, record.step
        hang, late, trials = (one.within(first, last) for one in costs)
        hang = max(0, hang - row.parts["stopped"])
        exposed_ns = max(0, max(0, row.parts["exposed_communication"] - hang) - late)
        more = {"exposed_communication": exposed_ns, "hang": hang, "straggler_wait": late, "trials": trials}
        self._rows.append(row._replace(parts={**row.parts, **more}))
        if len(self._rows) > ROWS_MAX:
            head, old, new = self._rows[:1], self._rows[1 : ROWS_MAX // 2], self._rows[ROWS_MAX // 2 :]
            self._rows = [*head, *_paired(old), *new]

    def rows(self) -> list[StepRow]:
        """Return the rows so far."""
        return self._rows


def _paired(rows: Sequence[StepRow]) -> Iterator[StepRow]:
    """Yield each two consecutive rows as one."""
    for place in range(0, len(rows), 2):
        first, *second = rows[place : place + 2]
        if not second:
            yield first
            continue
        one = second[0]
        yield StepRow(
            ended_ns=one.ended_ns,
            steps=first.steps + one.steps,
            wall_ns=first.wall_ns + one.wall_ns,
            number=one.number,
            parts={name: first.parts.get(name, 0) + one.parts.get(name, 0) for name in {**first.parts, **one.parts}},
        )


class AttemptSums:
    """The attempts of one job; call `add` with the joined steps in order."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index
        self._rows: dict[int, _Rows] = {}
        self._ended = {life: dict(ranks) for life, ranks in index.ended_ns.items()}
        self._costs: dict[int, _CostsOfLife] = {}

    def add(self, key: Key, measured: Sequence[tuple[int, Measured]]) -> None:
        """Add what the ranks measured at `key`."""
        life = key[0]
        for rank, record in measured:
            if not isinstance(record, StepRecord):
                continue
            ended = self._ended.setdefault(life, {})
            ended[rank] = max(ended.get(rank, 0), record.ended_wall_ns)
            rows = self._rows.get(life)
            if rows is None:
                rows = self._rows[life] = _Rows(rank)
                self._costs[life] = _costs_of(self._index, life)
            if rank == rows.rank:
                rows.add(record, self._costs[life])

    def life(self, name: str, notices: ReportNotices) -> JobLife | None:
        """Return the job's life; None if nothing tells when it began.  What is doubtful is noted."""
        attempts = [one for life in sorted({*self._index.starts, *self._rows}) if (one := self._attempt(life))]
        life = charge(attempts)
        if life is None or len(attempts) < 2:
            return life
        back_ns = [ended.ended_ns - began.began_ns for ended, began in pairwise(attempts)]
        if back := [each for each in back_ns if each > CLOCK_JUMP_NS]:
            text = f"the clock went back by {elapsed(max(back))} between two attempts: the job's life is without it"
            notices.add(name, "clock back", text, is_damage=False)
        if life.lost_is_partial:
            text = "some attempts do not tell their step of the whole training: steps lost there are those after"
            text += " their last checkpoint, or unknown; pacer.resume(step) tells it"
            notices.add(name, "lost", text, is_damage=False)
        return life

    def _attempt(self, life: int) -> Attempt | None:
        index, rows, start = self._index, self._rows.get(life), self._index.starts.get(life)
        last = None if rows is None else rows.last
        if rows is not None and last is not None:
            whole = completed(last, index.goodbyes.get((life, rows.rank)))
            if whole is not last:
                more, wall_ns = whole.total_steps - last.total_steps, whole.totals.wall_ns - last.totals.wall_ns
                number = None if last.global_step is None else last.global_step + more
                rest = {"step": last.step + more, "ended_wall_ns": last.ended_wall_ns + wall_ns, "global_step": number}
                rows.add(msgspec.structs.replace(whole, **rest), self._costs[life])
        found = [] if rows is None else rows.rows()
        own_ns = max([row.ended_ns for row in found[-1:]], default=0)
        ended_ns = max(own_ns, _last_of(self._ended.get(life, {}), own_ns))
        if start is not None:
            began_ns = _first_of(start.ranks_ns)
            if not found:  # then the hello may be the last record
                ended_ns = max(ended_ns, median_low(attached for attached, _ in start.ranks_ns))
        elif found:
            began_ns = found[0].ended_ns - found[0].wall_ns
        else:
            return None
        goodbyes = [bye for (its, _), bye in index.goodbyes.items() if its == life]
        ranks = len(index.worlds[life][0]) if life in index.worlds else 1
        return Attempt(
            began_ns=began_ns,
            rows=found,
            ended_ns=max(ended_ns, began_ns),
            number=None if start is None else start.attempt,
            rendezvous_ns=None if start is None else start.rendezvous_ns,
            is_failed=len(goodbyes) < ranks or any(map(_has_failed, goodbyes)),
            saved_steps=None if last is None else last.saved_steps,
            hangs=any(not hang.ended for hang in _last_hangs(index, life)) and all(map(_has_failed, goodbyes)),
        )


def _last_of(ended_ns: Mapping[int, int], least_ns: int) -> int:
    """Return the latest end of the ranks, without those whose clock is ahead of most others'."""
    usual_ns = max(least_ns, median_low(ended_ns.values())) if ended_ns else least_ns
    return max((at for at in ended_ns.values() if at - usual_ns <= CLOCK_JUMP_NS), default=0)


def _first_of(ranks_ns: Sequence[tuple[int, int]]) -> int:
    """Return when the first rank began, without those whose clock is behind most others' when they attached."""
    usual_ns = median_high(attached for attached, _ in ranks_ns)
    return min(began for attached, began in ranks_ns if usual_ns - attached <= CLOCK_JUMP_NS)


def _has_failed(bye: Goodbye) -> bool:
    return bye.reason.startswith(FAILED)


def _last_hangs(index: RunIndex, life: int) -> list[HangSuspicion]:
    return list({hang.rank: hang for (its, _), hang in index.hangs if its == life}.values())


def _costs_of(index: RunIndex, life: int) -> _CostsOfLife:
    late = {(one.late_rank, one.since_step): one for (its, _), one in index.stragglers if its == life}
    hangs: dict[int, int] = {}
    for (its, step), hang in index.hangs:
        if its == life and hang.ended:
            hangs[step] = max(hang.silent_ns, hangs.get(step, 0))
    trials = []
    for (its, number), verdict in index.verdicts.items():
        decision = index.decisions.get((its, number))
        if its == life and decision is not None and verdict.exploration_ns > 0 and verdict.step >= decision.step:
            trials.append(_Cost(decision.step, verdict.step, verdict.exploration_ns))
    return _CostsOfLife(
        hangs=_Costs(_Cost(step, step, silent_ns) for step, silent_ns in hangs.items()),
        stragglers=_Costs(
            _Cost(one.since_step, one.step, one.excess_ns * (one.step - one.since_step + 1))
            for one in late.values()
            if one.excess_ns > 0 and one.step >= one.since_step
        ),
        trials=_Costs(trials),
    )
