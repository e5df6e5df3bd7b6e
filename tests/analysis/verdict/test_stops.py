"""Stops that happen on any machine are told from faults that last a step or two."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from pacecar.analysis.graph.causes import CauseCode
from pacecar.analysis.verdict.peers import Atoms, Compared
from pacecar.analysis.verdict.stops import Stops
from tests.analysis.models import analyzed
from tests.kit.simulated_jobs import Fault, FaultKind, Job, Layout, Model, simulate

MS = 1e6


def compared(excess: NDArray[np.float64]) -> list[Compared]:
    """Return what ranks have over their peers, by step, if all of it is python between launches."""
    none = np.empty(0, dtype=np.int64)
    small = none.astype(np.uint8)
    atoms = Atoms(small, none, none, none, none, none, none, small, none, none.astype(bool))
    found = []
    for mine in excess:
        by_cause = np.zeros((len(CauseCode), excess.shape[1]), dtype=np.int64)
        by_cause[CauseCode.HOST_BOUND] = mine
        found.append(Compared(atoms, none, by_cause, by_cause, by_cause))
    return found


def with_copies(ranks: list[Compared], pieces: int, ns: int) -> list[Compared]:
    """Return ranks with 100 pieces that take 100 ms, of which so many are copies and take so long."""
    found = []
    for mine in ranks:
        causes = np.full(100, CauseCode.COMPUTE, dtype=np.uint8)
        causes[:pieces] = CauseCode.EXPOSED_COPY
        own = np.zeros_like(mine.total_ns)
        own[CauseCode.COMPUTE, 0], own[CauseCode.EXPOSED_COPY, 0] = 100 * MS - ns, ns
        found.append(replace(mine, atoms=replace(mine.atoms, cause=causes), total_ns=own))
    return found


def fault_ratio(
    excess: NDArray[np.float64], rank: int, step_ns: float, cause: CauseCode = CauseCode.HOST_BOUND
) -> float:
    stops = Stops(compared(excess), step_ns * excess.shape[1])
    return stops.fault_ratio(cause, excess[rank], stops.steps_out(cause, excess, rank), [rank])


def noisy() -> NDArray[np.float64]:
    return np.random.default_rng(0).normal(0, 0.01 * MS, (8, 6))


@pytest.mark.parametrize(("stop_ms", "step_ms", "is_fault"), [(3, 4, False), (12, 100, False), (12, 70, True)])
def test_one_stop_is_a_fault_if_it_costs_as_much_as_one_and_is_more_than_time_slices(
    stop_ms: float, step_ms: float, is_fault: bool
) -> None:
    excess = noisy()
    excess[3, 2] = stop_ms * MS
    assert fault_ratio(excess, 3, step_ms * MS) == is_fault
    excess[5, 1] = 0.45 * stop_ms * MS  # such stops happen in this job
    assert fault_ratio(excess, 3, step_ms * MS) == 0


def test_one_long_stop_each_of_two_ranks_is_how_their_hosts_are_unless_one_is_far_longer() -> None:
    excess = noisy()
    excess[3, 2], excess[6, 4] = 25 * MS, 15 * MS
    assert [fault_ratio(excess, rank, 40 * MS) for rank in (3, 6)] == [0, 0]
    excess[3, 2] = 40 * MS
    assert [fault_ratio(excess, rank, 40 * MS) for rank in (3, 6)] == [1, 0]


@pytest.mark.parametrize(("stop_ms", "is_fault"), [(3, False), (12, True)])
def test_a_stop_is_far_longer_than_others_only_if_it_is_more_than_time_slices(stop_ms: float, is_fault: bool) -> None:
    excess = noisy()
    excess[[0, 1, 6], [1, 4, 0]] = 0.4 * MS  # what else stands out in the job
    excess[3, 2] = stop_ms * MS
    assert fault_ratio(excess, 3, 100 * MS) == is_fault


def test_stops_in_three_steps_of_one_rank_are_a_fault_as_far_as_the_third_goes() -> None:
    excess = noisy()
    excess[3, [0, 2, 5]] = 3 * MS
    assert fault_ratio(excess, 3, 20 * MS) > 0.95
    excess[3] = 0.08 * MS  # what only this rank has stands out in every step
    excess[:3] = excess[4:] = 0
    excess[3, 2] = 3 * MS
    assert 0 < fault_ratio(excess, 3, 20 * MS) < 0.2
    assert 0 < fault_ratio(excess, 3, 20 * MS, CauseCode.EXPOSED_COPY) < 0.2


@pytest.mark.parametrize("cause", [CauseCode.HOST_BOUND, CauseCode.COMPUTE, CauseCode.EXPOSED_COPY])
@pytest.mark.parametrize(("stop_ms", "is_fault"), [(3, False), (12, True)])
def test_stops_in_two_steps_of_one_rank_are_a_fault_if_both_are_more_than_time_slices(
    stop_ms: float, is_fault: bool, cause: CauseCode
) -> None:
    excess = noisy()
    excess[3, [2, 5]] = stop_ms * MS
    assert (fault_ratio(excess, 3, 100 * MS, cause) > 0.95) == is_fault
    excess[3, 5] = 0  # one such step is chance
    assert fault_ratio(excess, 3, 100 * MS, cause) == 0


@pytest.mark.parametrize(
    ("pieces", "copied_ms", "ratio"),
    [(1, 1, 1.0), (10, 1, 0.0), (1, 10, 0.0)],  # stops strike pieces, or stretches of time: the traces do not say
)
def test_two_short_stops_of_one_rank_are_a_fault_where_chance_seldom_strikes(
    pieces: int, copied_ms: float, ratio: float
) -> None:
    excess = noisy()
    excess[3, [2, 5]] = 3 * MS
    stops = Stops(with_copies(compared(excess), pieces, int(copied_ms * MS)), 100 * MS)
    out = stops.steps_out(CauseCode.EXPOSED_COPY, excess, 3)
    assert stops.fault_ratio(CauseCode.EXPOSED_COPY, excess[3], out, [3]) == pytest.approx(ratio, abs=0.01)
    assert stops.fault_ratio(CauseCode.COMPUTE, excess[3], out, [3]) == 0


@pytest.mark.parametrize(("is_uneven", "is_stop", "is_fault"), [(True, False, 0), (True, True, 1), (False, False, 1)])
def test_one_step_that_is_longer_throughout_is_a_long_sample_where_work_is_uneven(
    is_uneven: bool, is_stop: bool, is_fault: int
) -> None:
    excess = noisy()
    excess[3, 2] = 30 * MS
    stops = Stops(compared(excess), 270 * MS, is_uneven=is_uneven)
    parts = np.repeat(excess[3] / 4, 4)
    if is_stop:
        parts[8:12] = 0, 30 * MS, 0, 0
    out = stops.steps_out(CauseCode.COMPUTE, excess, 3)
    assert stops.fault_ratio(CauseCode.COMPUTE, excess[3], out, [3], parts) == is_fault


def test_long_stops_in_two_steps_of_one_rank_stand_out_of_the_short_ones_of_others() -> None:
    excess = noisy()
    excess[3, [2, 5]] = 14 * MS
    excess[[0, 6, 7], [1, 4, 2]] = 3 * MS
    assert fault_ratio(excess, 3, 100 * MS) > 0.95
    assert fault_ratio(excess, 3, 100 * MS, CauseCode.DATA_WAIT) == 0  # waits for data vary by themselves


def test_two_steps_are_enough_where_the_excess_is_in_all_of_their_parts() -> None:
    excess = noisy()
    excess[3, [4, 5]] = 3 * MS
    stops = Stops(compared(excess), 100 * MS)
    out = stops.steps_out(CauseCode.COMPUTE, excess, 3)
    slow, stopped = np.repeat(excess[3] / 4, 4), np.zeros(24)
    stopped[[17, 22]] = 3 * MS
    ratios = [stops.fault_ratio(CauseCode.COMPUTE, excess[3], out, [3], parts) for parts in (slow, stopped)]
    assert ratios == [pytest.approx(0.75), 0]


@pytest.mark.slow
@pytest.mark.parametrize("stop_ms", [5, 25])  # the host runs ahead of its device, so that 12 would cost nothing
def test_one_stop_of_a_stage_without_replicas_is_seen_against_its_own_other_steps(stop_ms: int) -> None:
    stop = Fault(FaultKind.STALL, (2,), stop_ms * MS, steps=(4,))
    job = analyzed(simulate(Job(Layout(pipeline=4), model=Model(layers=1, microbatches=4), faults=(stop,))).traces())
    named = [(one.rank, one.cause, one.since_step) for one in job.stragglers]
    assert named == ([(2, "host_bound", 4)] if stop_ms > 8 else [])
    assert ((2, 4) in [(one.rank, one.step) for one in job.incidents]) == (stop_ms < 8)


@pytest.mark.slow
def test_one_ordinary_stop_names_nobody_in_a_job_of_short_steps() -> None:
    stop = Fault(FaultKind.STALL, (2,), 3 * MS, steps=(4,))
    job = analyzed(simulate(Job(Layout(data=4), model=Model(layers=2, kernel_scale=0.3), faults=(stop,))).traces())
    assert job.wall_ns < 6 * 2 * stop.size  # it takes more than half a step
    assert job.stragglers == []
    assert [(one.rank, one.step) for one in job.incidents] == [(2, 4)]
