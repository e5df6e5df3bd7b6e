"""Finds work that is spread unevenly: now this rank has more, now that, and nobody is slow.

Sequences of different lengths make the same kernels take differently long on each rank, in every step anew.  No rank
stands out, so none is named, and yet all wait for whoever has most.  What an even spread would save is played with each
kernel at the mean of its peers.  Noise of kernels averages out over a part of a step and stops hit few of them; uneven
work shows in the usual part.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .causes import Cause
from .job_graph import JobGraph, Scenario
from .peers import PARTS, Atoms, with_durations

__all__ = ["SPREAD_RATIO_MIN", "spread_evenly"]

SPREAD_RATIO_MIN = 0.02
"""The robust standard deviation of ranks' compute in a part of a step from which on work is uneven; kernels that vary
by 3 % each leave 0.7 % there."""

Index = NDArray[np.int64]


def spread_evenly(
    graph: JobGraph, atoms: Sequence[Atoms], roles: Sequence[Sequence[int]], steps: int, now: Scenario
) -> tuple[Scenario, float, Index] | None:
    """Return the scenario with compute spread evenly, the spread, and each rank's compute by step; None if it is even.

    Ranks are compared with those of their role.
    """
    apart, ranks = [], dict(now.ranks)
    totals = np.zeros((len(atoms), steps), dtype=np.int64)
    for group in roles:
        chosen = [np.flatnonzero(atoms[place].cause == Cause.COMPUTE) for place in group]
        parts = np.stack(
            [
                np.bincount(
                    (atoms[place].step * PARTS + atoms[place].part)[at], atoms[place].duration_ns[at], steps * PARTS
                )
                for place, at in zip(group, chosen, strict=True)
            ]
        )
        totals[list(group)] = parts.reshape(len(group), steps, PARTS).sum(axis=2)
        mean = parts.mean(axis=0)
        if len(group) > 1 and (mean > 0).any():
            apart.append(((parts - mean) / np.where(mean > 0, mean, 1))[:, mean > 0].reshape(-1))
            means = _means([atoms[place].key[at] for place, at in zip(group, chosen, strict=True)],
                           [atoms[place].duration_ns[at] for place, at in zip(group, chosen, strict=True)])  # fmt: skip
            for place, at, even in zip(group, chosen, means, strict=True):
                before = ranks.get(place, graph.ranks[place].weights)
                ranks[place] = with_durations(before, atoms[place], at, even)
    if not apart:
        return None
    spread = 1.4826 * float(np.median(np.abs(np.concatenate(apart))))
    if spread < SPREAD_RATIO_MIN:
        return None
    return Scenario(ranks, now.wire_ns), spread, totals


def _means(keys: Sequence[Index], values: Sequence[Index]) -> list[Index]:
    """Return for each member's pieces the mean over the members that have them."""
    _, number, counts = np.unique(np.concatenate(keys), return_inverse=True, return_counts=True)
    sums = np.bincount(number, np.concatenate(values))
    even = np.rint(sums / counts).astype(np.int64)[number]
    return np.split(even, np.cumsum([len(key) for key in keys])[:-1])
