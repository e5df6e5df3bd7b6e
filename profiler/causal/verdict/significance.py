"""Tests whether a rank's excess over its peers is its own, or chance.

Someone is always slowest.  If no rank differs from the others, then within each step the excesses could as well belong
to other ranks: so the excesses of a step are dealt out again at random, many times, and the largest sum that any rank
gets is compared with the one seen (a permutation test over steps; it holds for any distribution of noise and needs no
correction for the number of ranks).  One outlying step must not name a rank, so each rank's extreme steps are first
pulled in to its next (winsorised).

What happens in few steps has too few deals for such a test.  It is seen by how far it stands out of everything that
any other rank did (`steps_out`); the caller decides where that is enough.

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
"""Random deals; the least p is one in so many."""

CELLS_MAX = 20_000_000
"""Cells dealt out in all: with very many ranks and steps there are fewer deals, never fewer than `DEALS_MIN`."""

DEALS_MIN = 1_000

OUT_Z = 8.0
"""Robust standard deviations from which on a step stands out."""

OUT_RATIO = 5.0
"""How many times any other rank's step it must be."""

LONG_OUT_RATIO = 2.5
"""The same of what is longer than chance explains by itself: in a large job somebody always stops for a moment."""

RIVALRY_RANKS_MIN = 2
"""Other ranks, beside the two, that must be left to be stood out of."""

SINCE_RATIO_MAX = 0.35
"""A fault began in the step before which the rank's excess was no more than this of what it is afterwards."""

Excess = NDArray[np.float64]
Index = NDArray[np.int64]


def winsorised(excess: Excess) -> Excess:
    """Return `excess` (ranks, steps) with each rank's largest and smallest step set to its next; of 4 steps or more."""
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
    """Return the least that `permutation_p` can say: chance makes one of the ranks the largest in every column."""
    return float(ranks) ** (1 - columns) if ranks > 1 and columns > 0 else 1.0


def lasting_ratio(excess: NDArray[np.float64], dropped: int) -> float:
    """Return the part of an excess (by step) that is left when its largest steps are set to the next."""
    total = float(excess.sum())
    if total <= 0:
        return 0.0
    if len(excess) < 4:
        return 1.0
    limit = np.sort(excess)[-1 - min(dropped, len(excess) - 1)]
    return float(np.clip(np.minimum(excess, limit).sum() / total, 0.0, 1.0))


def spread_ratio(parts: NDArray[np.float64]) -> float:
    """Return the part of an excess (steps, parts) that is left without the largest part of each step.

    A stop is in one part of its step; work that is slow is slow in all of them.
    """
    total = float(parts.sum())
    return float(np.clip((parts.sum() - parts.max(axis=1).sum()) / total, 0.0, 1.0)) if total > 0 else 0.0


def steps_out(excess: Excess, rank: int, long_ns: float = np.inf) -> Index:
    """Return the steps in which `rank` stands out of everything that any other rank did in any step.

    Beyond `long_ns` less is enough.

    Of two ranks that both stand out of all the rest neither does of the other, and each would hide the other.  So one
    other rank is left out, if it stands out of the rest itself.
    """
    others = np.delete(excess, rank, axis=0)
    out = _out(excess[rank], others, long_ns)
    if len(out) or len(others) <= RIVALRY_RANKS_MIN:
        return out
    rival = int(others.max(axis=1).argmax())
    rest = np.delete(others, rival, axis=0)
    return _out(excess[rank], rest, long_ns) if len(_out(others[rival], rest, long_ns)) else out


def _out(own: Excess, others: Excess, long_ns: float) -> Index:
    """Return the steps in which `own` (by step) stands out of `others` (ranks, steps)."""
    if others.size < 3:
        return np.empty(0, dtype=np.int64)
    middle = np.median(others)
    scale = max(1.4826 * float(np.median(np.abs(others - middle))), 1.0)
    ratio = np.where(own > long_ns, LONG_OUT_RATIO, OUT_RATIO)
    is_out = ((own - middle) / scale > OUT_Z) & (own > ratio * max(float(others.max()), 0.0)) & (own > 0)
    return np.flatnonzero(is_out)


def outliers(excess: Excess) -> list[tuple[int, int]]:
    """Return the (rank, step) whose excess is far above that of all."""
    middle = np.median(excess)
    scale = max(1.4826 * float(np.median(np.abs(excess - middle))), 1.0)
    found: list[tuple[int, int]] = [(int(a), int(b)) for a, b in np.argwhere(excess - middle > OUT_Z * scale)]
    return found


def change_step(excess: NDArray[np.float64]) -> int:
    """Return the index of the first step in which a rank's excess (by step) is what it is from then on."""
    steps = len(excess)
    best, found = 0.0, 0
    for at in range(1, steps):
        before, after = float(excess[:at].mean()), float(excess[at:].mean())
        gain = (after - before) ** 2 * at * (steps - at)
        if before <= SINCE_RATIO_MAX * after and gain > best:
            best, found = gain, at
    return found
