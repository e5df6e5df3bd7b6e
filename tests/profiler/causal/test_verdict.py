"""Planted faults are named with rank, cause and what their removal saves; healthy jobs name nobody."""

from __future__ import annotations

import pytest

from tests.kit.simulated_jobs import LOUD, Fault, FaultKind, Job, Layout, Model, simulate, truth_of
from tests.profiler.causal.models import analyzed
from tests.profiler.causal.toy_jobs import Fault as ToyFault
from tests.profiler.causal.toy_jobs import simulate as simulate_toy

LAYOUTS = {
    "ddp": {"layout": Layout(data=8)},
    "fsdp": {"layout": Layout(data=8, is_sharded=True)},
    "tensor": {"layout": Layout(tensor=4, data=2)},
    "pipeline": {"layout": Layout(pipeline=4, data=2), "model": Model(microbatches=8)},
    "gloo": {"layout": Layout(data=4), "is_cpu": True},
}

TOY_FAULTS = {
    "compute": (3, ToyFault(compute=1.1), "compute"),
    "data": (2, ToyFault(data_ns=6_000_000), "data_wait"),
    "data once": (2, ToyFault(data_ns=9_000_000, only=3), "data_wait"),
    "checkpoint": (5, ToyFault(checkpoint_ns=20_000_000, only=2), "checkpoint"),
    "host": (1, ToyFault(host=40), "host_bound"),
}


@pytest.mark.parametrize("name", TOY_FAULTS)
def test_a_fault_is_named_and_its_saving_is_that_of_the_job_without_it(name: str) -> None:
    rank, fault, cause = TOY_FAULTS[name]
    traces, slow = simulate_toy(faults={rank: fault}, seed=3)
    _, healthy = simulate_toy(seed=3)
    [straggler] = analyzed(traces).stragglers
    assert (straggler.rank, straggler.cause) == (rank, cause)
    assert straggler.saved_ns == pytest.approx((slow - healthy) / 6, rel=0.02)
    assert straggler.saved_ns - straggler.error_ns <= (slow - healthy) / 6
    assert straggler.since_step == (0 if fault.only is None else fault.only)


def test_the_step_from_which_on_it_is_so_is_found() -> None:
    traces, _ = simulate_toy(faults={3: ToyFault(compute=1.15, since=2)}, seed=4)
    assert [one.since_step for one in analyzed(traces).stragglers] == [2]


def test_two_faults_are_both_named_the_worse_first() -> None:
    traces, _ = simulate_toy(faults={2: ToyFault(data_ns=6_000_000), 5: ToyFault(compute=1.1)}, seed=5)
    found = analyzed(traces).stragglers
    assert [(one.rank, one.cause) for one in found] == [(2, "data_wait"), (5, "compute")]
    assert found[0].saved_ns > found[1].saved_ns


def test_hosts_whose_clocks_are_80_us_apart_accuse_nobody() -> None:
    clocks = {rank: 80_000 * (rank // 4) for rank in range(8)}
    job = analyzed(simulate_toy(clock_ns=clocks, hosts={rank: f"host{rank // 4}" for rank in range(8)})[0])
    assert job.stragglers == []
    assert job.clocks[5].offset_ns == pytest.approx(-80_000, abs=300)


def test_hiccups_of_single_steps_name_nobody() -> None:
    for seed in range(8):
        assert analyzed(simulate_toy(noise=0.03, hiccup=0.03, seed=seed)[0]).stragglers == []


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_slow_rank_of_any_layout_is_named(name: str) -> None:
    job = Job(**LAYOUTS[name], faults=(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.15),), seed=11)
    truth = truth_of(job)
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.rank, straggler.cause, straggler.kind) == (3, "compute", "rank")
    assert abs(straggler.saved_ns - culprit.saved_step_ns) <= 0.01 * truth.run.step_ns
    assert "same work slower" in straggler.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (FaultKind.DATA_WAIT, 2e6), (FaultKind.OPTIMIZER_HOST, 16e6), (FaultKind.CHECKPOINT, 2e6),
        (FaultKind.COPY, 2e6), (FaultKind.SLOW_HOST, 4.0), (FaultKind.SLOW_BACKWARD, 0.15), (FaultKind.STALL, 3e6),
    ],
)  # fmt: skip
def test_every_kind_of_fault_has_its_cause(kind: FaultKind, size: float) -> None:
    truth = truth_of(Job(Layout(data=8), faults=(Fault(kind, (6,), size, steps=tuple(range(1, 7))),), seed=12))
    [culprit] = truth.culprits
    assert culprit.saved_ratio > 0.03
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert straggler.rank == 6
    assert straggler.cause in culprit.causes
    assert abs(straggler.saved_ns - culprit.saved_step_ns) <= 0.02 * truth.run.step_ns
    assert straggler.saved_ns - straggler.error_ns <= culprit.saved_step_ns


@pytest.mark.slow
def test_a_stage_with_more_layers_is_named_as_a_stage() -> None:
    job = Job(
        Layout(pipeline=4, data=2), model=Model(microbatches=8),
        faults=(Fault(FaultKind.EXTRA_LAYERS, (6, 7), 2),), seed=13,
    )  # fmt: skip
    [straggler, *_] = analyzed(simulate(job).traces()).stragglers
    assert (straggler.kind, straggler.ranks, straggler.cause) == ("stage", [6, 7], "compute")
    assert "it ran more" in straggler.evidence


@pytest.mark.slow
def test_a_slow_link_is_named_where_others_carry_the_same() -> None:
    job = Job(
        Layout(tensor=2, data=4, pipeline=2), model=Model(microbatches=4),
        faults=(Fault(FaultKind.SLOW_DEVICE_LINK, (5,), 3.0),), seed=14,
    )  # fmt: skip
    truth = truth_of(job)
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.kind, straggler.cause) == ("link", "link")
    assert 5 in straggler.ranks
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.01 * truth.run.step_ns)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_healthy_jobs_name_nobody(name: str) -> None:
    for seed in range(3):
        for noise in ({}, {"noise": LOUD}):
            job = analyzed(simulate(Job(**LAYOUTS[name], **noise, seed=100 + seed)).traces())
            assert job.stragglers == []
            assert sum(part.duration_ns for part in job.critical_path) == job.wall_ns


@pytest.mark.slow
def test_sequences_of_different_lengths_are_uneven_work_and_nobodys_fault() -> None:
    job = Job(Layout(data=8, is_sharded=True), faults=(Fault(FaultKind.IMBALANCE, (), 0.15),), seed=15)
    truth = truth_of(job)
    [culprit] = truth.culprits
    [found] = analyzed(truth.run.traces()).stragglers
    assert (found.kind, found.cause) == ("imbalance", "imbalance")
    assert found.saved_ns == pytest.approx(culprit.saved_step_ns, rel=0.1)
    assert "no rank is slow throughout" in found.evidence
