"""Planted faults are named with rank, cause and what their removal saves; healthy jobs name nobody."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.trace.columns import HostKind
from pacecar.analysis.verdict.peers import excess_by_name
from tests.analysis.models import analyzed, modelled
from tests.kit.selection import decisive
from tests.kit.simulated_jobs import (
    LOUD,
    QUIET,
    Clocks,
    Fault,
    FaultKind,
    Job,
    Layout,
    Model,
    Noise,
    simulate,
    truth_of,
)

pytestmark = pytest.mark.slow

LAYOUTS = {
    "ddp": {"layout": Layout(data=8)},
    "fsdp": {"layout": Layout(data=8, is_sharded=True)},
    "tensor": {"layout": Layout(tensor=4, data=2)},
    "pipeline": {"layout": Layout(pipeline=4, data=2), "model": Model(microbatches=8)},
    "gloo": {"layout": Layout(data=4), "is_cpu": True},
}


def ddp(*faults: Fault, seed: int) -> Job:
    return Job(Layout(data=8), faults=faults, seed=seed)


@pytest.mark.parametrize(("kind", "cause"), [(FaultKind.DATA_WAIT, "data_wait"), (FaultKind.CHECKPOINT, "checkpoint")])
def test_what_the_trace_itself_names_is_named_where_it_happens_once(kind: FaultKind, cause: str) -> None:
    truth = truth_of(ddp(Fault(kind, (5,), 20e6, steps=(3,)), seed=3))
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.rank, straggler.cause, straggler.since_step) == (5, cause, 3)
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, rel=0.03)


def test_the_step_from_which_on_it_is_so_is_found() -> None:
    job = ddp(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.15, steps=(3, 4, 5, 6)), seed=4)
    assert [one.since_step for one in analyzed(simulate(job).traces()).stragglers] == [3]


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("ddp", r"is in gemm \([\d.]+ (us|ms)\), attention \([\d.]+ us\);"),
        ("gloo", r"is in \S+: AddmmBackward0 \("),
        ("pipeline", r"is in gemm \("),
    ],
)
def test_the_evidence_has_the_kernels_in_which_a_slow_rank_differs_from_its_peers(layout: str, words: str) -> None:
    job = Job(**LAYOUTS[layout], faults=(Fault(FaultKind.SLOW_COMPUTE, (3,), 0.3),), seed=4)
    traces = simulate(job).traces()
    [straggler] = analyzed(traces).stragglers
    assert re.search(words, straggler.evidence), straggler.evidence
    model = modelled(traces)
    [finding] = model.judgement.findings
    found = excess_by_name(model.graph.ranks[3], model.judgement.compared[3], finding.cause)
    assert sum(found.values()) == finding.excess_ns


def test_a_row_that_runs_past_the_last_step_counts_up_to_its_end() -> None:
    """The rows that are open when a recording ends, such as the optimizer's, last until it has ended."""
    traces = simulate(Job(**LAYOUTS["gloo"], seed=4)).traces()
    host = traces[3].host_rows
    end_ns = host.end_ns.copy()
    end_ns[np.flatnonzero(host.kind == HostKind.OPTIMIZER)[-1]] += 500_000_000
    traces[3] = replace(traces[3], host_rows=replace(host, end_ns=end_ns))
    assert analyzed(traces).stragglers == []


@pytest.mark.full
def test_two_faults_are_both_named_the_worse_first() -> None:
    job = ddp(Fault(FaultKind.DATA_WAIT, (2,), 6e6), Fault(FaultKind.SLOW_COMPUTE, (5,), 0.1), seed=5)
    found = analyzed(simulate(job).traces()).stragglers
    assert [(one.rank, one.cause) for one in found] == [(2, "data_wait"), (5, "compute")]
    assert found[0].saved_ns > found[1].saved_ns


@pytest.mark.parametrize(
    ("causes", "sizes"),
    [
        ((FaultKind.DATA_WAIT, FaultKind.SLOW_COMPUTE), (3e6, 0.1)),
        pytest.param((FaultKind.COPY, FaultKind.DATA_WAIT), (3e6, 2e6), marks=pytest.mark.full),
    ],
)
def test_two_faults_of_one_rank_are_both_named(causes: tuple[FaultKind, ...], sizes: tuple[float, ...]) -> None:
    faults = (Fault(kind, (3,), size) for kind, size in zip(causes, sizes, strict=True))
    truth = truth_of(ddp(*faults, seed=5))
    found = {one.cause: one for one in analyzed(truth.run.traces()).stragglers}
    assert {one.rank for one in found.values()} == {3}
    assert sorted(found) == sorted(culprit.causes[0] for culprit in truth.culprits)
    for culprit in truth.culprits:
        assert found[culprit.causes[0]].saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.02 * truth.run.step_ns)


def test_a_slow_host_is_one_fault_in_whatever_its_time_goes() -> None:
    small = Model(kernel_scale=0.2)
    job = Job(Layout(data=8), small, faults=(Fault(FaultKind.SLOW_HOST, (3,), 0.8),), seed=5)
    assert [one.rank for one in analyzed(simulate(job).traces()).stragglers] == [3]


def pipeline(*faults: Fault, noise: Noise = QUIET, seed: int) -> Job:
    """A small pipeline, of which each stage is one rank; only the first copies the input, which takes 80 us."""
    return Job(Layout(pipeline=4), model=Model(layers=1, microbatches=4), faults=faults, noise=noise, seed=seed)


@pytest.mark.parametrize("kind", [FaultKind.COPY, FaultKind.DATA_WAIT])
@pytest.mark.parametrize(("ratio", "is_named"), [(0.018, False), (0.04, True)])
def test_a_little_that_the_first_stage_alone_fetches_is_its_role(kind: FaultKind, ratio: float, is_named: bool) -> None:
    step_ns = simulate(pipeline(seed=23)).step_ns
    found = analyzed(simulate(pipeline(Fault(kind, (0,), ratio * step_ns), seed=23)).traces()).stragglers
    assert [one.rank for one in found] == ([0] if is_named else [])


def test_what_ran_before_the_record_is_no_wait_that_a_faster_job_would_not_have() -> None:
    """Hosts run ahead: the first rows launched in the record wait for sends that were launched before it."""
    job = Job(
        Layout(pipeline=8, ranks_per_host=4),
        Model(
            layers=2, kernel_scale=0.75, microbatches=16, is_batched=True, loader_ns=1_500_000, ends_with_sync=False,
            activation_bytes=6_143_616, layer_bytes=14_198_976,
        ),
        faults=(Fault(FaultKind.DATA_WAIT, (7,), 130e6),), seed=55,
    )  # fmt: skip
    truth = truth_of(job)
    model = modelled(truth.run.traces())
    assert model.is_elastic, "or there is nothing to tell"
    (one,) = analyzed(truth.run.traces()).stragglers
    (culprit,) = truth.culprits
    assert one.saved_ns / truth.run.step_ns == pytest.approx(culprit.saved_ratio, abs=0.005)


def test_slow_copies_of_a_first_stage_without_replicas_are_named() -> None:
    truth = truth_of(pipeline(Fault(FaultKind.COPY, (0,), 2.5e6), seed=21))
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.rank, straggler.cause) == (0, "exposed_copy")
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.005 * truth.run.step_ns)
    assert "the other stages' median" in straggler.evidence


def test_usual_copies_of_a_first_stage_name_nobody_even_if_one_of_them_stops() -> None:
    stopped = Fault(FaultKind.COPY, (0,), 3e6, steps=(4,))
    assert analyzed(simulate(pipeline(seed=21)).traces()).stragglers == []
    job = analyzed(simulate(pipeline(stopped, seed=21)).traces())
    assert job.wall_ns < 80 * stopped.size  # it costs what would be enough to be named
    assert job.stragglers == []


def test_evidence_of_a_stage_without_replicas_counts_the_kernels_of_the_others() -> None:
    [straggler, *_] = analyzed(simulate(pipeline(Fault(FaultKind.EXTRA_LAYERS, (2,), 1), seed=22)).traces()).stragglers
    assert (straggler.rank, straggler.cause) == (2, "compute")
    assert "it ran more" in straggler.evidence


@pytest.mark.parametrize("stage", decisive(range(4), 1))
@pytest.mark.parametrize(("kind", "size"), [(FaultKind.EXTRA_KERNEL, 2.5e6), (FaultKind.EXTRA_WORK, 0.6)])
def test_a_kernel_that_no_other_stage_runs_is_named(kind: FaultKind, size: float, stage: int) -> None:
    truth = truth_of(pipeline(Fault(kind, (stage,), size), seed=22))
    [culprit] = truth.culprits
    assert culprit.saved_ratio > 0.06
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.rank, straggler.cause) == (stage, "compute")
    assert "it ran more" in straggler.evidence
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.015 * truth.run.step_ns)


@pytest.mark.parametrize(("stage", "size", "is_named"), [(0, 6e5, False), (1, 3e5, True), (3, 2e5, False)])
def test_a_little_work_of_its_own_is_the_role_of_the_first_and_the_last_stage(
    stage: int, size: float, is_named: bool
) -> None:
    truth = truth_of(pipeline(Fault(FaultKind.EXTRA_KERNEL, (stage,), size), seed=22))
    assert 0.02 < truth.culprits[0].saved_ratio < 0.05
    assert [one.rank for one in analyzed(truth.run.traces()).stragglers] == ([stage] if is_named else [])


def test_a_fault_that_has_ended_is_named_beside_a_larger_one_of_the_same_cause() -> None:
    ended = Fault(FaultKind.STALL, (5,), 8e6, steps=(1, 2, 3))
    larger = Fault(FaultKind.STALL, (2,), 45e6, steps=(4, 5, 6))
    found = analyzed(simulate(ddp(ended, larger, seed=5)).traces()).stragglers
    assert [(one.rank, one.cause, one.since_step) for one in found] == [(2, "host_bound", 4), (5, "host_bound", 1)]


def test_hosts_whose_clocks_are_far_apart_accuse_nobody() -> None:
    run = simulate(Job(Layout(data=16), clocks=Clocks(offset_ns=200_000), seed=6))
    job = analyzed(run.traces())
    assert job.stragglers == []
    apart_ns = run.clocks[0].offset_ns - run.clocks[1].offset_ns
    assert abs(apart_ns) > 80_000
    drifted_ns = 2_000  # in the time since the job began, by some millionths
    assert job.clocks[8].offset_ns == pytest.approx(apart_ns, abs=2_000 + drifted_ns)


@pytest.mark.parametrize("seeds", [2, pytest.param(4, marks=[pytest.mark.slow, pytest.mark.full])])
@pytest.mark.parametrize("kernel_ratio", [0.03, 0.005])
def test_hiccups_of_single_steps_name_nobody_however_alike_kernels_are(kernel_ratio: float, seeds: int) -> None:
    noise, incidents = replace(LOUD, kernel_ratio=kernel_ratio), 0
    for seed in range(seeds):
        job = analyzed(simulate(Job(Layout(data=8), noise=noise, seed=200 + seed)).traces())
        assert job.stragglers == []
        incidents += len(job.incidents)
    assert incidents > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", decisive(LAYOUTS, "ddp", "fsdp", "tensor", "gloo"))
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


@pytest.mark.full
@pytest.mark.slow
def test_a_link_that_is_slow_in_some_steps_is_named_since_then() -> None:
    job = Job(
        Layout(tensor=2, data=4, pipeline=2), model=Model(microbatches=4),
        faults=(Fault(FaultKind.SLOW_DEVICE_LINK, (5,), 5.0, steps=(5, 6)),), seed=14,
    )  # fmt: skip
    truth = truth_of(job)
    [culprit] = truth.culprits
    [straggler] = analyzed(truth.run.traces()).stragglers
    assert (straggler.ranks, straggler.cause, straggler.since_step) == ([5], "link", 5)
    assert straggler.saved_ns == pytest.approx(culprit.saved_step_ns, abs=0.01 * truth.run.step_ns)


def test_single_steps_of_two_ranks_do_not_hide_each_other() -> None:
    saves = [Fault(FaultKind.CHECKPOINT, (2,), 30e6, steps=(2,)), Fault(FaultKind.CHECKPOINT, (5,), 20e6, steps=(5,))]
    found = analyzed(simulate(ddp(*saves, seed=7)).traces()).stragglers
    assert [(one.rank, one.cause, one.since_step) for one in found] == [(2, "checkpoint", 2), (5, "checkpoint", 5)]


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_healthy_jobs_name_nobody(name: str, seeds: int) -> None:
    for seed in range(seeds):
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


def test_work_that_is_uneven_in_some_steps_only_is_found_since_then() -> None:
    job = Job(Layout(data=8), faults=(Fault(FaultKind.IMBALANCE, (), 0.25, steps=(5, 6)),), seed=15)
    truth = truth_of(job)
    [culprit] = truth.culprits
    [found] = analyzed(truth.run.traces()).stragglers
    assert (found.kind, found.since_step) == ("imbalance", 5)
    assert found.saved_ns == pytest.approx(culprit.saved_step_ns, rel=0.1)


def test_stops_on_many_ranks_are_no_uneven_work() -> None:
    noise, uneven = replace(LOUD, hiccup_ratio=0.3), Fault(FaultKind.IMBALANCE, (), 0.1)
    truth = truth_of(Job(Layout(data=8), noise=noise, faults=(uneven,), seed=15))
    assert truth.culprits[0].saved_ratio < 0.01  # whoever stops is waited for, however evenly the work is spread
    assert analyzed(truth.run.traces()).stragglers == []
