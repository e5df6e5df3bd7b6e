"""Of traces that show the device alone (`activities=[CUDA]`) what rows waited for is inferred from the program."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.graph.device_waits import device_waits
from pacecar.analysis.graph.launchless_waits import repeated_program
from pacecar.analysis.output.words import no_late_rank_words, untold_words
from pacecar.analysis.trace.columns import Trace
from tests.analysis.models import analyzed, modelled
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, simulate, truth_of
from tests.kit.simulated_jobs.dependencies import dependencies_of

pytestmark = pytest.mark.slow

PIPELINE = Job(Layout(pipeline=4, ranks_per_host=2), Model(layers=1, microbatches=4), seed=61, has_host_rows=False)
SHARDED = Job(Layout(data=4, is_sharded=True), Model(layers=3), seed=62, has_host_rows=False)
JOBS = {"pipeline": PIPELINE, "sharded": SHARDED}


@pytest.mark.parametrize("name", JOBS)
def test_what_a_step_repeats_is_found(name: str) -> None:
    run = simulate(JOBS[name])
    for place, rank in enumerate(modelled(run.traces()).graph.ranks):
        program = repeated_program(rank.events)
        assert program is not None
        mine = [one for one in run.program(place).instructions if one.stream == 7 and one.kernel and not one.role]
        assert program.length == len(mine)


@pytest.mark.parametrize("name", JOBS)
def test_rows_wait_for_what_they_waited_for(name: str) -> None:
    """What held up the stream of compute, or waited for it, is known in every step."""
    run = simulate(JOBS[name])
    for place, rank in enumerate(modelled(run.traces()).graph.ranks):
        device = rank.events.trace.device
        row_of = {number: row for row, number in enumerate(device.correlation.tolist())}
        rows, awaited = device_waits(rank.events)
        found: dict[int, set[int]] = {}
        for row, one in zip(rows.tolist(), awaited.tolist(), strict=True):
            found.setdefault(row, set()).add(one)
        pairs = dependencies_of(run.job, run.program(place)).events.tolist()
        true = [(row_of[a], row_of[b]) for a, b in pairs if a in row_of and b in row_of]
        binding = [
            (a, b) for a, b in true
            if (device.stream[a] == 7) != (device.stream[b] == 7) and 0 < device.start_ns[b] - device.end_ns[a] < 2_500
        ]  # fmt: skip
        known = sum(a in found.get(b, ()) for a, b in binding)
        assert len(binding) > 20
        assert known >= 0.95 * len(binding)


@pytest.mark.parametrize(
    ("job", "fault", "apart_ratio"),
    [
        (PIPELINE, Fault(FaultKind.SLOW_COMPUTE, (3,), 0.3), 0.02),
        (PIPELINE, Fault(FaultKind.EXTRA_KERNEL, (1,), 2e6), 0.02),
        (SHARDED, Fault(FaultKind.SLOW_COMPUTE, (2,), 0.2), 0.04),  # whatever its host did is not known
    ],
    ids=["slow stage", "stage with more", "slow shard"],
)
def test_a_slow_rank_is_named_with_what_it_costs(job: Job, fault: Fault, apart_ratio: float) -> None:
    truth = truth_of(replace(job, faults=(fault,)))
    [culprit] = truth.culprits
    found = analyzed(truth.run.traces())
    [straggler] = found.stragglers
    assert (tuple(straggler.ranks), straggler.cause) == (fault.ranks, "compute")
    assert straggler.saved_ns == pytest.approx(culprit.saved_ns, abs=apart_ratio * truth.wall_ns)
    assert straggler.saved_ns - straggler.error_ns <= culprit.saved_ns


@pytest.mark.parametrize("name", JOBS)
def test_nobody_is_named_in_a_healthy_job(name: str) -> None:
    found = analyzed(simulate(JOBS[name]).traces())
    assert found.stragglers == []
    assert untold_words(found) is None


def test_that_nobody_holds_the_job_up_is_not_claimed_of_messages_without_peers() -> None:
    """A batch's kernel names no peer, and the calls that do are not recorded."""
    job = replace(PIPELINE, model=replace(PIPELINE.model, is_batched=True))
    found = analyzed(simulate(replace(job, faults=(Fault(FaultKind.SLOW_COMPUTE, (2,), 0.3),))).traces())
    assert found.stragglers == []
    assert no_late_rank_words(found) == "Who holds the job up cannot be told"
    assert "rows on other ranks are unknown" in (untold_words(found) or "")


def test_a_program_that_never_repeats_is_none() -> None:
    trace: Trace = simulate(replace(SHARDED, steps=1)).traces()[0]
    assert repeated_program(modelled([trace, replace(trace, rank=1)]).graph.ranks[0].events) is None


def test_steps_are_the_same_on_all_ranks() -> None:
    run = simulate(PIPELINE)
    model = modelled(run.traces())
    assert model.units >= PIPELINE.steps - 1
    assert len({int(np.unique(atoms.step).max()) for atoms in model.atoms}) == 1
