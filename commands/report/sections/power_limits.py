"""Compares a step's time and energy under the GPUs' power limits that were in force while one setting was.

A model of the board (power by clock, clock by limit) would advise a limit that was never tried.  This states measured
points only.  The stretch is cut into pieces; a piece counts for a limit if all of the job's GPUs had it all the time:

    limit    700 700 700 700 700 500 500 500 ...      from recordings, with the energy counters
    pieces   |-------|-------|   --  |-------|        the pace in each is the ranks'
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from statistics import fmean

from pacecar.records.recording import Tick

from ..document import PowerPoint
from ..figures import ratio_interval
from ..reading.step_sums import Bin, TimeLine
from .recorded_utilization import ENERGY, GAP_NS_MAX, Hosts, Span

__all__ = ["PowerLimits"]

LIMIT = "pacecar_gpu_power_limit_watts"
CAPPED = "pacecar_gpu_clock_event_seconds_total"
CAPPED_REASON = "sw_power_cap"

PIECE_NS_MIN = 5_000_000_000
"""A few ticks and, of most jobs, several steps."""


class PowerLimits:
    """Ticks of all hosts within `span`, cut along `line`; `hosts` knows which GPUs are the job's."""

    def __init__(self, hosts: Hosts, span: Span | None, line: TimeLine) -> None:
        self._hosts = hosts
        self._span = (0, 0) if span is None else span
        self._bins: Mapping[int, Bin] = line.bins
        self._bins_each = math.ceil(PIECE_NS_MIN / line.width_ns)
        self._piece_ns = self._bins_each * line.width_ns
        self._start_ns = line.start_ns or 0
        self._limits: dict[int, set[float | None]] = defaultdict(set)
        self._energies: dict[int, dict[tuple[str, str], tuple[float, int]]] = defaultdict(dict)
        self._capped: dict[int, list[float]] = defaultdict(list)
        self._last: dict[str, Tick] = {}

    def add(self, host: str, tick: Tick) -> None:
        """Add a tick; those outside the span are left out."""
        if not self._span[0] <= tick.wall_ns <= self._span[1]:
            self._last.pop(host, None)
            return
        piece = (tick.wall_ns - self._start_ns) // self._piece_ns
        before, self._last[host] = self._last.get(host), tick
        if before is None or not 0 < (wall_ns := tick.wall_ns - before.wall_ns) <= GAP_NS_MAX:
            return
        for metric, labels in tick.values:
            if metric == ENERGY and self._hosts.is_ours(host, labels[0], tick.values):
                self._add_gpu(piece, (host, labels[0]), before, tick, wall_ns)

    def _add_gpu(self, piece: int, gpu: tuple[str, str], before: Tick, tick: Tick, wall_ns: int) -> None:
        limit, energy = (LIMIT, (gpu[1],)), (ENERGY, (gpu[1],))
        self._limits[piece] |= {before.values.get(limit), tick.values.get(limit)}
        used = tick.values[energy] - before.values.get(energy, math.inf)
        if used >= 0:
            total = self._energies[piece].get(gpu, (0.0, 0))
            self._energies[piece][gpu] = total[0] + used, total[1] + wall_ns
        for (metric, labels), value in tick.values.items():
            was = before.values.get((metric, labels))
            if metric == CAPPED and labels[:2] == (gpu[1], CAPPED_REASON) and was is not None and value >= was:
                self._capped[piece].append(min(1.0, (value - was) / wall_ns))

    def points(self) -> tuple[PowerPoint, ...]:
        """Return the limits in force, highest first, each against the highest."""
        found: dict[float, list[tuple[int, float, float, float | None]]] = defaultdict(list)
        gpus = max((len(energies) for energies in self._energies.values()), default=0)
        for piece, energies in sorted(self._energies.items()):
            bins = [self._bins.get(piece * self._bins_each + i) for i in range(self._bins_each)]
            steps = sum(one.steps for one in bins if one is not None)
            limit, *others = self._limits[piece]
            if steps == 0 or limit is None or others or len(energies) < gpus:
                continue
            step_ns = sum(one.pace_ns for one in bins if one is not None) / steps
            watts = sum(millijoules * 1e6 / ns for millijoules, ns in energies.values())
            capped = fmean(self._capped[piece]) if self._capped[piece] else None
            found[limit].append((steps, step_ns, watts * step_ns / 1e9, capped))
        if not found:
            return ()
        first = found[max(found)]
        indices = tuple(sorted({gpu for energies in self._energies.values() for _, gpu in energies}, key=int))
        return tuple(
            PowerPoint(
                limit_watts=limit / 1000,
                gpus=indices,
                steps=sum(steps for steps, *_ in pieces),
                step_ns=fmean(step_ns for _, step_ns, _, _ in pieces),
                joules_per_step=fmean(joules for _, _, joules, _ in pieces),
                capped_ratio=_known_mean([capped for *_, capped in pieces]),
                step_change=None if pieces is first else ratio_interval([p[1] for p in first], [p[1] for p in pieces]),
                energy_change=None
                if pieces is first
                else ratio_interval([p[2] for p in first], [p[2] for p in pieces]),
            )
            for limit, pieces in sorted(found.items(), reverse=True)
        )


def _known_mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
