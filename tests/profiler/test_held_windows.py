"""A window of a gloo job is read a step late, and the tuner waits for it instead of seeing an estimate."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from pacecar.config import HookConfig
from pacecar.controller.consensus.protocol import JobPace
from pacecar.controller.consensus.step_observations import ObservationBacklog


@pytest.fixture
def lone_rank(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_lone_rank_that_hears_its_own_pace_at_once_sees_its_windows_as_exact_steps(lone_rank, job, attach, sink):
    backlog, held, observed = ObservationBacklog(), [], []
    backlog.begin(())

    def boundary(step):
        held.append(step.is_held)
        backlog.remember(step)
        backlog.pair([JobPace(step.step, step.pace_ns, profiled=step.disturbed)], (), is_calm=False)
        observed.extend(backlog.drain())

    attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=5), on_boundary=boundary)
    job.run(20)
    exact = [record.step for record in sink.steps if record.source == "exact"]
    assert len(exact) >= 3
    assert [step for step, is_held in enumerate(held) if is_held][: len(exact)] == exact
    assert [seen.step for seen in observed] == list(range(len(observed))), "each once and in order"
    assert len(observed) >= 19, "none waits for longer than a step"
    assert [seen.step for seen in observed if seen.exact] == exact
