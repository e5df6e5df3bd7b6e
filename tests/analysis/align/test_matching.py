"""Collectives of several traces are paired with themselves or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.analysis.align.collective_matching import Matched, events_of, match
from pacecar.analysis.align.sequence_alignment import CallSequence, align
from pacecar.analysis.trace.columns import NONE, CollectiveColumns, Trace, TraceWarning
from tests.analysis.jobs import collective_places, keep_rows, make_job, make_trace, play


@st.composite
def jobs(draw: st.DrawFn, letters: str = "ABGRT", ranks_max: int = 4) -> dict[int, str]:
    ranks = draw(st.integers(2, ranks_max))
    word = draw(st.text(letters, min_size=3, max_size=12))
    works = [[draw(st.integers(1, 6)) for _ in word] for _ in range(ranks)]
    return play(word, works)


def without(trace: Trace, lost: Sequence[int]) -> Trace:
    """Return `trace` without the collectives at these places of their order."""
    keep = np.ones(len(trace.device.start_ns), dtype=np.bool_)
    places = collective_places(trace)
    keep[[places[at] for at in lost if -len(places) <= at < len(places)]] = False
    return keep_rows(trace, keep)


def bearing(trace: Trace, *collectives: CollectiveColumns) -> Trace:
    return replace(trace, collectives=collectives)


def assert_true_pairs(groups: Sequence[Matched], clocks: dict[int, int]) -> None:
    """In drawn jobs all leave a collective together: equal ends on the true clock are one collective."""
    for group in groups:
        ends = group.end_ns - np.array([clocks[place] for place in group.traces])
        for line, has in zip(ends, group.has, strict=True):
            assert len(set(line[has].tolist())) == 1


def codes(warnings: Sequence[TraceWarning]) -> dict[str, int]:
    return {warning.code: warning.count for warning in warnings}


@pytest.mark.slow
@given(jobs())
def test_whole_traces_match_completely(drawings: dict[int, str]) -> None:
    traces = make_job(drawings)
    [group] = (matching := match(traces, len(traces))).groups
    assert group.has.all()
    assert len(group.collectives) == len(collective_places(traces[0]))
    assert_true_pairs([group], dict.fromkeys(range(len(traces)), 0))
    assert codes(matching.warnings) == {"groups_assumed_global": len(group.collectives)}


@pytest.mark.slow
@given(jobs(), st.data())
def test_traces_may_begin_and_end_at_different_collectives(drawings: dict[int, str], data: st.DataObject) -> None:
    traces = make_job(drawings)
    count = len(collective_places(traces[0]))
    for place in range(len(traces)):
        head, tail = data.draw(st.integers(0, count // 3)), data.draw(st.integers(0, count // 3))
        traces[place] = without(traces[place], [*range(head), *range(count - tail, count)])
    assert_true_pairs(match(traces, None).groups, dict.fromkeys(range(len(traces)), 0))


@pytest.mark.slow
@given(jobs(), st.data())
def test_lost_rows_leave_only_true_pairs(drawings: dict[int, str], data: st.DataObject) -> None:
    traces = make_job(drawings)
    lost = data.draw(st.integers(0, len(collective_places(traces[1])) - 1))
    traces[1] = without(traces[1], [lost])
    assert_true_pairs(match(traces, None).groups, dict.fromkeys(range(len(traces)), 0))


@pytest.mark.slow
@given(jobs(), st.data())
def test_sequence_numbers_pair_whatever_the_clocks_and_the_losses(
    drawings: dict[int, str], data: st.DataObject
) -> None:
    clocks = {rank: data.draw(st.integers(-(10**12), 10**12)) for rank in drawings}
    ranks = tuple(drawings)
    traces = make_job(drawings, clock_ns=clocks, has_sequence=True, group="0", ranks=ranks)
    count = len(collective_places(traces[0]))
    lost = [data.draw(st.sets(st.integers(0, count - 1), max_size=count // 2)) for _ in traces]
    traces = [without(trace, sorted(mine)) for trace, mine in zip(traces, lost, strict=True)]
    groups = match(traces, None).groups
    assert_true_pairs(groups, clocks)
    seen = [sum(at not in mine for mine in lost) for at in range(count)]
    assert sum(len(group.collectives) for group in groups) == sum(times >= 2 for times in seen)
    assert sum(int(group.has.sum()) for group in groups) == sum(times for times in seen if times >= 2)


@pytest.mark.slow
@settings(max_examples=30)
@given(jobs(letters="ABGRT", ranks_max=3), st.integers(-(10**9), 10**9))
def test_operation_and_size_never_mix(drawings: dict[int, str], clock_ns: int) -> None:
    traces = make_job(drawings, clock_ns={rank: clock_ns * (rank == 1) for rank in drawings})
    traces[1] = without(traces[1], [0])
    matching = match(traces, None)
    for group in matching.groups:
        for at in range(len(group.collectives)):
            seen = {
                (meta.operation, meta.bytes)
                for column, place in enumerate(group.traces)
                if group.has[at, column]
                for meta in [matching.events[place].collectives[matching.events[place].meta[group.rows[at, column]]]]
            }
            assert len(seen) == 1


def test_what_repeats_is_laid_by_the_clock() -> None:
    drawings = play("ABABABAB", [[1, 2, 1, 3, 1, 2, 1, 2], [2, 1, 2, 1, 3, 1, 2, 1]])
    traces = make_job(drawings)
    traces[1] = without(traces[1], [0, 1])
    [group] = match(traces, 2).groups
    assert group.has.sum(axis=1).tolist() == [2] * 6
    assert_true_pairs([group], {0: 0, 1: 0})


def test_what_repeats_on_two_clocks_is_laid_by_even_ends() -> None:
    works = [[3, 9, 4, 1, 7, 2, 8, 5, 6, 2], [1] * 10]
    clocks = {0: 0, 1: 700_000_000}
    traces = make_job(play("A" * 10, works), clock_ns=clocks)
    traces[1] = without(traces[1], [0, 1])
    [group] = match(traces, 2).groups
    assert len(group.collectives) == 8
    assert_true_pairs([group], clocks)


def test_clocks_apart_by_two_messages_do_not_pair_each_with_the_second_next() -> None:
    """As in a pipeline: eight messages a step, 2.93 ms apart, and a clock that is 5.8 ms ahead."""
    ends = (np.arange(6)[:, None] * 100_000_000 + np.arange(8) * 2_930_000).ravel()
    jitter = np.random.default_rng(0).integers(0, 2_000, len(ends))
    none, same = np.full(len(ends), NONE), np.zeros(len(ends), dtype=np.int64)
    step = np.repeat(np.arange(6), 8)
    sender = CallSequence(ends - 2_900_000, ends + jitter, same, same, none, step, np.arange(len(ends)))
    ahead = ends + 5_800_000
    receiver = CallSequence(ahead - 500_000, ahead, same, same, none, step, np.arange(len(ends)))
    found = align(sender, receiver)
    assert found.partner.tolist() == list(range(len(ends)))
    assert not found.is_ambiguous


def test_steps_tell_collectives_apart() -> None:
    marks = {0: [(0, 6), (6, 12)], 1: [(0, 6), (6, 12)]}
    traces = make_job({0: "ccAAA.ccAAA.", 1: "cccAA.cccAA."}, steps=marks, clock_ns={0: 0, 1: 10**15})
    traces[1] = without(traces[1], [0])
    [group] = match(traces, 2).groups
    assert_true_pairs([group], {0: 0, 1: 10**15})
    assert len(group.collectives) == 1


def test_sends_and_receives_are_left_out_and_counted() -> None:
    matching = match(make_job({0: "cSScAA", 1: "cSScAA"}), 2)
    assert [[meta.operation for meta in group.collectives] for group in matching.groups] == [["all_reduce"]]
    assert codes(matching.warnings) == {"point_to_point_left_out": 2, "groups_assumed_global": 1}


def test_a_send_recv_kernel_and_an_all_to_all_are_one_collective() -> None:
    [group] = match(make_job({0: "cPPP", 1: "ccTT"}), 2).groups
    assert [meta.operation for meta in group.collectives] == ["all_to_all"]


def test_sizes_of_an_all_to_all_may_differ_and_are_averaged() -> None:
    traces = make_job({0: "cTTT", 1: "ccTT"})
    meta = msgspec.structs.replace(traces[1].collectives[0], bytes=3_000_000)
    traces[1] = bearing(traces[1], meta)
    [group] = match(traces, 2).groups
    assert group.collectives[0].bytes == 2_000_000


def test_groups_are_matched_each_by_itself() -> None:
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    drawings = play("AA", [[1, 2], [2, 1], [4, 1], [1, 1]])
    matching = match(make_job(drawings, group="tp", ranks=pairs), 4)
    assert sorted(group.traces for group in matching.groups) == [(0, 1), (2, 3)]
    assert all(group.size == 2 and not group.is_assumed for group in matching.groups)
    assert matching.warnings == []


def test_a_name_that_several_groups_bear_is_not_matched() -> None:
    traces = make_job(play("A", [[1]] * 4), group="tp")
    small = [
        bearing(trace, *(msgspec.structs.replace(meta, group_size=2) for meta in trace.collectives)) for trace in traces
    ]
    matching = match(small, 4)
    assert matching.groups == []
    assert codes(matching.warnings) == {"group_names_repeat": 4}


def test_a_group_of_which_one_trace_is_here_is_counted() -> None:
    matching = match(make_job({0: "cAA", 1: "cAA"}, group={0: "a", 1: "b"}), 2)
    assert matching.groups == []
    assert codes(matching.warnings) == {"groups_with_one_rank": 2}


def test_kernels_of_one_sequence_number_are_one_collective() -> None:
    trace = make_trace("cAAcAAcBB", rank=0, has_sequence=True)
    first, second, third = trace.collectives
    trace = bearing(trace, first, msgspec.structs.replace(second, sequence=first.sequence), third)
    events = events_of(trace)
    assert list(zip(events.start_ns.tolist(), events.end_ns.tolist(), strict=True)) == [
        (1_000_000, 6_000_000),
        (7_000_000, 9_000_000),
    ]


@pytest.mark.parametrize("drawing", ["", "cccc", "...."])
def test_no_collectives_match_nothing(drawing: str) -> None:
    matching = match(make_job({0: drawing, 1: drawing}), 2)
    assert matching.groups == []
    assert matching.warnings == []


def test_what_the_longest_trace_lacks_is_found_in_the_others() -> None:
    traces = make_job(play("ABGRTA", [[1, 3, 2, 1, 2, 2], [2, 1, 1, 3, 1, 1], [1, 1, 2, 2, 2, 1]]))
    traces = [without(traces[0], [0]), without(traces[1], [5]), without(traces[2], [5])]
    [group] = match(traces, 3).groups
    assert [meta.operation for meta in group.collectives] == [
        "all_reduce", "all_reduce", "all_gather", "reduce_scatter", "all_to_all",
    ]  # fmt: skip
    assert group.has.sum(axis=1).tolist() == [2, 3, 3, 3, 3]
    assert_true_pairs([group], dict.fromkeys(range(3), 0))
