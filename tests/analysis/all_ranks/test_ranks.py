"""Several ranks together: waits, wires, shares, and what is wrong with the set of traces."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pacecar.analysis.all_ranks.rank_comparison import analyze_job
from pacecar.analysis.one_rank.one_trace import analyze_trace
from pacecar.analysis.trace.columns import Trace
from pacecar.analysis.trace.reader import read_trace
from tests.analysis.jobs import BEAT_NS, collective_places, keep_rows, make_job, make_trace, play
from tests.analysis.models import analyzed
from tests.analysis.trace.traces import trace_file
from tests.analysis.trace.writing import codes
from tests.kit.simulated_jobs import Job, Layout, simulate

few = settings(max_examples=25)
"""A job of four ranks takes 30 ms to analyze."""

DLRM = "param_dlrm_8xV100"


@st.composite
def jobs(draw: st.DrawFn) -> list[Trace]:
    """Draw a job whose ranks hold different beginnings of it, on a second stream beside compute or not."""
    ranks = draw(st.integers(1, 4))
    word = draw(st.text("ABGRTX", max_size=8))
    works = [[draw(st.integers(1, 6)) for _ in word] for _ in range(ranks)]
    drawings = play(word, works) if word else dict.fromkeys(range(ranks), "ccc")
    beside = {rank: draw(st.text("c.m", max_size=20)) for rank in drawings}
    traces = make_job({rank: (drawing, beside[rank]) for rank, drawing in drawings.items()}, world_size=ranks)
    for place, trace in enumerate(traces):
        lost = draw(st.integers(0, 2))
        keep = np.ones(len(trace.device.start_ns), dtype=np.bool_)
        keep[collective_places(trace)[:lost]] = False
        traces[place] = keep_rows(trace, keep)
    return traces


@pytest.mark.slow
@few
@given(jobs())
def test_waits_and_wires_are_the_durations(traces: list[Trace]) -> None:
    job = analyzed(traces)
    for total in job.collectives:
        assert total.wait_ns is not None
        assert total.wire_ns is not None
        assert total.wait_ns + total.wire_ns == total.duration_ns
        assert 0 <= total.exposed_ns <= total.duration_ns
    assert sum(share.wait_ns for share in job.shares) == sum(total.wait_ns or 0 for total in job.collectives)
    assert sum(share.wire_ns for share in job.shares) == sum(total.wire_ns or 0 for total in job.collectives)
    for one in job.instances:
        assert one.skew_ns >= 0
        assert one.wire_ns >= 0
        assert all(each.wait_ns >= 0 and each.wire_ns >= 0 and each.late_ns >= 0 for each in one.arrivals)
        assert max(each.late_ns for each in one.arrivals) == one.skew_ns


@pytest.mark.slow
@few
@given(jobs())
def test_exposed_shares_are_part_of_exposed_communication(traces: list[Trace]) -> None:
    job = analyzed(traces)
    reports = {trace.rank: analyze_trace(trace) for trace in traces}
    for share in job.shares:
        parts = (share.exposed_wait_ns or 0) + (share.exposed_wire_ns or 0)
        assert parts <= reports[share.rank].exposed_communication_ns
        if not codes(job).get("unmatched_collectives") and not codes(job).get("groups_with_one_rank"):
            assert parts == reports[share.rank].exposed_communication_ns


@pytest.mark.slow
@few
@given(jobs())
def test_caused_waits_are_the_waits_of_the_collectives_somebody_was_late_to(traces: list[Trace]) -> None:
    job = analyzed(traces)  # a beat is far above what is no lateness, so all but draws are blamed
    assume("clocks_not_aligned" not in codes(job))
    waits = 0
    for one in job.instances:
        others = sorted(each.late_ns for each in one.arrivals if each.rank != one.late_rank)
        late = one.skew_ns > others[len(others) // 2]
        waits += sum(each.wait_ns for each in one.arrivals) if late else 0
    assert sum(share.caused_wait_ns for share in job.shares) == waits


@pytest.mark.full
@pytest.mark.slow
@few
@given(jobs(), st.randoms(use_true_random=False))
def test_the_order_of_the_files_changes_nothing(traces: list[Trace], random: Random) -> None:
    shuffled = list(traces)
    random.shuffle(shuffled)
    assert msgspec.json.encode(analyzed(shuffled)) == msgspec.json.encode(analyzed(traces))


@pytest.mark.slow
@few
@given(jobs())
def test_no_rung_of_the_ladder_is_slower_than_what_is(traces: list[Trace]) -> None:
    assert all(scenario.speedup >= 1 and scenario.saved_ns >= 0 for scenario in analyzed(traces).what_if)


def test_waits_wires_and_bandwidth_of_a_drawn_job() -> None:
    job = analyzed(make_job({0: "cAAAAA", 1: "ccAAAA", 2: "ccccAA", 3: "ccAAAA"}, world_size=4))
    [one] = job.instances
    assert [each.wait_ns // BEAT_NS for each in one.arrivals] == [3, 2, 0, 2]
    assert [each.late_ns // BEAT_NS for each in one.arrivals] == [0, 1, 3, 1]
    assert (one.late_rank, one.skew_ns, one.wire_ns) == (2, 3 * BEAT_NS, 2 * BEAT_NS)
    assert one.bus_bandwidth == pytest.approx(4_000_000 / 0.002 * 2 * 3 / 4)  # nccl-tests: 2 (n - 1) / n
    [total] = job.collectives
    assert (total.count, total.wait_ns, total.wire_ns) == (1, 7 * BEAT_NS, 8 * BEAT_NS)
    assert [share.caused_wait_ns // BEAT_NS for share in job.shares] == [0, 0, 7, 0]
    assert (one.ranks, one.ranks_missing) == (4, 0)


def test_waiting_under_compute_is_not_exposed() -> None:
    job = analyzed(make_job({0: ("cAAAAA", ".cc..."), 1: ("ccccAA", "......")}, world_size=2))
    share = job.shares[0]
    assert (share.wait_ns, share.exposed_wait_ns, share.exposed_wire_ns) == (3 * BEAT_NS, BEAT_NS, 2 * BEAT_NS)


def test_ranks_that_are_missing_are_counted_and_said() -> None:
    job = analyzed(make_job({0: "cAAA", 3: "ccAA"}, world_size=8))
    assert [(one.ranks, one.ranks_missing) for one in job.instances] == [(2, 6)]
    assert codes(job)["ranks_missing"] == 1
    assert job.ranks == [0, 3]
    # Bandwidth by the whole group's factor, not by that of those that are here.
    assert job.instances[0].bus_bandwidth == pytest.approx(4_000_000 / 0.002 * 2 * 7 / 8)


def test_how_many_are_missing_is_unknown_where_nobody_says() -> None:
    [one] = analyzed(make_job({0: "cAAA", 3: "ccAA"})).instances
    assert one.ranks_missing is None


def test_a_rank_given_twice_counts_once() -> None:
    traces = make_job({0: "cAAA", 1: "ccAA"}, world_size=2)
    job = analyzed([*traces, make_trace("cccc", rank=1)])
    assert job.ranks == [0, 1]
    assert codes(job)["rank_twice"] == 1
    assert len(job.instances) == 1


@pytest.mark.slow
def test_of_two_recordings_only_one_is_compared_though_it_lacks_a_rank() -> None:
    first = simulate(Job(layout=Layout(data=4), steps=4, seed=1)).traces()
    second = [
        replace(
            trace,
            file=f"iteration_20/{trace.file}",
            steps=tuple(msgspec.structs.replace(step, number=step.number + 10) for step in trace.steps),
            wall_offset_ns=30_000_000_000 + (trace.wall_offset_ns or 0),
        )
        for trace in simulate(Job(layout=Layout(data=4), steps=4, seed=2)).traces()
    ]
    alone = analyzed([first[0], first[1], first[3]])
    both = analyzed([first[0], first[1], first[3], *second])
    assert both.ranks == alone.ranks == [0, 1, 3]
    assert both.wall_ns == alone.wall_ns
    assert {"rank_twice", "other_recording"} <= set(codes(both))
    (warning,) = (warning for warning in both.warnings if warning.code == "other_recording")
    assert warning.message.startswith("iteration_20/")
    assert "other_recording" not in codes(analyzed([*first, *second]))


def test_the_ranks_of_a_larger_run_in_the_same_folder_are_not_compared_with_the_smaller_one() -> None:
    small = make_job({0: "cAAA", 1: "ccAA"}, world_size=2)
    large = make_job({0: "cAAA", 1: "ccAA", 2: "ccAA", 3: "cAAA"}, world_size=4)
    job = analyzed([*small, *large])
    assert (job.ranks, job.world_size) == ([0, 1], 2)
    assert codes(job)["other_recording"] == 1


def test_a_trace_without_a_rank_is_left_out() -> None:
    traces = make_job({0: "cAAA", 1: "ccAA"}, world_size=2)
    job = analyzed([*traces, replace(traces[0], rank=None)])
    assert job.ranks == [0, 1]
    assert "rank_unknown" in codes(job)


def test_world_sizes_that_disagree_are_said_and_the_most_frequent_taken() -> None:
    job = analyzed(make_job({0: "cA", 1: "cA", 2: "cA"}, world_size={0: 4, 1: 4, 2: 3}))
    assert job.world_size == 4
    assert "world_size_differs" in codes(job)


def test_a_rank_beyond_the_world_is_said() -> None:
    assert codes(analyzed(make_job({0: "cA", 7: "cA"}, world_size=2)))["rank_beyond_world"] == 1


@pytest.mark.parametrize("drawing", ["", "cc", "..", "cAA"])
def test_one_rank_or_no_collectives_are_no_error(drawing: str) -> None:
    job = analyzed(make_job({0: drawing}))
    assert job.instances == []
    assert job.stragglers == []
    assert [share.wait_ns for share in job.shares] == [0]


def test_no_traces_are_no_error() -> None:
    job = analyze_job([], [])
    assert (job.ranks, job.shares, job.what_if) == ([], [], [])


def test_a_rank_without_any_collective_does_not_spoil_the_others() -> None:
    job = analyzed(make_job({0: "cAAA", 1: "ccAA", 2: "cccc"}, world_size=3))
    assert [share.wait_ns // BEAT_NS for share in job.shares] == [1, 0, 0]
    assert job.instances[0].ranks_missing == 1


def test_counts_that_differ_are_said() -> None:
    traces = make_job(play("ABG", [[1, 2, 1], [2, 1, 3]]))
    keep = np.ones(len(traces[1].device.start_ns), dtype=np.bool_)
    keep[collective_places(traces[1])[-1]] = False
    job = analyzed([traces[0], keep_rows(traces[1], keep)])
    assert codes(job)["unmatched_collectives"] == 1
    assert len(job.instances) == 2


def test_only_collectives_inside_the_window_count() -> None:
    traces = make_job({0: "cAAA..ccAAA", 1: "ccAA..cccAA"}, steps=[(5, 12)])
    job = analyze_job(traces, [analyze_trace(trace, window="steps") for trace in traces])
    assert len(job.instances) == 1


@pytest.fixture(scope="module")
def dlrm() -> list[Trace]:
    first = trace_file(DLRM)
    return [read_trace(path) for path in sorted(first.parent.iterdir())]


@pytest.mark.slow
def test_dlrm_who_came_last_and_by_how_much(dlrm: list[Trace]) -> None:
    job = analyzed(dlrm)
    assert job.ranks == list(range(8))
    assert [one.operation for one in job.instances] == [
        "all_to_all", "all_to_all", "all_to_all", "all_to_all", "all_reduce", "all_to_all", "all_reduce", "all_reduce",
    ]  # fmt: skip
    assert [one.late_rank for one in job.instances] == [7, 7, 7, 7, 7, 5, 5, 4]
    # No trace names its host, so each rank's clock is its own, and corrected by a microsecond or so.
    skews = [7624, 1101, 168, 125, 223, 534, 584, 885]
    assert [one.skew_ns / 1000 for one in job.instances] == pytest.approx(skews, abs=2.5)
    assert all((one.ranks, one.ranks_missing) == (8, 0) for one in job.instances)
    assert codes(job) == {"groups_assumed_global": 8}


def test_dlrm_sizes_are_on_every_rank(dlrm: list[Trace]) -> None:
    """The fourth all_to_all has another size on each rank that holds more of the tables."""
    for trace in dlrm:
        metas = [trace.collectives[index] for index in trace.device.collective[collective_places(trace)].tolist()]
        exchanged = [meta.bytes for meta in metas if meta.operation == "all_to_all"]
        assert exchanged[:3] + exchanged[4:] == [24576, 192, 1536, 24576]
        assert exchanged[3] is not None
        assert exchanged[3] >= 13568
        assert [meta.bytes for meta in metas if meta.operation == "all_reduce"] == [1576964, 448, 907840]


@pytest.mark.slow
def test_dlrm_the_wire_carries_what_the_whole_durations_hide(dlrm: list[Trace]) -> None:
    job = analyzed(dlrm)
    large = [one for one in job.instances if one.operation == "all_reduce" and (one.bytes or 0) > 500_000]
    assert [one.wire_ns for one in large] == pytest.approx([86_000, 67_000], abs=2_000)
    for one in large:
        assert one.bus_bandwidth == pytest.approx((one.bytes or 0) * 1e9 / one.wire_ns * 2 * 7 / 8)
        assert 20e9 < one.bus_bandwidth < 150e9  # NVLink 2 of a V100 carries 150 GB/s, and no ring of 1 MB fills it
    for total in job.collectives:
        assert (total.wait_ns or 0) + (total.wire_ns or 0) == total.duration_ns


@pytest.mark.slow
def test_dlrm_the_rank_that_communicates_least_is_the_one_waited_for(dlrm: list[Trace]) -> None:
    """It is the last because its profiler began later, in one step: that says nothing of it, and nobody is named."""
    job = analyzed(dlrm)
    least = min(job.shares, key=lambda share: share.communication_ns)
    assert max(job.shares, key=lambda share: share.caused_wait_ns).rank == least.rank == 7
    assert job.stragglers == []


@pytest.mark.slow
def test_dlrm_the_critical_path_adds_up(dlrm: list[Trace]) -> None:
    job = analyzed(dlrm)
    assert sum(part.duration_ns for part in job.critical_path) == job.wall_ns
    assert job.replay_error_ratio == pytest.approx(0, abs=0.005)


@pytest.mark.slow
def test_dlrm_any_order_and_any_subset(dlrm: list[Trace]) -> None:
    assert msgspec.json.encode(analyzed(dlrm[::-1])) == msgspec.json.encode(analyzed(dlrm))
    some = analyzed([dlrm[2], dlrm[5]])
    assert [one.late_rank for one in some.instances] == [2, 2, 2, 2, 5, 5, 5, 5]
    assert codes(some)["ranks_missing"] == 8
    assert all(one.ranks_missing == 6 for one in some.instances)
