"""Computes how many samples of a step each rank gets, so that the slowest rank is as fast as possible.

A rank takes `fixed_ns + sample_ns * samples`, without its waits for others.  Samples go one by one to the rank that
would then take least; for costs that only grow with the samples this greedy rule minimizes the longest time (Federgruen
and Groenevelt 1986).  All that fit under one time are given at once, so that a large batch takes no longer than a small
one.  Pure: values in, values out.
"""

from __future__ import annotations

from bisect import bisect_right
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
    total = sum(work.samples for work in works)

    def within(limit_ns: int) -> list[int]:
        return [max(0, (limit_ns - work.fixed_ns) // work.sample_ns) for work in works]

    longest = max(work.own_ns(total) for work in works)
    limit_ns = bisect_right(range(longest), total, key=lambda ns: sum(within(ns))) - 1
    shares = within(limit_ns)
    ties = [rank for rank, work in enumerate(works) if work.own_ns(shares[rank] + 1) == limit_ns + 1]
    for rank in ties[: total - sum(shares)]:
        shares[rank] += 1
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
