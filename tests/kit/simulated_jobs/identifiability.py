"""Says which ranks the traces can show to have a slow link: what no trace can tell, no analysis can be asked for.

A collective is as slow as its slowest link, and all of its ranks see the same.  So a slow link shows only where other
groups that do the same are fast, and as far as the slow ones have something in common:

    one group of all ranks      everything is slow, nobody knows why
    PP x DP                     rank 5's group and its messages are slow: it is what they share
    two hosts                   the slow end of the only link between them cannot be told

Faults of other kinds show on the rank that has them.
"""

from __future__ import annotations

from typing import NamedTuple

from .job import Fault, FaultKind, Job

__all__ = ["ranks_told"]


class _Exchange(NamedTuple):
    """Ranks that communicate with each other: as what, and whether between hosts."""

    role: str
    spans: bool
    ranks: frozenset[int]


def ranks_told(job: Job, fault: Fault) -> tuple[int, ...] | None:
    """Return the ranks that a true answer may name for the fault; None where the traces cannot tell."""
    if fault.kind not in (FaultKind.SLOW_LINK, FaultKind.SLOW_DEVICE_LINK):
        return fault.ranks
    layout, faulty = job.layout, set(fault.ranks)
    is_nic = fault.kind is FaultKind.SLOW_LINK
    exchanges = [one for one in _exchanges(job) if one.spans or not is_nic]
    slow = [one for one in exchanges if one.ranks & faulty]
    fast = [one for one in exchanges if not one.ranks & faulty]
    compared = {(one.role, one.spans) for one in slow} & {(one.role, one.spans) for one in fast}
    slow = [one for one in slow if (one.role, one.spans) in compared]
    fast = [one for one in fast if (one.role, one.spans) in compared]
    units = [{rank} for rank in range(layout.ranks)]
    if is_nic:
        units = [set(layout.ranks_of_host(host)) for host in range(layout.hosts)]
    suspects = [
        unit for unit in units if all(unit & one.ranks for one in slow) and not any(unit & one.ranks for one in fast)
    ]
    return tuple(sorted(set().union(*suspects))) if compared and suspects else None


def _exchanges(job: Job) -> list[_Exchange]:
    layout = job.layout
    found = [(group.role, group.ranks) for group in layout.groups if group.role in ("tensor", "data")]
    for rank in range(layout.ranks):
        is_last = layout.stage(rank) == layout.pipeline - 1
        if layout.pipeline > 1 and (not is_last or job.model.chunks > 1):
            found.append(("pipeline", (rank, layout.neighbour(rank, 1))))
    hosts = [len({layout.host(rank) for rank in ranks}) for _, ranks in found]
    return [_Exchange(role, count > 1, frozenset(ranks)) for (role, ranks), count in zip(found, hosts, strict=True)]
