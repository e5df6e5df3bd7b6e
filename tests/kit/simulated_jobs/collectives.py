"""Says which collective, send or receive each exchange of a rank is, as torch's metadata has it.

torch numbers the collectives of a group from 1 ("Seq"), and a rank's sends and receives in a group by a counter of
their own, whatever the peer: so two ranks have different numbers for the same message.  A batch counts once.  Gloo's
rows have none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pacecar.analysis.trace.columns import NONE, CollectiveColumns

from .instructions import Code, Program
from .job import Job

__all__ = ["BATCH", "CPU_DTYPE", "DTYPE", "ELEMENT_BYTES", "call_annotations", "collectives_of"]

DTYPE, ELEMENT_BYTES = "BFloat16", 2
CPU_DTYPE = "Float"
"""Gloo's rows have no group, no ranks and no sequence; the reader takes group and ranks from the header."""


def collectives_of(job: Job, program: Program, rank: int) -> tuple[tuple[CollectiveColumns, ...], NDArray[np.int64]]:
    """Return the collectives of a rank's recorded steps and, by step and place, the number of each exchange's own."""
    found: dict[CollectiveColumns, int] = {}
    number = np.full(job.all_steps * len(program), NONE, dtype=np.int64)
    counts: dict[str, int] = {}
    in_batch: set[str] = set()
    layout = job.layout
    exchanges = [(place, one) for place, one in enumerate(program.instructions) if one.role or one.code == Code.BATCH]
    for step in range(job.all_steps):
        for place, one in exchanges:
            if one.code == Code.BATCH:
                number[step * len(program) + place] = found.setdefault(BATCH, len(found))
                in_batch.clear()
                continue
            group = layout.group(rank, one.role)
            if group.name not in in_batch:
                counts[group.name] = counts.get(group.name, 0) + 1
            if one.is_batched:
                in_batch.add(group.name)
            sequence = counts[group.name]
            peer = None if one.code == Code.COLLECTIVE else layout.neighbour(rank, one.peer)
            meta = CollectiveColumns(
                operation=one.operation,
                bytes=one.bytes,
                dtype=CPU_DTYPE if job.is_cpu else DTYPE,
                group=group.name,
                group_size=len(group.ranks),
                ranks=group.ranks,
                sequence=None if job.is_cpu else sequence,
                source_rank=peer if one.code == Code.RECV else None,
                destination_rank=peer if one.code == Code.SEND else None,
            )
            number[step * len(program) + place] = found.setdefault(meta, len(found))
    return tuple(found), number


def call_annotations(job: Job, program: Program, rank: int) -> list[str]:
    """Return the annotation of each exchange of a step: `nccl:all_reduce`, `nccl:send 0->1` (ranks of the group).

    It is "" for what is batched, as the batch has one.
    """
    names = []
    backend = "gloo" if job.is_cpu else "nccl"
    for one in program.instructions:
        if one.code == Code.BATCH or one.is_batched:
            names.append("" if one.is_batched else "nccl:coalesced")
        if not one.role or one.is_batched:
            continue
        word = f"{backend}:{_WORDS.get(one.operation, one.operation)}"
        if one.code != Code.COLLECTIVE and not job.is_cpu:
            ranks = job.layout.group(rank, one.role).ranks
            mine, other = ranks.index(rank), ranks.index(job.layout.neighbour(rank, one.peer))
            word += f" {mine}->{other}" if one.code == Code.SEND else f" {mine}<-{other}"
        names.append(word)
    return names


BATCH = CollectiveColumns(operation="coalesced")
"""All that a trace says of the kernel of a batch; whom it meets is said by the calls before it (pytorch#194693)."""

_WORDS = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
