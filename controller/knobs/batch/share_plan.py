"""Computes how many samples of a step each rank gets, so that the slowest rank is as fast as possible.

A rank takes `fixed_ns + sample_ns * samples`, without its waits for others.  Samples go one by one to the rank that
would then take least; for costs that only grow with the samples this greedy rule minimizes the longest time (Federgruen
and Groenevelt 1986).  Pure: values in, values out.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["RankWork", "longest_ns", "plan_shares", "shares_text"]


@dataclass(frozen=True, slots=True)
class RankWork:
    """What a batch costs one rank: a fixed time, a time for each sample, and how many samples it has at present."""

    fixed_ns: int
    sample_ns: int
    samples: int

    def own_ns(self, samples: int) -> int:
        """Return what `samples` would take."""
        return self.fixed_ns + self.sample_ns * samples


def plan_shares(works: Sequence[RankWork]) -> tuple[int, ...]:
    """Return each rank's samples; their sum is that of the present ones.

    Raises:
        ValueError: a rank would get none; names it.
    """
    shares = [0] * len(works)
    queue = [(work.own_ns(1), rank) for rank, work in enumerate(works)]
    heapq.heapify(queue)
    for _ in range(sum(work.samples for work in works)):
        _, rank = queue[0]
        shares[rank] += 1
        heapq.heapreplace(queue, (works[rank].own_ns(shares[rank] + 1), rank))
    if 0 in shares:
        rank = shares.index(0)
        raise ValueError(f"rank {rank}'s share would be zero: one sample takes it longer than the others take for all")
    return tuple(shares)


def longest_ns(works: Sequence[RankWork], shares: Sequence[int]) -> int:
    """Return what the slowest rank takes with these shares."""
    return max(work.own_ns(share) for work, share in zip(works, shares, strict=True))


def shares_text(shares: Sequence[int]) -> str:
    """Return who does least and most, such as "rank 1 does 6 of 16 samples, rank 0 does 10"."""
    if min(shares) == max(shares):
        return f"each of {len(shares)} ranks does {shares[0]} of {sum(shares)} samples"
    least, most = shares.index(min(shares)), shares.index(max(shares))
    return f"rank {least} does {shares[least]} of {sum(shares)} samples, rank {most} does {shares[most]}"
