"""Sums what each rank did in all starts of the job, and pacecar's overhead: rows of the report's last tables.

A rank that said hello but finished no step has a row too, because that is what the reader needs to see.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.records import LEDGER_HEADINGS

from ..document import RankRow, ReportChange, ReportOverhead
from ..reading.run_index import RunIndex
from ..reading.step_sums import RankSum, StepSums

__all__ = ["mean_ledger", "overhead_of", "rank_rows", "total_of"]


def mean_ledger(sums: Sequence[int], steps: int, *, sees_data: bool) -> dict[str, int]:
    """Return heading -> nanoseconds of a mean step, from sums in the order of the headings.

    The wait for data is left out if no data loader was seen.
    """
    mean = {heading: total // max(1, steps) for heading, total in zip(LEDGER_HEADINGS, sums, strict=True)}
    return mean if sees_data else {heading: part for heading, part in mean.items() if heading != "data_wait"}


def total_of(sums: StepSums, name: str) -> int | None:
    """Return the sum of the counter `name` over ranks and starts; None if any of them lacks it."""
    counts = [getattr(last, name) for total in sums.ranks.values() for last in total.lives.values()]
    known = [count for count in counts if count is not None]
    return sum(known) if known and len(known) == len(counts) else None


def rank_rows(index: RunIndex, sums: StepSums) -> tuple[RankRow, ...]:
    """Return a row for each rank that recorded a step or said hello, in order."""
    ranks = sorted(sums.ranks.keys() | index.hellos.keys())
    return tuple(_rank_row(sums.ranks.get(rank) or RankSum(rank), index, sums) for rank in ranks)


def _rank_row(total: RankSum, index: RunIndex, sums: StepSums) -> RankRow:
    hello, ledger = index.hellos.get(total.rank), total.totals
    steps = sum(last.total_steps for last in total.lives.values())
    overhead_ns = sum(last.total_overhead_ns for last in total.lives.values())
    bye = next((bye for (_, rank), bye in reversed(index.goodbyes.items()) if rank == total.rank), None)
    return RankRow(
        rank=total.rank,
        host=hello.host if hello is not None else None,
        device=hello.device if hello is not None else None,
        steps=steps,
        records=total.records,
        step_mean_ns=ledger.wall_ns // steps if steps else None,
        ledger_ns={heading: part_ns // max(1, steps) for heading, part_ns in ledger.parts().items()},
        # A single rank is the slowest in every step, which is meaningless.
        slowest_ratio=total.slowest_in / sums.complete_steps if sums.complete_steps and len(sums.ranks) > 1 else None,
        overhead_ratio=overhead_ns / ledger.wall_ns if ledger.wall_ns else None,
        windows=sum(last.total_windows for last in total.lives.values()),
        dropped_records=sum(last.dropped_records for last in total.lives.values()),
        last_words=bye.reason if bye is not None else None,
        uncalibrated=[last.uncalibrated for last in total.lives.values()][-1] if total.lives else None,
    )


def overhead_of(
    index: RunIndex, sums: StepSums, changes: Sequence[ReportChange], budget_ratio: float
) -> ReportOverhead:
    """Return pacecar's overhead on all ranks, and the cost of its trials."""
    costs = [change.exploration_ns for change in changes if change.exploration_ns is not None]
    ratios: dict[int, float] = {}
    overhead_ns = wall_ns = 0
    for rank, total in sums.ranks.items():
        mine = sum(last.total_overhead_ns for last in total.lives.values())
        its_wall = total.totals.wall_ns
        overhead_ns, wall_ns = overhead_ns + mine, wall_ns + its_wall
        if its_wall:
            ratios[rank] = mine / its_wall
    worst = max(ratios, key=lambda rank: ratios[rank], default=None)
    exploration_ns, run_ns = index.explored_ns, sums.run_ns
    return ReportOverhead(
        ratio=overhead_ns / wall_ns if wall_ns else None,
        worst_ratio=None if worst is None else ratios[worst],
        worst_rank=worst,
        budget_ratio=budget_ratio if index.overhead_budget is None else index.overhead_budget,
        is_jobs_budget=index.overhead_budget is not None,
        exploration_ns=exploration_ns,
        exploration_ratio=exploration_ns / run_ns if exploration_ns is not None and run_ns else None,
        trials_ns=sum(costs) if costs else None,
    )
