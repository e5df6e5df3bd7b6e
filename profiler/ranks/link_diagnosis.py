"""Decides whether one rank's link is slow: all ranks wait longer, none is late, one rank's sockets are busy.

Longer waits alone do not prove it: a machine that is busy with something else makes all ranks wait too, in bursts of
seconds.  So a range is evidence against the link of one rank only if

    all ranks wait longer than usual by more than a bound, and no rank is late
    that rank's sockets are busy, BUSY_STANDS_OUT times as much as any other's, and
    busier than usual by at least AGREEMENT of the growth of the common wait
    the share of time in which the rank, or any task on its machine, waits for a processor did not grow as much

Usual is the median of the ranges so far in which no link was suspected.  Without figures of TCP sockets (NVLink,
InfiniBand, shared memory) the cause could be anything, so no link is named.  A range shorter than RANGE_SECONDS has
proportionally less weight, because ranges close in time are not independent.

Pure; `straggler_detector` adds up the evidence over ranges.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from .cusum import median, upper
from .exchange.phase_sums_message import RankRange

__all__ = ["HISTORY_MIN", "RANGE_SECONDS", "LinkDiagnosis", "Slow"]

ABSOLUTE_NS = 1_000_000
RELATIVE = 0.10
"""As for late ranks (`straggler_detector`)."""

NOISE_QUANTILE = 0.95
"""Quantile of the waits so far.  Not doubled as for late ranks, because the sockets must confirm it."""

AGREEMENT = 0.5
"""The share of the growth that the sockets must show as busy, and the processors must not show as waiting."""

BUSY_RATIO_MIN = 0.3
BUSY_STANDS_OUT = 1.5
"""Sockets must be busy for this share of the time, and this many times as busy as any other rank's.

In a ring, a neighbour's sockets are half as busy.
"""

HISTORY = 64
HISTORY_MIN = 8
"""Ranges before a usual value exists.  This halves the chance of blaming a link for a job's slow start."""

RANGE_SECONDS = 0.2
"""The test needs three ranges, so at least 0.6 s: a burst of other work on the machine is mostly over by then."""


class Slow(NamedTuple):
    """One range in which the link of `rank` was slow."""

    rank: int
    excess_ns: int
    weight: float


class _Usual(NamedTuple):
    """One range: the wait common to all ranks per step, and each rank's busy socket time and CPU waits."""

    common_ns: int
    busy_ns: tuple[int, ...]
    cpu_wait_ratios: tuple[float, ...]
    pressure_ratios: tuple[float, ...]


class LinkDiagnosis:
    """Tests ranges in order; `learn` adds the last one to the history that defines usual."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._history: deque[_Usual] = deque(maxlen=HISTORY)
        self._last: _Usual | None = None

    def forget(self) -> None:
        """Clear the history; usual values are learned again."""
        self._history.clear()
        self._last = None

    def learn(self) -> None:
        """Add the range that was judged last to the history of usual ranges."""
        if self._last is not None:
            self._history.append(self._last)
            self._last = None

    def judge(
        self, rows: Sequence[RankRange], medians: Sequence[Mapping[str, int]], *, is_any_rank_late: bool
    ) -> Slow | None:
        """Return the link that was slow in this range; None if none was or the figures do not show it."""
        self._last = None
        if any(row.on_device and row.device is None for row in rows):
            return None  # host timers do not see waiting there
        walls = [m["wall"] for m in medians]
        busy = _known([row.around.busy_ratio for row in rows])
        if busy is None:
            return None
        zeros = (0.0,) * self._world_size
        now = self._last = _Usual(
            min(m["tail"] for m in medians),
            tuple(round(ratio * wall) for ratio, wall in zip(busy, walls, strict=True)),
            _known([row.around.cpu_wait_ratio for row in rows]) or zeros,
            _known([row.around.pressure_ratio for row in rows]) or zeros,
        )
        if is_any_rank_late or len(self._history) < HISTORY_MIN:
            return None
        usual = median([past.common_ns for past in self._history])
        noise = upper([abs(past.common_ns - usual) for past in self._history], NOISE_QUANTILE) or 0
        growth = now.common_ns - usual
        if growth <= max(ABSOLUTE_NS, round(RELATIVE * median(walls)), noise):
            return None
        rank = _stands_out(busy)
        if rank is None:
            return None
        usually_busy = median([past.busy_ns[rank] for past in self._history])
        if now.busy_ns[rank] - usually_busy < AGREEMENT * growth or self._is_busy_machine(now, growth, walls):
            return None
        return Slow(rank, growth, min(1.0, median(walls) * rows[0].steps / 1e9 / RANGE_SECONDS))

    def _is_busy_machine(self, now: _Usual, growth: int, walls: Sequence[int]) -> bool:
        """Return whether waits for a processor explain the growth.

        Only the growth of their share counts: on a full machine some task always waits.
        """
        for rank, wall in enumerate(walls):
            for ratios_of in (attrgetter("cpu_wait_ratios"), attrgetter("pressure_ratios")):
                usual = statistics.median(ratios_of(past)[rank] for past in self._history)
                if (ratios_of(now)[rank] - usual) * wall >= AGREEMENT * growth:
                    return True
        return False


def _known(ratios: Sequence[float | None]) -> tuple[float, ...] | None:
    """Return `ratios`, or None if one is missing."""
    known = tuple(ratio for ratio in ratios if ratio is not None)
    return known if len(known) == len(ratios) else None


def _stands_out(ratios: Sequence[float]) -> int | None:
    """Return the rank whose sockets are much busier than all others'; None if there is none."""
    second, most = sorted(ratios)[-2:]
    return ratios.index(most) if most >= BUSY_RATIO_MIN and most >= BUSY_STANDS_OUT * second else None
