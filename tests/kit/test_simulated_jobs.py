"""The simulator of jobs is right: what it says of faults agrees with theory, and the same seed gives the same job."""

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.one_rank.one_trace import analyze_trace
from tests.kit.simulated_jobs import (
    LOUD,
    QUIET,
    Clocks,
    Fault,
    FaultKind,
    Job,
    Layout,
    Links,
    Model,
    Noise,
    simulate,
    truth_of,
    without,
)
from tests.kit.simulated_jobs.acceptance import COST_RATIO_MAX, COST_RATIO_MIN, healthy_jobs, planted_faults
from tests.kit.simulated_jobs.durations import durations
from tests.kit.simulated_jobs.identifiability import ranks_told
from tests.kit.simulated_jobs.instructions import Code
from tests.kit.simulated_jobs.run import program_of

SILENT = Noise(0, 0, 0, 0, scatter_ns=0, stamp_ns=0)

MIXTURES = {
    "ddp": Job(Layout(data=8)),
    "fsdp": Job(Layout(data=8, is_sharded=True, ranks_per_host=4)),
    "tensor": Job(Layout(tensor=4)),
    "1f1b": Job(Layout(pipeline=4), Model(layers=2, microbatches=6)),
    "gpipe": Job(Layout(pipeline=4), Model(layers=2, microbatches=4, schedule="gpipe")),
    "interleaved": Job(Layout(pipeline=4), Model(layers=2, microbatches=4, schedule="interleaved", chunks=2)),
    "1f1b in batches": Job(Layout(pipeline=4), Model(layers=2, microbatches=6, is_batched=True)),
    "gpipe in batches": Job(Layout(pipeline=4), Model(layers=2, microbatches=4, schedule="gpipe", is_batched=True)),
    "1f1b x ddp": Job(Layout(pipeline=2, data=2, ranks_per_host=2), Model(layers=2, microbatches=4)),
    "tensor x ddp": Job(Layout(tensor=2, data=2)),
    "fsdp x tensor": Job(Layout(tensor=2, data=2, is_sharded=True)),
    "1f1b x tensor x ddp": Job(Layout(pipeline=2, tensor=2, data=2), Model(layers=2, microbatches=4)),
}
MIXTURES = {name: replace(job, steps=2) for name, job in MIXTURES.items()}


def test_the_same_seed_gives_the_same_job_and_another_another():
    job = replace(MIXTURES["ddp"], noise=LOUD)
    first, again, other = simulate(job), simulate(job), simulate(replace(job, seed=1))
    for one, two in zip(first.times, again.times, strict=True):
        for part, same in zip(one, two, strict=True):
            assert np.array_equal(part, same)
    assert first.wall_ns != other.wall_ns


@pytest.mark.parametrize("name", MIXTURES)
def test_every_kind_of_job_ends_and_its_ranks_run_all_of_their_program(name):
    run = simulate(MIXTURES[name])
    for rank, times in enumerate(run.times):
        program = run.program(rank)
        steps = run.job.all_steps
        assert len(times.host_start) == len(times.host_end) == steps * len(program)
        assert np.array_equal(times.device_start >= 0, np.tile(program.is_launch, steps))


@pytest.mark.parametrize("name", MIXTURES)
def test_the_host_lane_is_one_after_the_other_without_a_hole(name):
    """What an instruction leaves is what the next one finds: the lane's parts sum to its wall time."""
    run = simulate(MIXTURES[name])
    for times in run.times:
        assert np.array_equal(times.host_end[:-1], times.host_start[1:])
        assert (times.host_end >= times.host_start).all()


def test_a_device_without_noise_and_communication_runs_its_kernels_back_to_back():
    run = simulate(Job(Layout(), noise=SILENT, steps=2))
    program, times = run.program(0), run.times[0]
    on_compute = np.tile(program.is_launch, 3)
    start, end = times.device_start[on_compute], times.device_end[on_compute]
    assert np.array_equal(end - start, np.tile(program.device_ns[program.is_launch], 3))
    assert (start[1:] >= end[:-1] + 900).all()


@pytest.mark.slow
def test_a_slow_rank_costs_a_ddp_job_what_theory_says():
    """All wait for the slow rank's backward; what its all-reduces hide under stays hidden."""
    fault = Fault(FaultKind.SLOW_COMPUTE, (3,), 0.1)
    job = Job(Layout(data=8), noise=SILENT, faults=(fault,))
    (culprit,) = truth_of(job).culprits
    program = simulate(job).program(0)
    compute = program.device_ns[(program.power > 0) & (program.device_ns > 0)].sum()
    assert culprit.ranks == (3,)
    assert culprit.saved_step_ns == pytest.approx(0.1 * compute, rel=0.01)


def test_a_data_wait_costs_a_ddp_job_its_own_length():
    fault = Fault(FaultKind.DATA_WAIT, (5,), 4e6)
    (culprit,) = truth_of(Job(Layout(data=8), noise=SILENT, faults=(fault,))).culprits
    assert culprit.saved_step_ns == pytest.approx(4e6, rel=0.01)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(FaultKind.SLOW_LAUNCH, (3,), 2_000),
        Fault(FaultKind.SLOW_HOST, (3,), 0.2),
        Fault(FaultKind.SLOW_LINK, (3,), 1.0),
        Fault(FaultKind.DATA_WAIT, (3,), 300_000, steps=()),
        Fault(FaultKind.COPY, (3,), 0.0),
    ],
)
def test_what_is_not_on_the_critical_path_costs_next_to_nothing(fault):
    """A host that is ahead of its device may be slower, and a link to other hosts that nobody uses too."""
    (culprit,) = truth_of(Job(Layout(data=8), noise=SILENT, faults=(fault,))).culprits
    assert abs(culprit.saved_ratio) < 0.005


def test_a_faster_waiting_rank_saves_nothing():
    slow, hidden = Fault(FaultKind.SLOW_COMPUTE, (1,), 0.3), Fault(FaultKind.SLOW_COMPUTE, (2,), 0.15)
    culprits = truth_of(Job(Layout(data=4), noise=SILENT, faults=(slow, hidden))).culprits
    assert [one.fault for one in culprits] == [slow, hidden]
    assert culprits[0].saved_ratio > 0.08
    assert culprits[1].saved_ns == 0


@pytest.mark.slow
def test_a_slow_stage_of_a_pipeline_costs_more_than_its_own_work():
    job = Job(Layout(pipeline=4), Model(layers=2, microbatches=8), noise=SILENT, steps=2)
    fault = Fault(FaultKind.EXTRA_LAYERS, (3,), 1)
    (culprit,) = truth_of(replace(job, faults=(fault,))).culprits
    layer = simulate(job).program(3)
    compute = layer.device_ns[(layer.power > 0) & (layer.device_ns > 0)].sum() / 2
    assert culprit.saved_step_ns == pytest.approx(compute, rel=0.15)


def test_an_extra_layer_shifts_no_draw_of_the_others():
    job = Job(Layout(pipeline=2), Model(layers=2, microbatches=2), noise=LOUD, steps=1)
    plain, more = simulate(job), simulate(replace(job, faults=(Fault(FaultKind.EXTRA_LAYERS, (1,), 1),)))
    assert len(more.program(1)) > len(plain.program(1))
    assert np.array_equal(kernels_of(plain, 1), kernels_of(more, 1))


@pytest.mark.parametrize(("kind", "size"), [(FaultKind.EXTRA_KERNEL, 5e5), (FaultKind.EXTRA_WORK, 0.2)])
def test_an_extra_kernel_takes_as_long_as_it_says_in_each_pass_and_shifts_no_draw_of_the_others(kind, size):
    job = Job(Layout(pipeline=2), Model(layers=2, microbatches=2), noise=SILENT, steps=1)
    plain, more = simulate(job), simulate(replace(job, faults=(Fault(kind, (1,), size),)))
    assert np.array_equal(kernels_of(plain, 1), kernels_of(more, 1))
    extra = [one for one in more.program(1).instructions if one.is_extra]
    forward, backward = 960_000 * 2, 1_955_000 * 2
    assert [one.device_ns for one in extra] == (
        [500_000] * 2 if kind is FaultKind.EXTRA_KERNEL else [round(size * ns) for ns in (forward, backward)] * 2
    )


def test_exchanges_between_the_same_hosts_share_their_link():
    """Four data parallel groups lie across two hosts, and so many of their collectives are on the way at once."""
    job = Job(Layout(tensor=4, data=2, ranks_per_host=4), Model(layers=1, buckets_of=1), noise=SILENT, steps=1)
    alone, half, quarter = (
        collective_ns(simulate(replace(job, links=Links(nic_shares=shares)))) for shares in (None, 2, 1)
    )
    assert half == pytest.approx(2 * alone, rel=0.02)
    assert quarter == pytest.approx(4 * alone, rel=0.02)


def collective_ns(run):
    """Return the shortest time that a rank is in a data parallel collective of the first step."""
    program, times = run.program(0), run.times[0]
    places = program.exchanges["data"]
    return int((times.device_end - times.device_start)[places].min())


def kernels_of(run, rank):
    """Return how long each kernel of the model's own layers took in the first step."""
    program, times = run.program(rank), run.times[rank]
    own = program.is_launch & (program.power > 0) & ~program.is_extra
    return (times.device_end - times.device_start)[: len(program)][own]


@pytest.mark.slow
def test_imbalance_is_nobodys_fault_and_evening_it_out_saves():
    job = Job(Layout(data=8), faults=(Fault(FaultKind.IMBALANCE, (), 0.2),))
    (culprit,) = truth_of(job).culprits
    assert (culprit.ranks, culprit.causes) == ((), ("imbalance",))
    assert culprit.saved_ratio > 0.05
    alone = Job(Layout(tensor=4), faults=(Fault(FaultKind.IMBALANCE, (), 0.2),), noise=SILENT)
    spread = without(alone)
    assert simulate(alone).wall_ns == simulate(spread).wall_ns


def test_kernels_run_slower_beside_communication_if_the_job_has_contention():
    job = Job(Layout(data=16), noise=SILENT, steps=2)
    plain, slowed = simulate(job), simulate(replace(job, contention_ratio=0.2))
    assert slowed.wall_ns > plain.wall_ns * 1.02
    program = plain.program(0)
    kernels = np.tile((program.power > 0) & program.is_launch, 3)
    base = np.tile(program.device_ns, 3)[kernels]
    ratio = (slowed.times[0].device_end - slowed.times[0].device_start)[kernels] / base
    assert ratio.min() == 1
    assert ratio.max() == pytest.approx(1.2, abs=1e-4)


def test_a_host_clock_can_be_taken_back_to_the_true_time():
    run = simulate(Job(Layout(data=4, ranks_per_host=2), clocks=Clocks(5e6, 1e-4), noise=SILENT, steps=1))
    clocks = run.clocks
    assert len({clock.offset_ns for clock in clocks}) == 2
    for rank, times in enumerate(run.times):
        clock = clocks[run.job.layout.host(rank)]
        assert np.abs(clock.true(clock.show(times.host_start)) - times.host_start).max() <= 1


def test_a_rank_without_noise_has_the_ledger_of_its_program():
    """The product's own attribution of a simulated trace: compute is the sum of the kernels."""
    run = simulate(Job(Layout(), noise=SILENT, steps=3, clocks=Clocks(0, 0)))
    report = analyze_trace(run.trace(0), window="steps")
    program = run.program(0)
    assert report.compute_ns == 3 * program.device_ns[program.power > 0].sum()
    assert report.copy_ns == 3 * program.device_ns[(program.power == 0) & program.is_launch].sum()
    assert report.data_wait_ns == 3 * 250_000
    assert [step.step for step in report.steps] == [1, 2, 3]


def test_links_between_hosts_are_slower():
    near, far = Layout(data=8), Layout(data=8, ranks_per_host=1)
    assert simulate(Job(far, steps=2)).wall_ns > simulate(Job(near, steps=2)).wall_ns
    slow = Job(far, links=Links(between=5e9), steps=2)
    assert simulate(slow).wall_ns > simulate(Job(far, steps=2)).wall_ns


def test_a_host_that_leaves_late_does_so_always_alike():
    job = Job(Layout(data=4, ranks_per_host=2), noise=replace(SILENT, lateness_ns=50_000), steps=1)
    program, times = simulate(job).program(0), simulate(job).times
    last = np.flatnonzero(np.tile(program.code == Code.COLLECTIVE, 2))[-1]
    ends = [int(one.device_end[last]) for one in times]
    assert ends[0] == ends[1] != ends[2] == ends[3]


def test_a_stop_stays_where_it_is_when_another_fault_is_removed():
    slow, stop = Fault(FaultKind.DATA_WAIT, (1,), 1e6), Fault(FaultKind.STALL, (2,), 5e6, steps=(4,))
    job = Job(Layout(data=4), model=Model(layers=2), faults=(slow, stop), seed=3)
    program = program_of(job, 0)
    both, alone = (durations(each, program, 2, 4).host for each in (job, without(job, slow)))
    assert (both == alone).all()


@pytest.mark.slow
def test_planted_faults_cost_what_they_must_and_are_the_same_for_the_same_seed():
    kinds = ("ddp", "tensor", "cpu")
    draws = list(planted_faults(5, 6, kinds=kinds))
    for _, truth in draws:
        job = truth.run.job
        assert 8 <= job.layout.ranks <= 64
        assert truth.culprits
        for one in truth.culprits:
            assert COST_RATIO_MIN <= one.saved_ratio <= COST_RATIO_MAX
            assert one.saved_ns == truth.run.recorded_ns - simulate(without(job, one.fault)).recorded_ns
            assert set(one.ranks) <= set(one.told) <= set(range(job.layout.ranks))
            assert one.causes
            assert job.steps_before <= one.since_step < job.all_steps
    again = [truth.run.job for _, truth in planted_faults(5, 1, kinds=kinds, first=draws[1][0])]
    assert again == [draws[1][1].run.job]


def test_healthy_jobs_have_no_fault_and_differ():
    for loud in (False, True):
        jobs = list(healthy_jobs(3, 50, loud=loud))
        assert all(job.faults == () for job in jobs)
        assert {job.noise for job in jobs} == {LOUD if loud else QUIET}
        assert len({job.layout for job in jobs}) > 10
        assert len({job.seed for job in jobs}) == 50
    assert truth_of(jobs[0]).culprits == ()


@pytest.mark.full
def test_a_thousand_ranks_can_be_simulated():
    run = simulate(Job(Layout(tensor=8, pipeline=4, data=32), Model(layers=1, microbatches=4, kernel_scale=4), steps=1))
    assert run.job.layout.ranks == len(run.times) == 1024
    assert run.trace(1023).steps[0].number == 1


NIC, DEVICE_LINK = FaultKind.SLOW_LINK, FaultKind.SLOW_DEVICE_LINK
STAGES_ON_HOSTS = Layout(pipeline=4, data=2, ranks_per_host=2)


@pytest.mark.parametrize(
    ("layout", "kind", "ranks", "told"),
    [
        (Layout(data=16), DEVICE_LINK, (3,), None),  # one group of all
        (Layout(data=32), NIC, tuple(range(8)), None),
        (Layout(tensor=8, data=4), NIC, tuple(range(8)), None),  # all groups are between all hosts
        (Layout(tensor=4, data=4), DEVICE_LINK, (5,), (5,)),  # its two groups are slow, others of their kind are not
        (STAGES_ON_HOSTS, NIC, (2, 3), (2, 3)),
        (STAGES_ON_HOSTS, NIC, (0, 1), (0, 1)),
        (Layout(pipeline=8, ranks_per_host=4), NIC, (0, 1, 2, 3), None),  # one link between two hosts
        (Layout(pipeline=4), DEVICE_LINK, (1,), (1,)),
        (Layout(pipeline=4), DEVICE_LINK, (0,), (0,)),  # 1 is fast with 2
    ],
)
def test_a_slow_link_can_be_told_as_far_as_others_that_do_the_same_are_fast(layout, kind, ranks, told):
    assert ranks_told(Job(layout), Fault(kind, ranks, 1.0)) == told
