"""Finds work that is spread unevenly: now this rank has more, now that, and nobody is slow.

Sequences of different lengths make the same kernels take differently long on each rank, in every step anew.  No rank
stands out, so none is named, and yet all wait for whoever has most.  What an even spread would save is played with each
kernel at the mean of its peers.  Noise of kernels averages out over a part of a step and stops hit few of them; uneven
work shows in the usual part.  A stop makes one kernel longer than the others of its part, and stays where it is: spread
over all ranks it would seem to cost nobody anything.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..all_ranks.job_graph import JobGraph, Scenario
from ..one_rank.causes import Cause
from .peers import PARTS, Atoms, with_durations
from .significance import OUT_Z

__all__ = ["SPREAD_RATIO_MIN", "spread_evenly"]

SPREAD_RATIO_MIN = 0.02
"""The robust standard deviation of ranks' compute in a part of a step from which on work is uneven; kernels that vary
by 3 % each leave 0.7 % there."""

COMMON_RATIO_MIN = 4.0
"""How many times the variance that kernels have by themselves a part must vary: all kernels of a long sequence are long
together, and what makes each kernel vary alone averages out."""

STOP_RATIO_MIN = 0.1
"""What a kernel may be longer than its part explains before the rest of it is a stop: three times a noise of 3 %.

Where kernels differ by more from what their parts explain it is `OUT_Z` robust standard deviations of that: a row that
is a whole forward pass has a sequence, and so a length, of its own."""

CHI_SQUARE_MEDIAN = 0.455
"""The median square of a normal deviate of variance one."""

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


def spread_evenly(
    graph: JobGraph, atoms: Sequence[Atoms], roles: Sequence[Sequence[int]], steps: int, now: Scenario
) -> tuple[Scenario, float, Index] | None:
    """Return the scenario with compute spread evenly, the spread, and each rank's compute by step; None if it is even.

    Ranks are compared with those of their role.
    """
    apart, noise, ranks = [], [], dict(now.ranks)
    totals = np.zeros((len(atoms), steps), dtype=np.int64)
    for group in roles:
        chosen = [np.flatnonzero(atoms[place].cause == Cause.COMPUTE) for place in group]
        keys = [atoms[place].key[at] for place, at in zip(group, chosen, strict=True)]
        times = [atoms[place].duration_ns[at] for place, at in zip(group, chosen, strict=True)]
        parts = [atoms[place].step[at] * PARTS + atoms[place].part[at] for place, at in zip(group, chosen, strict=True)]
        usual = [
            np.minimum(own, _explained(own, median, part))
            for own, median, part in zip(times, _lower_medians(keys, times), parts, strict=True)
        ]
        columns = zip(group, chosen, times, usual, _means(keys, usual), parts, strict=True)
        for place, at, own, without, even, part in columns:
            totals[place] = np.bincount(atoms[place].step[at], own, steps)
            if len(group) > 1:
                off, by_chance = _parts(part, without, even, steps * PARTS)
                apart.append(off)
                noise.append(by_chance)
                weights = ranks.get(place, graph.ranks[place].weights)
                ranks[place] = with_durations(weights, atoms[place], at, even + own - without)
    if not apart:
        return None
    squares, chance = np.concatenate(apart) ** 2, np.concatenate(noise)
    if len(squares) == 0:
        return None
    spread = 1.4826 * float(np.sqrt(np.median(squares)))
    is_common = np.median(squares) > COMMON_RATIO_MIN * CHI_SQUARE_MEDIAN * np.median(chance)
    if spread < SPREAD_RATIO_MIN or not is_common:
        return None
    return Scenario(ranks, now.wire_ns), spread, totals


def _parts(part: Index, own: Index, even: Index, parts: int) -> tuple[Floats, Floats]:
    """Return for each part of a rank's steps how far its compute is off the mean, and that squared by chance.

    By chance: if each kernel were off by itself, as far as those of the part are off each other.
    """
    count, mean = np.bincount(part, minlength=parts), np.bincount(part, even, parts)
    off = np.bincount(part, own, parts) / np.maximum(mean, 1) - 1
    rest = np.bincount(part, (own - even * (1 + off[part])) ** 2, parts)
    used = (count > 2) & (mean > 0)
    by_chance = rest[used] / mean[used] ** 2 * count[used] / (count[used] - 1)
    return off[used], by_chance


def _explained(own: Index, median: Index, part: Index) -> Index:
    """Return how long each kernel can be for what makes all of its part long; attention goes with the square."""
    order = np.argsort(part, kind="stable")
    ratio = own / np.maximum(median, 1)
    _, begins, number = np.unique(part[order], return_index=True, return_inverse=True)
    usual = np.array([np.median(some) for some in np.split(ratio[order], begins[1:])])
    typical = np.empty(len(own))
    typical[order] = usual[number]
    apart = np.abs(ratio / np.maximum(typical, 1e-9) - 1)
    scatter = 1.4826 * float(np.median(apart)) if len(apart) else 0.0
    more = np.maximum(typical - 1, 0.0)
    found: Index = np.rint(median * ((1 + more) ** 2 + max(STOP_RATIO_MIN, OUT_Z * scatter))).astype(np.int64)
    return found


def _lower_medians(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each member's pieces the lower median over the members that have them."""
    key, value = np.concatenate(keys), np.concatenate(values)
    order = np.lexsort((value, key))
    _, begins, number, counts = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    found = np.empty(len(key), dtype=np.int64)
    found[order] = value[order][begins + (counts - 1) // 2][number]
    return np.split(found, np.cumsum([len(each) for each in keys])[:-1])


def _means(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each member's pieces the mean over the members that have them."""
    _, number, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    sums = np.bincount(number, np.concatenate(values))
    even = np.rint(sums / counts).astype(np.int64)[number]
    return np.split(even, np.cumsum([len(key) for key in keys])[:-1])
