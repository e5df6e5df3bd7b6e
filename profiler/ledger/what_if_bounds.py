"""Computes what-if bounds: the shortest step possible if one cost (a ledger heading) were gone; bounds, no promises.

Concluding "communication takes 30 %, so hiding it wins 30 %" is wrong twice.  Only *exposed* communication costs, and
what is hidden still has to run: a link that is busy for 80 ms of every step allows no step of 70 ms.  So each bound
removes one heading from the ledger and stops at the resource that is busy longest.  Of the host-bound time it removes
what lies inside forward, backward and optimizer: between them the script's own code runs, and no faster launch ends it.

    step          |cccccccc|eeeeee|dd|hhh|       c compute, e exposed communication, d data wait, h host bound
    hidden        |cccccccc|dd|hhh|              never shorter than all communication, exposed and overlapped
    data_free     |cccccccc|eeeeee|hhh|
    all           |cccccccc|                     never shorter than compute, never shorter than communication

Where several ranks are known, the job's step is that of the slowest rank, before and after the change, and waiting for
a late rank is not counted as work of the link.

Pure: ledgers in, bounds out; the running job (`what_if`) and `pacecar analyze` share it.  Left out: how to get there,
and how one change affects another; the bounds do not add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pacecar.records import Bound, Ledger

__all__ = ["Runner", "WhatIfStep", "climb"]


class Runner(NamedTuple):
    """The input from one rank: its whole ledger, over how many steps, and what part of its communication was waiting.

    `steps` of None or zero takes the whole window as one step.  `wait_ns` is time in which communication ran only to
    wait for another rank.
    """

    ledger: Ledger
    steps: int | None
    wait_ns: int = 0


class WhatIfStep(NamedTuple):
    """One what-if bound: a step of `pace_ns` could be one of `step_ns`, and `bound` forbids less.

    `taken_ns` is what was removed, per step, from the rank that is slowest after the change; `what` describes it.
    """

    name: str
    pace_ns: float
    step_ns: float
    taken_ns: float
    what: str
    bound: Bound

    @property
    def gain_ratio(self) -> float:
        """The share of the step that is saved (0..1)."""
        return 1.0 - self.step_ns / self.pace_ns if self.pace_ns else 0.0


class _Cut(NamedTuple):
    name: str
    takes: tuple[str, ...]
    """The headings of the ledger that are removed."""
    what: str


_CUTS = (
    _Cut("communication_hidden", ("exposed_communication",), "exposed communication"),
    _Cut("data_free", ("data_wait",), "waiting for data"),
    _Cut("launch_gaps_gone", ("host_bound",), "idle time in the model's work in which the host had launched nothing"),
    _Cut("all", ("exposed_communication", "data_wait", "host_bound"), "all of these"),
)


def climb(runners: Sequence[Runner], straggler_saved_ns: float | None) -> list[WhatIfStep]:
    """Return the what-if bounds of a job: its pace is the slowest rank's, before and after; empty when no time passed.

    `straggler_saved_ns` is what a step would save if the straggler took as long as the median rank; None leaves that
    bound out.
    """
    runners = [runner for runner in runners if runner.ledger.wall_ns > 0]
    if not runners:
        return []
    pace = max(_per_step(runner, runner.ledger.wall_ns) for runner in runners)
    climbs = [_climb(runners, cut, pace) for cut in _CUTS]
    if straggler_saved_ns is not None:
        climbs.insert(2, _straggler(runners, straggler_saved_ns, pace))
    return climbs


def _climb(runners: Sequence[Runner], cut: _Cut, pace: float) -> WhatIfStep:
    """Return the job's pace with the headings of `cut` removed on every rank."""
    step, binds, slowest = 0.0, Bound.COMPUTE, runners[0]
    for runner in runners:
        left, bound = _without(runner, cut)
        if _per_step(runner, left) >= step:
            step, binds, slowest = _per_step(runner, left), bound, runner
    taken = _taken(slowest.ledger, cut)
    return WhatIfStep(cut.name, pace, step, _per_step(slowest, taken), cut.what, binds)


def _taken(ledger: Ledger, cut: _Cut) -> int:
    """Return the time of the cut's headings, but for that in which the script's own code ran and no launch was due."""
    parts = ledger.parts() | {"host_bound": ledger.host_bound_ns - ledger.loop_host_ns}
    return sum(parts.get(heading, 0) for heading in cut.takes)


def _without(runner: Runner, cut: _Cut) -> tuple[int, Bound]:
    """Return the wall time of one rank without the cut's headings, and what forbids less."""
    ledger = runner.ledger
    left = ledger.wall_ns - _taken(ledger, cut)
    link = ledger.communication_ns - runner.wait_ns
    if left < link:
        return link, Bound.COMMUNICATION
    return left, Bound.COMPUTE if left == ledger.compute_ns else Bound.REST


def _straggler(runners: Sequence[Runner], saved: float, pace: float) -> WhatIfStep:
    """Return the pace without the straggler's excess: no rank's own work and no link gets shorter than it is."""
    floor = min(_per_step(runner, _own_work(runner)) for runner in runners)
    step = min(pace, max(pace - saved, floor))
    bound = Bound.FASTEST_RANK if pace - saved < floor else Bound.NEXT_RANK
    return WhatIfStep("straggler_median", pace, step, pace - step, "the straggler's excess", bound)


def _own_work(runner: Runner) -> int:
    return max(runner.ledger.compute_ns, runner.ledger.communication_ns - runner.wait_ns)


def _per_step(runner: Runner, duration_ns: int) -> float:
    return duration_ns / (runner.steps or 1)
