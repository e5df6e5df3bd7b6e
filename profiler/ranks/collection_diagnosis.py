"""Decides whether Python's garbage collector makes a rank hold the others up.

A collection takes one step in ten or one in a hundred, which the median of a range does not show.  But its time is
measured, not inferred, so it is summed over ranges.  A rank's window begins with a range in which it collects for
longer than the median of the others, and ends when the mean excess in it is no longer worth a line in the log.  In its
window a rank is late for its collector if

    its excess is larger than SPREADS times what chance may do
    the others wait longer than it does, by at least AGREEMENT of that (not known on a device job)

All ranks of a healthy job collect, at other steps, and by chance one more often than another.  If collections came
independently, a sum S of them would vary by at most sqrt(L S), with L the longest of them (the variance of a compound
Poisson sum is the sum of the squares).

Pure; `straggler_detector` adds up the evidence over ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import NamedTuple

from .cusum import excesses
from .exchange.phase_sums_message import RankRange

__all__ = ["Collecting", "CollectionDiagnosis"]

ABSOLUTE_NS = 1_000_000
RELATIVE = 0.05
"""The smallest excess in a step that matters; half as much as for late ranks, because it is measured."""

SPREADS = 5.0
"""Equal collections on one rank alone prove it after the 25th.  It takes so many because a window begins where it suits
the suspicion."""

QUIET_INTERVALS = 8.0
"""A rank that collects nothing for so many times its mean interval has stopped."""

AGREEMENT = 0.5
"""As for late ranks (`straggler_detector`)."""


class Collecting(NamedTuple):
    """`rank` collects garbage for `excess_ns` a step longer than the others, the last time mostly in `phase`."""

    rank: int
    excess_ns: int
    phase: str


@dataclass(slots=True)
class _Window:
    """Sums over the ranges of one rank's window, in nanoseconds, and the longest collection of any rank in it."""

    steps: int = 0
    wall_ns: float = 0.0
    excess_ns: float = 0.0
    collected_ns: float = 0.0
    """By this rank and by the median of the others together."""
    waited_ns: float = 0.0
    """How much longer it waited than the others; negative where they waited for it."""
    longest_ns: float = 0.0
    quiet_steps: int = 0
    phase: str = ""

    @property
    def is_worthwhile(self) -> bool:
        """Whether the mean excess is worth a line in the log."""
        return self.excess_ns > max(ABSOLUTE_NS * self.steps, RELATIVE * self.wall_ns)

    @property
    def is_unlikely(self) -> bool:
        """Whether chance does not explain the excess."""
        return self.excess_ns > SPREADS * sqrt(self.longest_ns * self.collected_ns)

    @property
    def has_stopped(self) -> bool:
        """Whether the rank has collected nothing for long, by its mean interval in the window."""
        return self.quiet_steps * self.excess_ns > QUIET_INTERVALS * self.longest_ns * self.steps


class CollectionDiagnosis:
    """Tests ranges in order."""

    def __init__(self) -> None:
        self._windows: dict[int, _Window] = {}

    def judge(self, rows: Sequence[RankRange], waits: tuple[str, ...], own: Sequence[str]) -> Collecting | None:
        """Add one range; return the rank that collects the longest if that holds the others up.

        `waits` are the phases in which ranks wait for others, and `own` those in which they do not.  A range in which a
        rank measured no step is skipped.
        """
        if not all(row.measured for row in rows) or not (self._windows or any(row.gc_ns for row in rows)):
            return None
        collected = [(row.gc_ns or 0) / row.measured for row in rows]
        over = excesses([round(one) for one in collected])
        waited = excesses([sum(map(row.sums.__getitem__, waits)) // row.measured for row in rows])
        longest = max(row.gc_longest_ns / row.measured * row.steps for row in rows)
        for rank, excess in enumerate(over):
            if excess > 0:
                self._windows.setdefault(rank, _Window())
        proven: list[Collecting] = []
        for rank, window in list(self._windows.items()):
            row = rows[rank]
            window.steps += row.steps
            window.wall_ns += row.steps * (row.wall_ns or 0)
            window.excess_ns += row.steps * over[rank]
            window.collected_ns += row.steps * (2 * collected[rank] - over[rank])
            window.waited_ns += row.steps * waited[rank]
            window.longest_ns = max(window.longest_ns, longest)
            window.quiet_steps = 0 if row.gc_ns else window.quiet_steps + row.steps
            if row.gc_ns:
                window.phase = max(own, key=lambda phase: excesses([other.sums[phase] for other in rows])[rank])
            if not window.is_worthwhile or (window.is_unlikely and window.has_stopped):
                del self._windows[rank]
            elif window.is_unlikely and (row.on_device or -window.waited_ns >= AGREEMENT * window.excess_ns):
                proven.append(Collecting(rank, round(window.excess_ns / window.steps), window.phase))
        return max(proven, key=lambda one: one.excess_ns, default=None)
