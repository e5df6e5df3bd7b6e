"""Places the ranks of a simulated job: hosts, tensor, data and pipeline groups.

Ranks are numbered as Megatron does: tensor parallel ranks are neighbours, pipeline stages are far apart.  So the group
that talks most is inside a host where it fits.

    rank = (stage * data + replica) * tensor + shard

Left out: what the groups say to each other (`programs`) and how fast (`links`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

__all__ = ["Group", "Layout"]


class Group(NamedTuple):
    """A process group: `name` as torch names it (a number), `role` what it is for, global `ranks` in their order."""

    name: str
    role: str
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How many ranks share a layer (`tensor`), a batch (`data`) and the model's depth (`pipeline`), on which hosts.

    With `is_sharded` the data parallel ranks hold shards of the parameters (FSDP), else copies (DDP).
    """

    tensor: int = 1
    data: int = 1
    pipeline: int = 1
    is_sharded: bool = False
    ranks_per_host: int = 8

    @property
    def ranks(self) -> int:
        return self.tensor * self.data * self.pipeline

    @property
    def hosts(self) -> int:
        return -(-self.ranks // self.ranks_per_host)

    def host(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def stage(self, rank: int) -> int:
        return rank // (self.tensor * self.data)

    def replica(self, rank: int) -> int:
        """Return the data parallel index: ranks of one replica compute the same samples."""
        return rank // self.tensor % self.data

    def rank_at(self, stage: int, replica: int, shard: int) -> int:
        return (stage * self.data + replica) * self.tensor + shard

    def neighbour(self, rank: int, stages: int) -> int:
        """Return the rank of the same replica and shard that many stages later, round the ring."""
        block = self.tensor * self.data
        return (rank + stages * block) % (block * self.pipeline)

    def ranks_of_stage(self, stage: int) -> tuple[int, ...]:
        block = self.tensor * self.data
        return tuple(range(stage * block, (stage + 1) * block))

    def ranks_of_host(self, host: int) -> tuple[int, ...]:
        first = host * self.ranks_per_host
        return tuple(range(first, min(first + self.ranks_per_host, self.ranks)))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups by role.  What includes all ranks is torch's default group, whose name is "0".

        Messages up and down a pipeline have groups of their own, so that neither waits for the other.
        """
        t, d, p = range(self.tensor), range(self.data), range(self.pipeline)
        found: list[tuple[str, tuple[int, ...]]] = []
        if self.tensor > 1:
            found += [("tensor", tuple(self.rank_at(s, r, k) for k in t)) for s in p for r in d]
        if self.data > 1:
            found += [("data", tuple(self.rank_at(s, r, k) for r in d)) for s in p for k in t]
        if self.pipeline > 1:
            lines = [tuple(self.rank_at(s, r, k) for s in p) for r in d for k in t]
            found += [(role, line) for line in lines for role in ("forward", "backward")]
        everybody = tuple(range(self.ranks))
        groups = [Group("0", "world", everybody)]
        for number, (role, ranks) in enumerate(found, start=1):
            is_default = ranks == everybody and role in ("tensor", "data")
            groups.append(Group("0" if is_default else str(number), role, ranks))
        return tuple(groups)

    @cached_property
    def _group_of(self) -> dict[tuple[int, str], Group]:
        return {(rank, group.role): group for group in self.groups for rank in group.ranks}

    def group(self, rank: int, role: str) -> Group:
        """Return the group of this role that `rank` is in; KeyError where the layout has none."""
        return self._group_of[rank, role]
