"""Says how long a collective, a send or a receive takes on the wire, once all of its ranks are there.

    latency * rounds + bytes * factor / bandwidth        (ring algorithms; factors as in nccl-tests)

A ring is as fast as its slowest link: the bandwidth is that of the slowest rank in the group, between hosts where the
group spans several.  Left out: two collectives that share a link at the same time (`engine`).
"""

from __future__ import annotations

import numpy as np

from pacecar.ledger.bus_bandwidth import bus_bandwidth_factor

from .durations import generator
from .instructions import Program
from .job import FaultKind, Job
from .layout import Group

__all__ = ["peer_wires", "wire_ns", "wires"]

_COLLECTIVE, _PEER = 20, 21


def wires(job: Job, program: Program, group: Group, step: int) -> list[int]:
    """Return the time of each of the group's collectives of one step, in their order."""
    places = program.exchanges[group.role]
    drawn = generator(job, _COLLECTIVE, int(group.name), step)
    noise = np.empty(len(places))
    extra = program.is_extra[places]
    for which in (~extra, extra):  # those of extra layers come last and shift no other
        noise[which] = drawn.standard_normal(int(which.sum()))
    found = []
    for place, normal in zip(places, noise.tolist(), strict=True):
        one = program.instructions[place]
        ns = wire_ns(job, group.ranks, one.operation, one.bytes, step)
        found.append(round(ns * max(1 + job.noise.wire_ratio * normal, 0.5)))
    return found


def peer_wires(job: Job, source: int, destination: int, role: str, sizes: list[int], step: int) -> list[int]:
    """Return the time of each message of one step from one rank to another."""
    purpose = (source, destination, step, len(role))
    noise = generator(job, _PEER, *purpose).standard_normal(len(sizes))
    return [
        round(wire_ns(job, (source, destination), "send", size, step) * max(1 + job.noise.wire_ratio * normal, 0.5))
        for size, normal in zip(sizes, noise.tolist(), strict=True)
    ]


def wire_ns(job: Job, ranks: tuple[int, ...], operation: str, size: int, step: int) -> float:
    """Return the time without noise for `size` bytes (as nccl-tests counts them) among `ranks`."""
    if len(ranks) < 2:
        return float(job.links.within_latency_ns)
    spans = len({job.layout.host(rank) for rank in ranks}) > 1
    speed = job.links.between if spans else job.links.within
    latency = job.links.between_latency_ns if spans else job.links.within_latency_ns
    slowest = 1.0
    for fault in job.faults:
        is_link = fault.kind is FaultKind.SLOW_DEVICE_LINK or (fault.kind is FaultKind.SLOW_LINK and spans)
        if is_link and any(fault.hits(rank, step) for rank in ranks):
            slowest = max(slowest, 1 + fault.size)
    factor = bus_bandwidth_factor(operation, len(ranks))
    assert factor is not None, operation
    rounds = 1 if operation in ("send", "recv") else max(len(ranks) - 1, 1).bit_length()
    return latency * rounds + size * factor / speed * slowest * 1e9
