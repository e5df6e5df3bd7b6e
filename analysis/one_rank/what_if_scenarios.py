"""Turns the what-if bounds of one trace into scenarios of its report; those of several ranks come from replay."""

from __future__ import annotations

from pacecar.ledger.what_if_bounds import RankLedger, bounds_of
from pacecar.records import Bound, Ledger

from ..document.report import Scenario

__all__ = ["what_if"]

_NOTES = {
    Bound.COMMUNICATION: "communication itself binds: it is busy for that long",
    Bound.COMPUTE: "compute binds",
    Bound.REST: "compute and the remaining headings bind",
}


def what_if(ledger: Ledger, steps: int | None, *, is_pipeline: bool) -> list[Scenario]:
    """Return the what-if bounds of one trace whose `ledger` covers `steps` steps; empty when no time passed.

    With None or zero steps the whole window counts as one.
    """
    pace, bounds = bounds_of([RankLedger(ledger, steps)], is_pipeline=is_pipeline)
    return [
        Scenario(
            name=bound.name,
            step_ns=pace * (1 - bound.gain_ratio),
            # A step of zero has no finite speedup, so at least one nanosecond is left.
            speedup=pace / max(pace * (1 - bound.gain_ratio), 1.0),
            saved_ns=pace * bound.gain_ratio,
            note=f"a bound: {_NOTES[bound.bound]}",
        )
        for bound in bounds
    ]
