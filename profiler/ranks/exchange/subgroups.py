"""Divides the ranks of a large job into subgroups, each of which compares its ranks among themselves.

A rank that gathers the rows of N ranks must decode N messages.  At 1024 ranks that takes more than half a second of
processor time (`bench.bench_gathers`), which an overhead budget of 1 % allows every few minutes.  So more than
WHOLE_MAX ranks are divided into subgroups of neighbours, SUBGROUP_RANKS at most.  The first rank of a subgroup is its
*leader*: it judges the subgroup's rows, and the leaders send what they found to rank 0 (`leader_reports`), which is one
of them.  A subgroup whose ranks are all equally slow is not seen.

Neighbours make good peers: in torch and Megatron the stages of a pipeline are far apart.

    ranks      0 1 2 3 | 4 5 6 7 | 8 9 10
    leaders    0         4         8

Pure.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["SUBGROUP_RANKS", "WHOLE_MAX", "Subgroup", "subgroup_of"]

WHOLE_MAX = 64
"""Up to so many ranks are compared with each other directly."""

SUBGROUP_RANKS = 16
"""The largest subgroup: enough peers for a median, and at 1024 ranks 64 leaders."""


class Subgroup(NamedTuple):
    """Ranks `first` to `first + ranks - 1`; the `number`-th of the job's subgroups, whose leaders are `leaders`."""

    number: int
    first: int
    ranks: int
    leaders: tuple[int, ...]

    @property
    def is_whole(self) -> bool:
        """Whether it has all ranks of the job."""
        return len(self.leaders) == 1

    @property
    def members(self) -> range:
        """Its ranks."""
        return range(self.first, self.first + self.ranks)


def subgroup_of(
    rank: int, world_size: int, *, whole_max: int = WHOLE_MAX, subgroup_ranks: int = SUBGROUP_RANKS
) -> Subgroup:
    """Return the subgroup of `rank`; sizes differ by one at most."""
    count = 1 if world_size <= whole_max else -(-world_size // subgroup_ranks)
    firsts = tuple(-(-number * world_size // count) for number in range(count))
    number = rank * count // world_size
    end = firsts[number + 1] if number + 1 < count else world_size
    return Subgroup(number, firsts[number], end - firsts[number], firsts)
