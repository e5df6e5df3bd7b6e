"""What would the pace be if only this were gone?  The rungs of a ladder, each a bound and none a promise.

Adding up "communication takes 30 %, so hiding it wins 30 %" is wrong twice.  Only *exposed* communication costs, and
what is hidden still has to run: a link that is busy for 80 ms of every step allows no step of 70 ms.  So each rung
takes one heading out of the ledger and stops at the resource that is busy longest:

    step          |cccccccc|eeeeee|dd|hhh|       c compute, e exposed communication, d data wait, h host bound
    hidden        |cccccccc|dd|hhh|              never shorter than all communication, exposed and overlapped
    data_free     |cccccccc|eeeeee|hhh|
    all           |cccccccc|                     never shorter than compute, never shorter than communication

Pure: ledgers in, scenarios out.  Left out: how to get there, and what one rung does to the others; the rungs do not
add up.  Where several ranks are known, `of_job` takes the slowest rank after the change as the job's pace and counts
waiting for a late rank as no work of the link.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pacecar.profiler.analysis.report import Scenario
from pacecar.records import Ledger

__all__ = ["Runner", "of_job", "what_if"]


class Runner(NamedTuple):
    """One rank on the ladder: its whole ledger, over how many steps, and what of its communication was waiting.

    `steps` of None or zero takes the whole window as one.  `wait_ns` is time in which communication ran, and only to
    wait for another rank.
    """

    ledger: Ledger
    steps: int | None
    wait_ns: int = 0


class _Rung(NamedTuple):
    name: str
    takes: tuple[str, ...]
    """The headings of the ledger that it takes away."""
    what: str


_RUNGS = (
    _Rung("communication_hidden", ("exposed_communication",), "exposed communication"),
    _Rung("data_free", ("data_wait",), "waiting for data"),
    _Rung("launch_gaps_gone", ("host_bound",), "idle time in which the host had launched nothing"),
    _Rung("all", ("exposed_communication", "data_wait", "host_bound"), "all of these"),
)


def what_if(ledger: Ledger, steps: int | None) -> list[Scenario]:
    """Return the ladder of one trace whose `ledger` covers `steps` steps; empty when no time passed.

    The pace of None or zero steps is that of the whole window.  `straggler_median` needs several ranks: see `of_job`.
    """
    return of_job([Runner(ledger, steps)], None)


def of_job(runners: Sequence[Runner], straggler_saved_ns: float | None) -> list[Scenario]:
    """Return the ladder of a job: its pace is the slowest rank's, before and after.

    `straggler_saved_ns` is what a step would save if the straggler took as long as the median rank; None leaves that
    rung out.
    """
    runners = [runner for runner in runners if runner.ledger.wall_ns > 0]
    if not runners:
        return []
    pace = max(_per_step(runner, runner.ledger.wall_ns) for runner in runners)
    scenarios = [_climb(runners, rung, pace) for rung in _RUNGS]
    if straggler_saved_ns is not None:
        scenarios.insert(2, _straggler(runners, straggler_saved_ns, pace))
    return scenarios


def _climb(runners: Sequence[Runner], rung: _Rung, pace: float) -> Scenario:
    """Return the job's pace with the headings of `rung` gone on every rank."""
    step, binds, slowest = 0.0, "", runners[0]
    for runner in runners:
        left, bound = _without(runner, rung)
        if _per_step(runner, left) >= step:
            step, binds, slowest = _per_step(runner, left), bound, runner
    taken = sum(slowest.ledger.parts()[heading] for heading in rung.takes)
    note = f"without {rung.what} ({_per_step(slowest, taken) / 1e6:.3f} ms a step)"
    return _scenario(rung.name, pace, step, f"{note}; {binds}")


def _without(runner: Runner, rung: _Rung) -> tuple[int, str]:
    """Return the wall time of one rank without the rung's headings, and what forbids less."""
    ledger = runner.ledger
    left = ledger.wall_ns - sum(ledger.parts()[heading] for heading in rung.takes)
    link = ledger.communication_ns - runner.wait_ns
    if left < link:
        return link, "communication itself binds: it is busy for that long"
    if left == ledger.compute_ns:
        return left, "compute binds"
    return left, "compute and the remaining headings bind"


def _straggler(runners: Sequence[Runner], saved: float, pace: float) -> Scenario:
    """Return the pace without the straggler's excess: no rank's own work and no link gets shorter than it is."""
    floor = min(_per_step(runner, _own_work(runner)) for runner in runners)
    step = min(pace, max(pace - saved, floor))
    note = "the straggler's own part as long as the median rank's; "
    note += "compute and communication of the fastest rank bind" if pace - saved < floor else "the next late rank binds"
    return _scenario("straggler_median", pace, step, note)


def _own_work(runner: Runner) -> int:
    return max(runner.ledger.compute_ns, runner.ledger.communication_ns - runner.wait_ns)


def _per_step(runner: Runner, duration_ns: int) -> float:
    return duration_ns / (runner.steps or 1)


def _scenario(name: str, pace: float, step: float, note: str) -> Scenario:
    # A step of nothing has no speedup that could be written down: what is left is then one nanosecond, not zero.
    return Scenario(name=name, step_ns=step, speedup=pace / max(step, 1.0), saved_ns=pace - step, note=note)
