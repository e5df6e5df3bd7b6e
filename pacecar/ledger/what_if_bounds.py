"""Computes what-if bounds from ledgers: the shortest possible step if one cost (a ledger heading) were gone.

"Communication takes 30 %, so hiding it wins 30 %" is wrong twice.  Only *exposed* communication costs, and hidden
communication still has to run: a link that is busy for 80 ms of every step allows no step of 70 ms.  So each bound
removes one heading from the ledger and stops at the resource that is busy longest.  From the host-bound time it removes
only what lies inside forward, backward and optimizer: between them the script's own code runs, which no faster launch
shortens.

    step          |cccccccc|eeeeee|dd|hhh|       c compute, e exposed communication, d data wait, h host bound
    hidden        |cccccccc|dd|hhh|              not shorter than all communication, exposed and overlapped
    data_free     |cccccccc|eeeeee|hhh|
    all           |cccccccc|                     not shorter than compute or communication

The job's step is that of its slowest rank, before and after the change.  Waiting for a late rank is not work of the
link, and ends when that rank is late no more: without its wait for data the others wait for it no longer.

Pure: ledgers in, bounds out; the running job (`profiler.ranks.what_if`) and `pacecar analyze` share it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pacecar.records import Bound, Ledger, Rung
from pacecar.records.measurements.what_if import AT_MOST, QUESTIONS

__all__ = ["POINT_TO_POINT", "RankLedger", "bounds_of"]

POINT_TO_POINT = frozenset({"send", "recv", "send_recv"})
"""The operations by which the stages of a pipeline communicate."""

_COMMUNICATION = "exposed_communication"

_REMOVED = {
    "communication_hidden": (_COMMUNICATION,),
    "data_free": ("data_wait",),
    "launch_gaps_gone": ("host_bound",),
    "all": (_COMMUNICATION, "data_wait", "host_bound"),
}
"""The headings that each bound removes."""


class RankLedger(NamedTuple):
    """One rank's ledger of `steps` steps; communication ran for `wait_ns` of it only to wait for another rank.

    With None or zero steps the whole ledger counts as one.
    """

    ledger: Ledger
    steps: int | None
    wait_ns: int = 0

    def per_step(self, duration_ns: int) -> float:
        """Return the part of `duration_ns` in one step."""
        return duration_ns / (self.steps or 1)

    @property
    def link_ns(self) -> int:
        """How long the links worked for this rank."""
        return self.ledger.communication_ns - self.wait_ns

    def without(self, headings: Sequence[str]) -> tuple[float, Bound]:
        """Return the step without these headings, and why it cannot be shorter."""
        ledger = self.ledger
        parts = ledger.parts() | {"host_bound": ledger.host_bound_ns - ledger.loop_host_ns}
        left = ledger.wall_ns - sum(parts.get(heading, 0) for heading in headings)
        if _COMMUNICATION not in headings:  # the rank that it waited for may lose these headings too
            left -= min(self.wait_ns, parts.get(_COMMUNICATION, 0))
        if left < self.link_ns:
            return self.per_step(self.link_ns), Bound.COMMUNICATION
        return self.per_step(left), Bound.COMPUTE if left == ledger.compute_ns else Bound.REST


def bounds_of(
    ranks: Sequence[RankLedger],
    *,
    straggler_saved_ns: float | None = None,
    straggler_beside_ns: float = 0.0,
    is_pipeline: bool = False,
) -> tuple[float, list[Rung]]:
    """Return the pace of a job and its what-if bounds; none when no time passed.

    `straggler_saved_ns` is what a step would save if the straggler took as long as the median rank; None leaves that
    bound out.  `straggler_beside_ns` is the same for an excess in none of the headings that "all" removes.
    A pipeline has no bound for communication.
    """
    ranks = [rank for rank in ranks if rank.ledger.wall_ns > 0]
    if not ranks:
        return 0.0, []
    pace = max(rank.per_step(rank.ledger.wall_ns) for rank in ranks)
    steps = {
        question: max((rank.without(headings) for rank in reversed(ranks)), key=lambda step: step[0])
        for question, headings in _REMOVED.items()
        if not (is_pipeline and _COMMUNICATION in headings)
    }
    if straggler_saved_ns is not None:
        steps["straggler_median"] = _without_straggler(ranks, straggler_saved_ns, pace)
        if straggler_beside_ns > 0 and "all" in steps:  # in a replay, too, "all" is without the straggler
            steps["all"] = _without_straggler(ranks, straggler_beside_ns, steps["all"][0])
    return pace, [
        Rung(AT_MOST + question, round(step), 1.0 - step / pace, bound)
        for question in QUESTIONS
        if question in steps
        for step, bound in (steps[question],)
    ]


def _without_straggler(ranks: Sequence[RankLedger], saved: float, pace: float) -> tuple[float, Bound]:
    """Return the step without the straggler's excess; no rank's own work and no link becomes shorter."""
    floor = min(rank.per_step(max(rank.ledger.compute_ns, rank.link_ns)) for rank in ranks)
    bound = Bound.FASTEST_RANK if pace - saved < floor else Bound.NEXT_RANK
    return min(pace, max(pace - saved, floor)), bound
