"""The graph repeats the recorded run to the nanosecond, and its path adds up; the fixed-lag error is stated."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pacecar.analysis.align.collective_matching import match
from pacecar.analysis.align.host_clocks import align_clocks
from pacecar.analysis.all_ranks.model_input import model_of
from pacecar.analysis.graph.causes import CauseCode
from pacecar.analysis.graph.job_graph import Joins, ReplayScenario, join_ranks
from pacecar.analysis.graph.rank_graph import EdgeKind, RankGraph, RankWeights
from pacecar.analysis.graph.replay import play, walls
from pacecar.analysis.shelf import Shelf
from pacecar.analysis.trace.columns import Trace
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.models import modelled
from tests.analysis.trace.traces import trace_file
from tests.kit.simulated_jobs import LOUD, Fault, FaultKind, Job, Layout, Links, Model, simulate

JOBS = {
    "ddp": Job(Layout(data=8), seed=1),
    "fsdp": Job(Layout(data=8, is_sharded=True), noise=LOUD, seed=2),
    "tensor and data": Job(Layout(tensor=4, data=2), seed=3),
    "1f1b": Job(Layout(pipeline=4, data=2), model=Model(microbatches=8), seed=4),
    "gpipe": Job(Layout(pipeline=2, data=2), model=Model(microbatches=4, schedule="gpipe"), seed=5),
    "two hosts": Job(Layout(data=16), noise=LOUD, seed=6),
    "gloo": Job(Layout(data=4), is_cpu=True, seed=7),
}


def assert_exact(traces: list[Trace]) -> None:
    """Every node is played at the time at which it was recorded, and the path sums to the last of them."""
    model = modelled(traces)
    graph = model.graph
    times = play(graph, graph.weights())
    for place, rank in enumerate(graph.ranks):
        rows, lane = rank.events.rows, rank.events.host
        first = graph.offset[place]
        hosts = first + np.arange(len(rank.host_begin))
        assert (times[hosts] == lane.time_ns[rank.host_begin] - graph.base_ns).all()
        ends = first + rank.seg_end(np.arange(len(rank.seg_first)))
        assert (times[ends] == rows.end_ns[rank.order[rank.seg_last]] - graph.base_ns).all()
    path = model.path
    assert int((path.end_ns - path.start_ns).sum()) == path.wall_ns == max(int(times.max()), 0)
    assert (path.start_ns[:-1] == path.end_ns[1:]).all()
    assert (path.end_ns > path.start_ns).all()


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_the_replay_is_exact_and_the_path_adds_up(name: str) -> None:
    assert_exact(simulate(JOBS[name]).traces())


@pytest.mark.parametrize(
    "name",
    ["param_dlrm_8xV100", "hta_nccl_data", "tl_b200_eager_trace", "hta_trace_diff_test", "kineto_tb_nw0_1623143089861",
     "hta_cpu_only", "hta_trace_filter_128ranks"],
)  # fmt: skip
@pytest.mark.slow
def test_real_traces_are_replayed_exactly(name: str) -> None:
    assert_exact([read_trace(path) for path in sorted(trace_file(name).parent.iterdir())])


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_without_recorded_delays_the_run_is_still_nearly_as_long(name: str) -> None:
    error = modelled(simulate(JOBS[name]).traces()).error
    assert abs(error.ratio) <= 0.006
    assert error.unexplained_ratio <= 0.01


@pytest.mark.slow
def test_the_wall_time_is_the_jobs_own() -> None:
    run = simulate(JOBS["two hosts"])
    assert modelled(run.traces()).wall_ns == pytest.approx(run.wall_ns, abs=20_000)


def test_durations_that_are_half_as_long_make_a_job_half_as_long() -> None:
    """All durations are halved and what the hardware needs in between is not."""
    graph = modelled(simulate(Job(Layout(data=3), steps=3, seed=21)).traces()).graph

    def halved(rank: RankGraph) -> RankWeights:
        return replace(rank.weights, row_ns=rank.weights.row_ns // 2, host_ns=rank.weights.host_ns // 2)

    ranks = dict.fromkeys(range(3), halved)
    now, then = walls(graph, [ReplayScenario(), ReplayScenario(ranks, graph.wire_ns // 2)])
    assert then == pytest.approx(now / 2, rel=0.03)


def test_a_faster_link_saves_what_the_job_without_it_takes() -> None:
    slow, fast = (
        simulate(Job(Layout(data=4), links=Links(within=speed, within_latency_ns=0), steps=4, seed=22))
        for speed in (5e9, 10e9)
    )
    graph = modelled(slow.traces()).graph
    now, then = walls(graph, [ReplayScenario(), ReplayScenario(wire_ns=graph.wire_ns // 2)])
    assert slow.wall_ns > 1.3 * fast.wall_ns, "there is something to save"
    assert now - then == pytest.approx(slow.wall_ns - fast.wall_ns, rel=0.02)


def test_collectives_that_wait_for_themselves_are_named_and_taken_apart() -> None:
    """Two collectives that two ranks enter in opposite orders cannot be: neither could begin."""
    model = modelled(simulate(Job(Layout(data=2), Model(layers=2), steps=1, seed=23)).traces())
    joins, row = model.graph.joins, model.graph.joins.row.copy()
    mine = np.flatnonzero(joins.rank == 1)
    row[mine] = row[mine[::-1]]
    swapped = Joins(
        joins.count, joins.join, joins.rank, row, joins.label, joins.group, joins.is_pair, joins.binds, joins.receives,
        joins.bytes,
    )  # fmt: skip
    graph = join_ranks(model.graph.ranks, swapped, model.graph.base_ns)
    assert len(graph.broken) == 1
    assert play(graph, graph.weights()).max() > 0


@pytest.mark.slow
def test_a_wait_for_data_is_on_the_path_of_the_rank_that_waits() -> None:
    job = Job(Layout(data=4), faults=(Fault(FaultKind.DATA_WAIT, (2,), 5e6),), steps=4, seed=24)
    path = modelled(simulate(job).traces()).path
    waits = (path.cause == CauseCode.DATA_WAIT) & (path.rank == 2)
    assert int((path.end_ns - path.start_ns)[waits].sum()) >= 4 * 5_000_000


def test_edges_of_every_kind_were_tried() -> None:
    graph = modelled(simulate(Job(Layout(data=2), steps=2, seed=25)).traces()).graph
    assert set(graph.kind.tolist()) == {
        EdgeKind.SOURCE, EdgeKind.HOST, EdgeKind.SYNC, EdgeKind.STREAM, EdgeKind.EVENT, EdgeKind.LAUNCH,
        EdgeKind.ARRIVE, EdgeKind.LEAVE,
    }  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_receives_waits_for_its_sender_though_its_clock_is_off() -> None:
    """By its clock it ends before the sender begins, so its wait would be its own, and no slow stage would matter."""
    job = Job(Layout(pipeline=4), Model(microbatches=8), faults=(Fault(FaultKind.SLOW_COMPUTE, (1,), 0.5),), seed=26)
    traces = simulate(job).traces()
    matching = match(traces, len(traces))
    clocks = align_clocks(traces, matching.groups)
    off = [
        replace(clock, offset_ns=clock.offset_ns - 1e6 * (place == 2)) for place, clock in enumerate(clocks.corrections)
    ]
    saved = []
    for corrections in (clocks.corrections, off):
        model = model_of(traces, matching.groups, matching.events, replace(clocks, corrections=corrections), Shelf())
        assert model is not None
        faster = replace(model.graph.ranks[1].weights, row_ns=model.graph.ranks[1].weights.row_ns // 2)
        scenario = ReplayScenario({1: lambda _, faster=faster: faster})
        before, after = walls(model.graph, [ReplayScenario(), scenario]).tolist()
        saved.append((before - after) / 1e6)
    assert saved[1] == pytest.approx(saved[0], rel=0.15), "a quarter, if a receiver could leave before its sender comes"
