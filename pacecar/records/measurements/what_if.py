"""Defines the record of what-if bounds: the most that a step could save if only one cost were gone.

A bound is not an answer.  `pacecar analyze` answers what-if questions about several ranks by replaying the job, each
with its error; a running job and a single trace have only ledgers, which give bounds.  So that the two are never
mistaken for each other, each bound is called `at_most_` and the question.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pacecar.records.ranges import Count, Gain, Label, Nanoseconds, Rank

__all__ = ["AT_MOST", "QUESTIONS", "RUNGS_MAX", "RUNG_NAMES", "Bound", "Rung", "WhatIf"]

RUNGS_MAX = 16
"""Bounds (rungs) in one record; each is a series."""

AT_MOST = "at_most_"
"""What the name of each bound begins with."""

QUESTIONS = ("communication_hidden", "data_free", "straggler_median", "launch_gaps_gone", "all")
"""What bounds are of, in the order in which they are listed."""

RUNG_NAMES = frozenset(AT_MOST + question for question in QUESTIONS)
"""The names of all bounds; `Rung` explains them."""


class Bound(StrEnum):
    """The reason why a step cannot be shorter."""

    COMMUNICATION = "communication"
    COMPUTE = "compute"
    REST = "rest"
    FASTEST_RANK = "fastest_rank"
    NEXT_RANK = "next_rank"


class Rung(msgspec.Struct, frozen=True, gc=False):
    """One what-if bound: without the cost that `name` removes, a step takes at least `step_ns`.

    at_most_communication_hidden   all communication under compute; not shorter than the communication itself
    at_most_data_free              no waiting for data, nor for a rank that waits for data
    at_most_straggler_median       the late rank as fast as the median; absent where the ranks are not compared
    at_most_launch_gaps_gone       no idle time in which the host had launched nothing
    at_most_all                    exposed communication, data wait, launch gaps and the late rank's excess gone

    A pipeline has no bound for communication: its ranks communicate while they wait for each other's work.

    `gain_ratio` is the share of the step that is saved (0..1); bounds do not add up.
    """

    name: Label
    step_ns: Nanoseconds
    gain_ratio: Gain
    bound: Bound

    def __post_init__(self) -> None:
        """Rename a bound of a recording or a hook from before bounds were called `at_most_`."""
        if self.name in QUESTIONS:
            msgspec.structs.force_setattr(self, "name", AT_MOST + self.name)


class WhatIf(msgspec.Struct, frozen=True, kw_only=True, tag="what_if"):
    """The what-if bounds of one rank (`of_rank`) or of the whole job (None), over the last `steps` steps up to `step`.

    `pace_ns` is the mean step today: the rank's, or the slowest rank's.  `source` is "exact" only if every step was
    profiled.  `calibration_age_steps` is the age of the oldest calibration behind the ledgers, zero where all are
    exact.
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
