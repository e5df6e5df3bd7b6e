"""Energy of a job: nothing is lost between ticks, nothing is given to two jobs, and what is unknown is absent."""

import msgspec
import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.jobs.job_energy import MIN_SECONDS, SPAN_SECONDS, JobEnergies
from pacecar.monitor.jobs.tracked_job import JobView, RankView
from pacecar.records import Ok, Sample, Snapshot


def snapshot(second, energies):
    samples = []
    for gpu, energy in energies.items():
        samples += [
            Sample("pacecar_gpu_info", (gpu, f"GPU-{gpu}", *[""] * 6, "off"), 1),
            Sample("pacecar_gpu_energy_joules_total", (gpu,), energy),
        ]
    return Snapshot(second, second * NS_PER_SECOND, 0, 0, {"gpu": Ok(tuple(samples))}, {"gpu": 1})


@pytest.fixture
def view(make_hello, make_step):
    def make(job, ranks, **hello):
        """`ranks` is rank -> (gpu or None, steps, samples)."""
        views = [
            RankView(
                hello=make_hello(
                    job=job, rank=rank, world_size=len(ranks), parallel={"data": len(ranks)},
                    device_uuid=None if gpu is None else f"GPU-{gpu}", **hello,
                ),
                connected=True, goodbye=None, switch=None, switches=0, step_age_ns=0,
                step=make_step(job=job, rank=rank, total_steps=steps, total_samples=samples, total_tokens=None),
            )
            for rank, (gpu, steps, samples) in ranks.items()
        ]  # fmt: skip
        return JobView(
            job=job, launch="", uid=1, ranks=tuple(views)
        )  # fmt: skip

    return make


def take(energies, snapshot, jobs):
    return energies.update(snapshot, lambda: jobs)


def figures(samples):
    return {(s.metric.removeprefix("pacecar_job_energy_"), s.labels[0]): s.value for s in samples}


def test_a_step_of_two_gpus_takes_what_both_counters_say(view):
    energies = JobEnergies()
    for second in range(3 * SPAN_SECONDS):
        # 300 W and 500 W; a step of two seconds, 8 samples on each rank.
        steps = second // 2
        job = view("run-7", {0: ("0", steps, 8 * steps), 1: ("1", steps, 8 * steps)})
        read = figures(take(energies, snapshot(second, {"0": 300_000 * second, "1": 7 + 500_000 * second}), [job]))
        if second < MIN_SECONDS:
            assert ("per_step_joules", "run-7") not in read
    assert read["joules_total", "run-7"] == 800_000 * (3 * SPAN_SECONDS - 1)
    assert read["per_step_joules", "run-7"] == 1_600_000
    assert read["per_sample_joules", "run-7"] == 100_000
    assert ("per_token_joules", "run-7") not in read, "the hook does not count them"


def test_a_gpu_that_was_not_read_for_a_while_loses_nothing(view):
    energies = JobEnergies()
    for second in range(40):
        lost = 10 <= second < 15
        read = take(
            energies, snapshot(second, {} if lost else {"0": 1000 * second}), [view("a", {0: ("0", second, second)})]
        )
    assert figures(read) == {
        ("joules_total", "a"): 39_000, ("per_step_joules", "a"): 1000, ("per_sample_joules", "a"): 1000,
    }  # fmt: skip


def test_a_shared_gpu_is_given_to_neither_job(view):
    energies = JobEnergies()
    for second in range(90):
        jobs = [view("a", {0: ("0", second, second)})]
        if 30 <= second < 60:
            jobs.append(view("b", {0: ("0", second, second)}))
        read = figures(take(energies, snapshot(second, {"0": 1000 * second}), jobs))
        if 30 <= second < 60 + MIN_SECONDS:
            assert not {key for key in read if key[0] != "joules_total"}
    assert read["joules_total", "a"] == 29_000 + 29_000, "up to the last tick alone, and from the first tick alone"
    assert read["per_step_joules", "a"] == 1000
    assert not any(job == "b" for _, job in read)


@pytest.mark.parametrize("ranks", [{0: (None, 5, 5)}, {0: ("0", 5, 5), 1: (None, 5, 5)}, {0: ("9", 5, 5)}])
def test_what_is_unknown_is_absent(view, ranks):
    energies = JobEnergies()
    for second in range(30):
        assert take(energies, snapshot(second, {"0": 1000 * second}), [view("a", ranks)]) == []


def test_a_driver_that_counts_anew_and_a_job_that_attaches_anew_give_no_wrong_number(view):
    energies = JobEnergies()
    for second in range(100):
        energy = 1000 * second + (10**9 if second < 40 else 0)
        steps = second if second < 70 else second - 70
        job = view("a", {0: ("0", steps, steps)}, started_wall_ns=1 if second < 70 else 2)
        read = figures(take(energies, snapshot(second, {"0": energy}), [job]))
        assert read.get(("per_step_joules", "a"), 1000) == 1000
        assert 0 <= read["joules_total", "a"] <= 99_000
    assert ("per_step_joules", "a") in read


def test_ranks_that_may_share_a_sample_have_no_energy_a_sample(view):
    energies = JobEnergies()
    for second in range(30):
        job = view("a", {0: ("0", second, second), 1: ("1", second, second)})
        ranks = tuple(
            msgspec.structs.replace(rank, hello=msgspec.structs.replace(rank.hello, parallel={"tensor": 2}))
            for rank in job.ranks
        )
        read = take(energies, snapshot(second, {"0": second, "1": second}), [msgspec.structs.replace(job, ranks=ranks)])
    assert {key[0] for key in figures(read)} == {"joules_total", "per_step_joules"}


def test_what_a_forgotten_job_left_is_gone(view):
    energies = JobEnergies()
    take(energies, snapshot(0, {"0": 0}), [view(f"job-{n}", {0: ("0", 1, 1)}) for n in range(100)])
    assert take(energies, snapshot(1, {"0": 1}), []) == []
    assert not energies._jobs
