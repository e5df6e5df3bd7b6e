"""Adds up the phases of the host timers over ranges and ranks, for the job's ledger.

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add, itemgetter
from statistics import median_high

import msgspec

from .phase_sums_message import PHASES, RankRange

__all__ = ["SUMMED_PHASES", "LedgerSums", "RangeSums"]

SUMMED_PHASES = PHASES[1:]
"""The columns without `wall`, which is their sum."""

_summed = itemgetter(*SUMMED_PHASES)


class LedgerSums(msgspec.Struct, frozen=True, array_like=True):
    """The sums of `ranks` ranks over `steps` steps up to `step`, in nanoseconds by SUMMED_PHASES.

    They rest on `measured_steps`.  `paces_ns` are the mean steps of the slowest and of the median rank in the last
    range; None if a rank measured none of it.
    """

    ranks: int
    step: int
    steps: int
    measured_steps: int
    phases_ns: tuple[int, ...]
    paces_ns: tuple[int, int] | None


class RangeSums:
    """The sums over the ranges so far."""

    def __init__(self) -> None:
        self._phases = [0] * len(SUMMED_PHASES)
        self._steps = 0
        self._measured = 0

    def add(self, rows: Sequence[RankRange]) -> LedgerSums:
        """Add one range of all ranks; return the sums.

        Steps that a rank did not measure count as the mean of the steps that it measured in the range.
        """
        for row in rows:
            if row.measured:
                self._measured += row.measured
                sums: Iterable[int] = _summed(row.sums)
                if row.measured < row.steps:
                    sums = [duration * row.steps // row.measured for duration in sums]
                self._phases = [*map(add, self._phases, sums)]
        self._steps += rows[0].steps
        paces = [row.wall_ns for row in rows if row.wall_ns is not None]
        return LedgerSums(
            len(rows), rows[0].last_step, self._steps, self._measured, tuple(self._phases),
            (max(paces), median_high(paces)) if len(paces) == len(rows) else None,
        )  # fmt: skip
