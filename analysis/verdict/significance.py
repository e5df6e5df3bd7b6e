"""Tests whether a rank's excess over its peers is real or chance.

Some rank is always slowest.  If the ranks do not differ, the excesses within a step could as well belong to other
ranks.  So they are dealt out again at random, many times, and the largest sum of any rank is compared with the observed
one.  This permutation test over steps holds for any noise distribution and needs no correction for the number of ranks.
One outlying step must not name a rank, so each rank's extreme steps are first set to its next ones (winsorised).

A few steps are too few for that test.  There `steps_out` measures how far a step stands out from all that the other
ranks did, and the caller decides where that is enough.

Pure: arrays in, answers out; the random numbers are seeded, so the same traces give the same answer.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LONG_OUT_RATIO",
    "P_MAX",
    "change_step",
    "lasting_ratio",
    "least_p",
    "outliers",
    "permutation_p",
    "spread_ratio",
    "steps_out",
    "winsorised",
]

P_MAX = 0.003
"""Of 400 healthy simulated jobs one had a rank below this that also saved enough to be named."""

DEALS = 3_000
"""Random deals; the smallest possible p is one in so many."""

CELLS_MAX = 20_000_000
"""Cells dealt out in all: very many ranks and steps get fewer deals, at least `DEALS_MIN`."""

DEALS_MIN = 1_000

OUT_Z = 8.0
"""A step stands out from so many robust standard deviations on."""

OUT_RATIO = 5.0
"""It must also be so many times as long as any other rank's step."""

LONG_OUT_RATIO = 2.5
"""The same for steps longer than chance explains by itself: in a large job some rank always stops for a moment."""

RIVALRY_RANKS_MIN = 2
"""The least number of other ranks to compare with, beside the two rivals."""

SINCE_RATIO_MAX = 0.35
"""A fault began in a step if the mean excess before it is at most this part of the mean from then on."""

Excess = NDArray[np.float64]
Index = NDArray[np.int64]


def winsorised(excess: Excess) -> Excess:
    """Return `excess` (ranks, steps) with each rank's largest and smallest step set to its next, from 4 steps on."""
    if excess.shape[1] < 4:
        return excess
    ordered = np.sort(excess, axis=1)
    clipped: Excess = np.clip(excess, ordered[:, 1:2], ordered[:, -2:-1])
    return clipped


def permutation_p(excess: Excess, rank: int) -> float:
    """Return the probability that some rank's sum is as large as this one's if the ranks are alike."""
    ranks, steps = excess.shape
    if ranks < 2 or steps < 1:
        return 1.0
    pulled = winsorised(excess)
    pulled = pulled - pulled.mean(axis=0)
    seen = pulled[rank].sum()
    deals = int(np.clip(CELLS_MAX // (ranks * steps), DEALS_MIN, DEALS))
    random = np.random.default_rng(0)
    as_large = 0
    for _ in range(deals):
        as_large += bool(random.permuted(pulled, axis=0).sum(axis=1).max() >= seen - 0.5)
    return (as_large + 1) / (deals + 1)


def least_p(ranks: int, columns: int) -> float:
    """Return the smallest possible `permutation_p`: that of one rank being the largest in every column."""
    return float(ranks) ** (1 - columns) if ranks > 1 and columns > 0 else 1.0


def lasting_ratio(excess: NDArray[np.float64], dropped: int) -> float:
    """Return the part of an excess (by step) that remains when its largest steps are set to the next."""
    total = float(excess.sum())
    if total <= 0:
        return 0.0
    if len(excess) < 4:
        return 1.0
    limit = np.sort(excess)[-1 - min(dropped, len(excess) - 1)]
    return float(np.clip(np.minimum(excess, limit).sum() / total, 0.0, 1.0))


def spread_ratio(parts: NDArray[np.float64]) -> float:
    """Return the part of an excess (steps, parts) that remains without the largest part of each step.

    A stop is in one part of its step; slow work is slow in all of them.
    """
    total = float(parts.sum())
    return float(np.clip((parts.sum() - parts.max(axis=1).sum()) / total, 0.0, 1.0)) if total > 0 else 0.0


def steps_out(excess: Excess, rank: int, long_ns: float = np.inf) -> Index:
    """Return the steps in which `rank` stands out from all steps of all other ranks; above `long_ns` less is enough.

    Two ranks that both stand out would hide each other.  So one other rank is left out if it stands out itself.
    """
    others = np.delete(excess, rank, axis=0)
    out = _out(excess[rank], others, long_ns)
    if len(out) or len(others) <= RIVALRY_RANKS_MIN:
        return out
    rival = int(others.max(axis=1).argmax())
    rest = np.delete(others, rival, axis=0)
    return _out(excess[rank], rest, long_ns) if len(_out(others[rival], rest, long_ns)) else out


def _out(own: Excess, others: Excess, long_ns: float) -> Index:
    """Return the steps in which `own` (by step) stands out from `others` (ranks, steps)."""
    if others.size < 3:
        return np.empty(0, dtype=np.int64)
    middle = np.median(others)
    scale = max(1.4826 * float(np.median(np.abs(others - middle))), 1.0)
    ratio = np.where(own > long_ns, LONG_OUT_RATIO, OUT_RATIO)
    is_out = ((own - middle) / scale > OUT_Z) & (own > ratio * max(float(others.max()), 0.0)) & (own > 0)
    return np.flatnonzero(is_out)


def outliers(excess: Excess) -> list[tuple[int, int]]:
    """Return each (rank, step) whose excess is far above all others."""
    middle = np.median(excess)
    scale = max(1.4826 * float(np.median(np.abs(excess - middle))), 1.0)
    found: list[tuple[int, int]] = [(int(a), int(b)) for a, b in np.argwhere(excess - middle > OUT_Z * scale)]
    return found


def change_step(excess: NDArray[np.float64]) -> int:
    """Return the index of the step from which on a rank's excess (by step) is at its later level."""
    steps = len(excess)
    best, found = 0.0, 0
    for at in range(1, steps):
        before, after = float(excess[:at].mean()), float(excess[at:].mean())
        gain = (after - before) ** 2 * at * (steps - at)
        if before <= SINCE_RATIO_MAX * after and gain > best:
            best, found = gain, at
    return found
