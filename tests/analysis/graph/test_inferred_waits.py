"""What rows waited for is inferred as it was, and sends, receives and batches meet whom they met."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.graph.device_waits import device_waits
from tests.analysis.models import modelled
from tests.kit.simulated_jobs import Job, Layout, Model, Run, simulate
from tests.kit.simulated_jobs.dependencies import dependencies_of, meetings_of

JOBS = {
    "interleaved": Job(Layout(pipeline=2, data=2), Model(layers=2, microbatches=2, schedule="interleaved", chunks=2)),
    "batches": Job(Layout(pipeline=3), Model(layers=1, microbatches=3, is_batched=True)),
    "tensor sums on the current stream": Job(Layout(tensor=2, data=2), Model(layers=2, is_tensor_sync=True)),
    "a host that runs ahead": Job(Layout(pipeline=2, data=2), Model(layers=1, microbatches=2, ends_with_sync=False)),
    "without NCCL's events": Job(Layout(pipeline=2), Model(layers=1, microbatches=2), has_nccl_events=False),
}


def short(name: str) -> Run:
    """Return the run of that job, of few steps."""
    return simulate(replace(JOBS[name], steps=2, seed=31))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_rows_wait_for_what_they_waited_for(name: str) -> None:
    run = short(name)
    for place, rank in enumerate(modelled(run.traces()).graph.ranks):
        device = rank.events.trace.device
        streams = dict(zip(device.correlation.tolist(), device.stream.tolist(), strict=True))
        launched = set(device.correlation[device.launch_ns >= 0].tolist())
        true = {
            (awaited, row)
            for awaited, row in dependencies_of(run.job, run.program(place)).events.tolist()
            if awaited in streams and row in launched and streams[awaited] != streams[row]
        }
        rows, awaited = device_waits(rank.events)
        pairs = zip(device.correlation[awaited].tolist(), device.correlation[rows].tolist(), strict=True)
        found = {(a, row) for a, row in pairs if row in launched}
        assert len(true & found) >= 0.97 * len(true)
        assert len(found - true) <= 0.03 * len(true)


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_all_meet_whom_they_met(name: str) -> None:
    run = short(name)
    graph = modelled(run.traces()).graph
    of_rank = [rank.events.trace.device.correlation for rank in graph.ranks]
    seen = [set(column.tolist()) for column in of_rank]
    true = {tuple(sorted((r, c) for r, c in one if c in seen[r])) for one in meetings_of(run)}
    joins = graph.joins
    found = {
        tuple(sorted((int(r), int(of_rank[r][row])) for r, row in zip(joins.rank[at], joins.row[at], strict=True)))
        for at in (np.flatnonzero(joins.join == number) for number in range(joins.count))
    }
    assert found == {one for one in true if len(one) > 1}
