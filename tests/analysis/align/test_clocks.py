"""Clocks of several hosts are laid on each other within the residual that is stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.analysis.align.collective_matching import match
from pacecar.analysis.align.host_clocks import Clocks, align_clocks, doubts_of, together
from pacecar.analysis.trace.columns import DeviceRows, Trace
from tests.analysis.jobs import make_job, play

EPOCH_NS = 1_700_000_000_000_000_000


def laid(traces: Sequence[Trace]) -> Clocks:
    return align_clocks(traces, match(traces, len(traces)).groups)


def codes(clocks: Clocks) -> list[str]:
    return [warning.code for warning in clocks.warnings]


def drifted(trace: Trace, parts_per_million: float, origin_ns: int) -> Trace:
    """Return `trace` as a clock that runs faster by so much writes it."""
    rows = {column: getattr(trace.device, column) for column in DeviceRows.__dataclass_fields__}
    for column in ("start_ns", "end_ns"):
        rows[column] = rows[column] + ((rows[column] - origin_ns) * parts_per_million // 1_000_000).astype(np.int64)
    return replace(trace, device=DeviceRows(**rows))


def jittered(trace: Trace, jitter_ns: int, seed: int) -> Trace:
    """Return `trace` with collectives that end up to so much later."""
    rows = {column: getattr(trace.device, column) for column in DeviceRows.__dataclass_fields__}
    noise = np.random.default_rng(seed).integers(0, jitter_ns + 1, len(rows["end_ns"]))
    rows["end_ns"] = rows["end_ns"] + np.where(rows["collective"] >= 0, noise, 0)
    return replace(trace, device=DeviceRows(**rows))


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[Trace], dict[int, int], int]:
    """Return the traces of a job on several hosts, what each clock shows at zero, and how late ends are at most."""
    ranks = draw(st.integers(2, 5))
    host = {rank: f"host{draw(st.integers(0, 2))}" for rank in range(ranks)}
    shows = {name: draw(st.integers(-(10**9), 10**9)) for name in sorted(set(host.values()))}
    clocks = {rank: shows[host[rank]] for rank in range(ranks)}
    word = draw(st.text("AGRT", min_size=2, max_size=8))
    works = [[draw(st.integers(1, 5)) for _ in word] for _ in range(ranks)]
    traces = make_job(
        play(word, works), clock_ns=clocks, host=host, has_sequence=True, group="0", ranks=tuple(range(ranks))
    )
    jitter = draw(st.integers(0, 300_000))
    return [jittered(trace, jitter, rank) for rank, trace in enumerate(traces)], clocks, jitter


@pytest.mark.slow
@given(hosts())
def test_offsets_are_recovered_as_well_as_ends_agree(job: tuple[list[Trace], dict[int, int], int]) -> None:
    """The stated error is a standard error and not a bound; how often it holds is tested in `tests/analysis/graph`."""
    traces, truth, jitter = job
    clocks = laid(traces)
    for rank, clock in enumerate(clocks.clocks):
        assert clock.residual_ns is not None
        assert clock.standard_error_ns is not None
        assert abs(clock.offset_ns - (truth[0] - truth[rank])) <= jitter + clock.residual_ns
        assert clock.method == ("same_host" if traces[rank].host == traces[0].host else "collectives")


@pytest.mark.slow
@given(hosts())
def test_ends_that_jitter_a_little_leave_waits_right_by_as_little(
    job: tuple[list[Trace], dict[int, int], int],
) -> None:
    traces, truth, _ = job
    for rank, clock in enumerate(laid(traces).clocks):
        assert abs(clock.offset_ns - (truth[0] - truth[rank])) <= 600_000


@pytest.mark.slow
@settings(max_examples=40)
@given(st.integers(-(10**9), 10**9), st.floats(-100, 100), st.integers(5, 60), st.integers(0, 2**32))
def test_ends_of_clocks_that_drift_are_brought_together(
    shows_ns: int, parts_per_million: float, count: int, seed: int
) -> None:
    works = np.random.default_rng(seed).integers(1, 9, (2, count)).tolist()
    meta = {"has_sequence": True, "group": "0", "ranks": (0, 1), "host": {0: "a", 1: "b"}}
    traces = make_job(play("A" * count, works), clock_ns={0: 0, 1: shows_ns}, **meta)
    traces[1] = drifted(traces[1], parts_per_million, shows_ns)
    clocks = laid(traces)
    first, second = (
        clocks.common(place, trace.device.end_ns[trace.device.collective >= 0]) for place, trace in enumerate(traces)
    )
    assert np.abs(first - second).max() <= 3_000


def test_bases_of_the_files_are_added() -> None:
    """Files of torch >= 2.3 count from a base of their own."""
    base = {0: EPOCH_NS, 1: EPOCH_NS - 50_000_000}
    traces = make_job({0: "cAAA", 1: "ccAA"}, clock_ns={0: 0, 1: 50_000_000}, wall_offset_ns=base, host="a")
    clocks = laid(traces)
    assert [clock.offset_ns for clock in clocks.clocks] == [0, -50_000_000]
    assert [clock.method for clock in clocks.clocks] == ["same_host", "same_host"]


def test_unnamed_hosts_whose_clocks_agree_are_two_clocks_all_the_same() -> None:
    """That clocks agree does not say that they are one: NTP may hold two within microseconds."""
    clocks = laid(make_job(play("AAA", [[1, 5, 2], [2, 1, 3]])))
    assert [(clock.method, clock.offset_ns) for clock in clocks.clocks] == [("same_host", 0), ("collectives", 0)]


def test_one_host_named_by_both_is_one_clock_without_error() -> None:
    clocks = laid(make_job(play("AAA", [[1, 5, 2], [2, 1, 3]]), host="a"))
    assert [(clock.method, clock.standard_error_ns) for clock in clocks.clocks] == [("same_host", 0)] * 2


def test_pairs_that_cannot_be_told_are_listed() -> None:
    [pair] = laid(make_job({0: "cXXX", 1: "ccXX"}, host={0: "a", 1: "b"})).pairs
    assert (pair.ranks, pair.hosts, pair.standard_error_ns) == ([0, 1], ["a", "b"], None)


def test_a_clock_that_jumps_is_named() -> None:
    traces = make_job(play("A" * 20, [[1] * 20, [2] * 20]), host={0: "a", 1: "b"}, has_sequence=True, group="0")
    rows = {column: getattr(traces[1].device, column) for column in DeviceRows.__dataclass_fields__}
    for column in ("start_ns", "end_ns"):
        rows[column] = rows[column] + np.where(np.arange(len(rows[column])) >= 20, 400_000, 0)
    assert "clock_jumps" in codes(laid([traces[0], replace(traces[1], device=DeviceRows(**rows))]))


def test_unnamed_hosts_whose_clocks_disagree_are_laid_together() -> None:
    traces = make_job(
        play("AAA", [[1, 5, 2], [2, 1, 3]]), clock_ns={0: 0, 1: 10**8}, has_sequence=True, group="0", ranks=(0, 1)
    )
    clock = laid(traces).clocks[1]
    assert (clock.method, clock.offset_ns) == ("collectives", -(10**8))


def test_hosts_of_different_names_have_no_common_clock_even_if_they_agree() -> None:
    clocks = laid(make_job({0: "cAAA", 1: "ccAA"}, host={0: "a", 1: "b"}))
    assert [clock.method for clock in clocks.clocks] == ["same_host", "collectives"]


def test_a_host_that_is_not_one_is_said() -> None:
    traces = make_job(
        play("AA", [[1, 2], [2, 1]]), clock_ns={0: 0, 1: 10**8}, host="a", has_sequence=True, group="0", ranks=(0, 1)
    )
    clocks = laid(traces)
    assert codes(clocks) == ["host_clocks_differ"]
    assert clocks.clocks[1].residual_ns is not None
    assert clocks.clocks[1].residual_ns >= 10**8 - 10_000_000


def test_a_broadcast_binds_nothing() -> None:
    clocks = laid(make_job({0: "cXXX", 1: "ccXX"}, host={0: "a", 1: "b"}))
    assert [clock.method for clock in clocks.clocks] == ["same_host", "none"]
    assert clocks.clocks[1].residual_ns is None
    assert codes(clocks) == ["clocks_not_aligned"]


def test_the_wall_clock_is_the_last_resort() -> None:
    clocks = laid(make_job({0: "cXXX", 1: "ccXX"}, host={0: "a", 1: "b"}, clock_ns=EPOCH_NS))
    assert [clock.method for clock in clocks.clocks] == ["same_host", "wall_clock"]


def test_clocks_are_laid_by_way_of_others() -> None:
    """Ranks 0 and 2 share no group; both share one with rank 1."""
    shows = {0: 0, 1: 10**9, 2: -(10**9)}
    lanes = {0: "cAAA........", 1: "ccAA...cBBBB", 2: ".......cccBB"}
    traces = make_job(lanes, clock_ns=shows, host={0: "a", 1: "b", 2: "c"})
    named = [
        replace(
            trace,
            collectives=tuple(
                msgspec.structs.replace(meta, group=str(meta.bytes), sequence=1) for meta in trace.collectives
            ),
        )
        for trace in traces
    ]
    clocks = laid(named)
    assert [clock.offset_ns for clock in clocks.clocks] == [0, -(10**9), 10**9]
    near, far = (clock.residual_ns for clock in clocks.clocks[1:])
    assert near is not None
    assert far is not None
    assert far > near  # what each way leaves unexplained adds up


def test_ranks_that_nothing_ties_to_the_first_are_still_laid_on_each_other() -> None:
    """Pipeline stages exchange only sends: each stage's own group is an island."""
    pairs = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}
    shows = {0: 0, 1: 0, 2: 10**9, 3: 3 * 10**9}
    traces = make_job(
        play("AA", [[1, 2], [2, 1], [4, 1], [1, 1]]),
        group="tp", ranks=pairs, has_sequence=True, clock_ns=shows, host={0: "a", 1: "a", 2: "b", 3: "c"},
    )  # fmt: skip
    groups = match(traces, 4).groups
    clocks = align_clocks(traces, groups)
    assert clocks.island[0] == clocks.island[1] != clocks.island[2] == clocks.island[3]
    assert clocks.offsets_ns[3] - clocks.offsets_ns[2] == -2 * 10**9
    assert codes(clocks) == ["clocks_not_aligned"]
    assert all(doubts_of(group, clocks).max() < 10**7 for group in groups)


def test_pairs_that_were_not_in_it_together_are_told() -> None:
    traces = make_job({0: "cAA......", 1: "c......AA"})
    traces = [replace(trace, collectives=trace.collectives) for trace in traces]
    matching = match(traces, 2)
    for group in matching.groups:
        assert not together(group, align_clocks(traces, [])).any()
