"""Turns what-if bounds into the scenarios of a report, with a note in words on each.

Left out: how a bound is computed, which is the same for a trace and for a running job
(`pacecar.profiler.ledger.what_if_bounds`).
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.records import Bound, Ledger

from ...ledger.what_if_bounds import Runner, WhatIfStep, climb
from ..report import Scenario

__all__ = ["Runner", "of_job", "what_if"]

_BOUNDS = {
    Bound.COMMUNICATION: "communication itself binds: it is busy for that long",
    Bound.COMPUTE: "compute binds",
    Bound.REST: "compute and the remaining headings bind",
    Bound.FASTEST_RANK: "compute and communication of the fastest rank bind",
    Bound.NEXT_RANK: "the next late rank binds",
}


def what_if(ledger: Ledger, steps: int | None) -> list[Scenario]:
    """Return the what-if bounds of one trace whose `ledger` covers `steps` steps; empty when no time passed.

    With None or zero steps the whole window counts as one.  `straggler_median` needs several ranks: see `of_job`.
    """
    return of_job([Runner(ledger, steps)], None)


def of_job(runners: Sequence[Runner], straggler_saved_ns: float | None) -> list[Scenario]:
    """Return the what-if bounds of a job: its pace is the slowest rank's, before and after; arguments as of `climb`."""
    return [_scenario(rung) for rung in climb(runners, straggler_saved_ns)]


def _scenario(rung: WhatIfStep) -> Scenario:
    note = f"without {rung.what} ({rung.taken_ns / 1e6:.3f} ms a step)"
    if rung.bound in (Bound.FASTEST_RANK, Bound.NEXT_RANK):
        note = "the straggler's own part as long as the median rank's"
    return Scenario(
        name=rung.name,
        step_ns=rung.step_ns,
        # A step of zero has no finite speedup, so at least one nanosecond is left.
        speedup=rung.pace_ns / max(rung.step_ns, 1.0),
        saved_ns=rung.pace_ns - rung.step_ns,
        note=f"{note}; {_BOUNDS[rung.bound]}",
    )
