"""Lists what each rank's work truly had to wait for, to compare with what an analysis infers from a trace.

Only the order in which the host said things decides that, not when they happened.  So the program is gone through once
more, by other code than the simulation's.  Work is named by its correlation, which traces have.

    streams      the work before it on its stream
    events       the work that recorded the event for which its stream was told to wait
    syncs        the work for which a call of the host waited
    meetings     the exchanges (rank, correlation) that belong to one collective or message
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .instructions import ALL, Code, Program
from .job import Job
from .run import Run
from .traces import CORRELATIONS

__all__ = ["Dependencies", "dependencies_of", "meetings_of"]

Pairs = NDArray[np.int64]


@dataclass(frozen=True)
class Dependencies:
    """Pairs of correlations, (n, 2): what was waited for, and what waited (of `syncs` the call)."""

    streams: Pairs
    events: Pairs
    syncs: Pairs


def dependencies_of(job: Job, program: Program) -> Dependencies:
    """Return the dependencies inside a rank with this program, from its first step on, recorded or not."""
    found: dict[str, list[tuple[int, int]]] = {"streams": [], "events": [], "syncs": []}
    tails: dict[int, int] = {}
    told: dict[int, list[int]] = {}
    for step in range(job.all_steps):
        events: dict[int, int] = {}
        for place, one in enumerate(program.instructions, start=step * len(program)):
            number = place * CORRELATIONS
            if one.code <= Code.RECV:
                if one.code != Code.LAUNCH and one.on_stream in tails:
                    told.setdefault(one.stream, []).append(tails[one.on_stream])
                if one.stream in tails:
                    found["streams"].append((tails[one.stream], number))
                found["events"] += [(awaited, number) for awaited in told.pop(one.stream, [])]
                tails[one.stream] = number
                if one.code != Code.LAUNCH:
                    events[one.event] = number
                if one.is_blocking:
                    found["syncs"].append((number, number))
            elif one.code == Code.RECORD and one.stream in tails:
                events[one.event] = tails[one.stream]
            elif one.code == Code.WAIT and one.event in events:
                told.setdefault(one.stream, []).append(events[one.event])
            elif one.code == Code.SYNC:
                streams = tails if one.stream == ALL else [one.stream]
                awaited = [tails[s] for s in streams if s in tails] if one.event < 0 else [events[one.event]]
                found["syncs"] += [(work, number) for work in awaited]
    return Dependencies(**{kind: np.array(pairs, dtype=np.int64).reshape(-1, 2) for kind, pairs in found.items()})


def meetings_of(run: Run) -> list[list[tuple[int, int]]]:
    """Return each collective and message of the job as its (rank, correlation)s, in the order of ranks."""
    layout = run.job.layout
    met: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for rank in range(layout.ranks):
        program, counts = run.program(rank), dict[tuple[object, ...], int]()
        exchanges = [(place, one) for place, one in enumerate(program.instructions) if one.role]
        for step in range(run.job.all_steps):
            for place, one in exchanges:
                group = layout.group(rank, one.role).name
                key: tuple[object, ...] = (group, "all")
                if one.code != Code.COLLECTIVE:
                    other = layout.neighbour(rank, one.peer)
                    key = (group, rank, other) if one.code == Code.SEND else (group, other, rank)
                counted = (*key, one.code == Code.RECV)
                number = counts[counted] = counts.get(counted, 0) + 1
                met.setdefault((*key, number), []).append((rank, (step * len(program) + place) * CORRELATIONS))
    return list(met.values())
