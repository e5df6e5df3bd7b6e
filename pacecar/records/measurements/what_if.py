"""Defines the record of what-if bounds: the job's step time if only one cost were gone; bounds, no promises.

A module of its own beside `pacecar.records.records`, which takes it into the union of job records.  Left out: how the
bounds are computed (`pacecar.profiler.ledger.what_if_bounds`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Count, Gain, Label, Nanoseconds, Rank

__all__ = ["RUNGS_MAX", "RUNG_NAMES", "Bound", "Rung", "WhatIf"]

RUNGS_MAX = 16
"""Bounds (rungs) in one record; each is a series."""

RUNG_NAMES = frozenset({"communication_hidden", "data_free", "straggler_median", "launch_gaps_gone", "all"})
"""Every name of a rung; `Rung` says what they mean."""


class Bound(StrEnum):
    """What forbids a step shorter than the bound."""

    COMMUNICATION = "communication"
    COMPUTE = "compute"
    REST = "rest"
    FASTEST_RANK = "fastest_rank"
    NEXT_RANK = "next_rank"


class Rung(msgspec.Struct, frozen=True, gc=False):
    """One what-if bound: without what `name` says a step takes no less than `step_ns`.

    communication_hidden   all communication under compute; never shorter than the communication itself
    data_free              no waiting for data
    straggler_median       the late rank as fast as the median one; absent where the ranks are not compared
    launch_gaps_gone       no idle time in which the host had launched nothing
    all                    exposed communication, data wait and launch gaps gone

    `gain_ratio` is the share of the step that is saved (0..1); bounds do not add up.
    """

    name: Label
    step_ns: Nanoseconds
    gain_ratio: Gain
    bound: Bound


class WhatIf(msgspec.Struct, frozen=True, kw_only=True, tag="what_if"):
    """The what-if bounds of one rank (`of_rank`), or of the whole job (None), over the last `steps` steps up to `step`.

    `pace_ns` is the mean step today: the rank's, or the slowest rank's.  `source` is "exact" only if every step was
    profiled; the oldest calibration behind the ledgers is `calibration_age_steps` old, zero where all are exact.
    """

    job: Label
    of_rank: Rank | None
    step: Count
    wall_ns: Nanoseconds
    steps: Count
    pace_ns: Nanoseconds
    source: Literal["exact", "estimate"]
    calibration_age_steps: Count
    rungs: Annotated[tuple[Rung, ...], Meta(max_length=RUNGS_MAX)]
