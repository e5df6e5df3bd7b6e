"""Finds unevenly spread work: a different rank has more in each step, and none is slow throughout.

Sequences of different lengths make the same kernels take different times on each rank and in each step.  No rank stands
out, so none is named, but all wait for the one with the most work.  To replay an even spread, each kernel takes its
usual time, scaled so that the work of the step stays the same.  Noise of kernels averages out over a part of a step,
and stops hit few kernels; uneven work shows in whole parts.  A stop makes one kernel longer than its neighbours.  It
stays where it is: spread over all ranks it would seem to cost nothing.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from ..graph.causes import CauseCode
from ..graph.job_graph import ReplayScenario
from ..graph.rank_graph import RankGraph, RankWeights
from ..shelf import Derived, Shelf
from .key_blocks import in_blocks
from .peers import PARTS, Atoms, with_durations

__all__ = ["SPREAD_RATIO_MIN", "Uneven", "spread_evenly"]

SPREAD_RATIO_MIN = 0.02
"""Work is uneven from this robust standard deviation of the ranks' compute in a part of a step on; kernels that vary by
3 % each leave 0.7 %."""

UNEVEN_STEPS_MIN = 2
"""Steps in which work must be uneven; in one step it may be chance."""

MOST_STEPS_RATIO = 0.5
"""If work is uneven in more than this part of the steps, it is spread evenly in all of them."""

COMMON_RATIO_MIN = 4.0
"""A part must vary by this many times the variance of independent kernels: all kernels of a long sequence are long
together, while independent variation averages out."""

STOP_RATIO_MIN = 0.1
"""A kernel may be longer than its neighbours by this ratio, three times a noise of 3 %; anything above is a stop."""

STOPPED_RATIO_MAX = 0.01
"""The share of a rank's kernels that stops can hit.  If more are longer, that is their own length, as for rows that are
each a whole forward pass of one sequence."""

NEIGHBOURS = 5
"""The median of this many kernels in a row shows what makes all of them long; a layer has more."""

CHI_SQUARE_MEDIAN = 0.455
"""The median square of a normal deviate of variance one."""

Floats = NDArray[np.float64]
Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Uneven:
    """Uneven compute: the scenario in which it is spread evenly, how much it varies, and in which steps.

    `totals_ns` (ranks, steps) is each rank's compute.
    """

    scenario: ReplayScenario
    spread_ratio: float
    is_in_step: NDArray[np.bool_]
    totals_ns: Index


def spread_evenly(
    atoms: Sequence[Atoms], roles: Sequence[Sequence[int]], steps: int, now: ReplayScenario, shelf: Shelf
) -> Uneven | None:
    """Return the uneven compute; None if it is even.  Ranks are compared with those of their role."""
    apart, noise = [], []
    evens: list[tuple[Sequence[int], Sequence[Index], Sequence[Index]]] = []
    totals = np.zeros((len(atoms), steps), dtype=np.int64)
    for group in roles:
        members = Derived(Derived(group, atoms.__getitem__), _compute)
        for place, mine in zip(group, members, strict=True):
            totals[place] = np.bincount(mine.step, mine.duration_ns, steps)
        if len(group) < 2:
            continue
        keys, times = Derived(members, lambda mine: mine.key), Derived(members, lambda mine: mine.duration_ns)
        medians = in_blocks(_lower_medians, keys, times)
        usual = shelf.keep(np.minimum(own, _explained(own, median)) for own, median in zip(times, medians, strict=True))
        means = in_blocks(_means, keys, usual)
        both = [
            _parts(mine.step * PARTS + mine.part, own, mean, steps * PARTS)
            for mine, own, mean in zip(members, usual, means, strict=True)
        ]
        off = np.stack([each for each, _ in both])
        # One slow rank makes all others look fast against the mean; that is not uneven work.
        apart.append(off - np.nanmedian(np.where(np.isnan(off).all(axis=0), 0.0, off), axis=0))
        noise.append(np.stack([each for _, each in both]))
        evens.append((group, usual, shelf.keep(_even(members, usual, steps))))
    if not apart:
        return None
    spread, is_in_step = _uneven_steps(np.concatenate(apart), np.concatenate(noise), steps)
    if is_in_step.sum() < UNEVEN_STEPS_MIN:
        return None
    ranks = dict(now.ranks)
    # If most steps are uneven, all are: the test of a single step is weak.
    spread_in = np.ones_like(is_in_step) if is_in_step.mean() > MOST_STEPS_RATIO else is_in_step
    for group, usual, even in evens:
        for at, place in enumerate(group):
            ranks[place] = partial(_spread, atoms[place], usual[at], even[at], spread_in, ranks.get(place))
    return Uneven(ReplayScenario(ranks, now.wire_ns), spread, is_in_step, totals)


def _compute(mine: Atoms) -> Atoms:
    """Return the pieces of compute."""
    at = np.flatnonzero(mine.cause == CauseCode.COMPUTE)
    return Atoms(*(getattr(mine, each.name)[at] for each in fields(Atoms)))


def _spread(
    mine: Atoms,
    usual: Index,
    even: Index,
    steps: NDArray[np.bool_],
    before: Callable[[RankGraph], RankWeights] | None,
    graph: RankGraph,
) -> RankWeights:
    """Return the durations of a rank with its compute in `steps` spread evenly, and its stops where they were."""
    compute = _compute(mine)
    inside = np.flatnonzero(steps[compute.step])
    durations = even[inside] + compute.duration_ns[inside] - usual[inside]
    return with_durations(before(graph) if before is not None else graph.weights, compute, inside, durations)


def _uneven_steps(apart: Floats, chance: Floats, steps: int) -> tuple[float, NDArray[np.bool_]]:
    """Return the spread of the parts of uneven steps, and which steps these are; inputs are (ranks, steps * PARTS)."""
    is_uneven = np.zeros(steps, dtype=np.bool_)
    spreads = np.zeros(steps)
    for step in range(steps):
        columns = slice(step * PARTS, (step + 1) * PARTS)
        squares, by_chance = apart[:, columns] ** 2, chance[:, columns]
        known = ~np.isnan(squares)
        if known.any():
            square = float(np.median(squares[known]))
            spreads[step] = 1.4826 * np.sqrt(square)
            is_common = square > COMMON_RATIO_MIN * CHI_SQUARE_MEDIAN * np.median(by_chance[known])
            is_uneven[step] = spreads[step] >= SPREAD_RATIO_MIN and is_common
    return float(np.median(spreads[is_uneven])) if is_uneven.any() else 0.0, is_uneven


def _parts(part: Index, own: Index, even: Index, parts: int) -> tuple[Floats, Floats]:
    """Return, for each part of a rank's steps, how far its compute is off the mean, and the square expected by chance.

    By chance means that kernels vary independently, as much as those of the part do.  Both are NaN where a part has too
    few kernels.
    """
    count, mean = np.bincount(part, minlength=parts), np.bincount(part, even, parts)
    off = np.bincount(part, own, parts) / np.maximum(mean, 1) - 1
    rest = np.bincount(part, (own - even * (1 + off[part])) ** 2, parts)
    used = (count > 2) & (mean > 0)
    by_chance = rest / np.maximum(mean, 1) ** 2 * count / np.maximum(count - 1, 1)
    return np.where(used, off, np.nan), np.where(used, by_chance, np.nan)


def _explained(own: Index, median: Index) -> Index:
    """Return how long each kernel may be, judging by its neighbours; attention grows with the square of the length."""
    if len(own) < NEIGHBOURS:
        return own
    ratio = np.pad(own / np.maximum(median, 1), NEIGHBOURS // 2, mode="edge")
    more = np.maximum(np.median(np.lib.stride_tricks.sliding_window_view(ratio, NEIGHBOURS), axis=1) - 1, 0.0)
    found: Index = np.rint(median * ((1 + more) ** 2 + STOP_RATIO_MIN)).astype(np.int64)
    return own if (own > found).mean() > STOPPED_RATIO_MAX else found


def _lower_medians(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each member's pieces the lower median over the members that have them."""
    key, value = np.concatenate(keys), np.concatenate(values)
    order = np.lexsort((value, key))
    _, begins, number, counts = np.unique(key[order], return_index=True, return_inverse=True, return_counts=True)
    found = np.empty(len(key), dtype=np.int64)
    found[order] = value[order][begins + (counts - 1) // 2][number]
    return np.split(found, np.cumsum([len(each) for each in keys])[:-1])


def _even(members: Sequence[Atoms], values: Sequence[Index], steps: int) -> Iterator[Index]:
    """Yield each piece's usual duration over all members and steps, scaled so that each step's work stays the same.

    So work is spread over the microbatches of a step too: a pipeline waits for its longest.
    """
    usual = in_blocks(_lower_medians, Derived(members, lambda mine: mine.place), values)
    work, least = np.zeros(steps), np.zeros(steps)  # exact below 2**53 ns
    for mine, value, its in zip(members, values, usual, strict=True):
        work += np.bincount(mine.step, value, steps)
        least += np.bincount(mine.step, its, steps)
    for mine, its in zip(members, usual, strict=True):
        yield np.rint(its * (work / np.maximum(least, 1))[mine.step]).astype(np.int64)


def _means(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each member's pieces the mean over the members that have them."""
    _, number, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    sums = np.bincount(number, np.concatenate(values))
    even = np.rint(sums / counts).astype(np.int64)[number]
    return np.split(even, np.cumsum([len(key) for key in keys])[:-1])
