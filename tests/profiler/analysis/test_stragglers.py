"""Who is late and why: the rank whose ledger before the collective exceeds the others', by the heading that does."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.profiler.analysis.report import TraceJob
from pacecar.profiler.analysis.stragglers import LATE_NS_MIN
from tests.profiler.analysis.jobs import BEAT_NS, make_job, play
from tests.profiler.analysis.test_ranks import analyzed

HEADINGS = {
    "c": ("compute", "compute"),
    "m": ("exposed_copy", "exposed copy"),
    "d": ("data_wait", "data wait"),
    "o": ("optimizer_host", "optimizer on host"),
    "k": ("checkpoint", "checkpoint"),
    ".": ("host_bound", "host-bound"),
}


def late_by(letter: str, beats: int, *, times: int = 4, ranks: int = 3, late: int = 1) -> TraceJob:
    """Return a job in which one rank does `letter` for so long before each collective, after one that none is late to.

    All have a host row outside of everything, so that idle time has a cause.
    """
    drawings = {}
    for rank in range(ranks):
        mine = "ccAAAA"
        for index in range(times):
            name = "BA"[index % 2]
            own = f"cc{letter * beats}" if rank == late else "cc"
            mine += own + name * (beats + 4 - len(own) + 2)
        drawings[rank] = (mine, "o")
    return analyzed(make_job(drawings, world_size=ranks))


@pytest.mark.parametrize("letter", HEADINGS)
def test_the_cause_is_what_only_the_late_rank_did(letter: str) -> None:
    cause, words = HEADINGS[letter]
    [straggler] = late_by(letter, 5).stragglers
    assert (straggler.rank, straggler.cause) == (1, cause)
    assert straggler.excess_ns == 4 * 5 * BEAT_NS
    assert straggler.late_count == 4
    assert straggler.caused_wait_ns == 4 * 2 * 5 * BEAT_NS
    assert f"20.000 ms more {words}" in straggler.evidence


@pytest.mark.parametrize("letter", HEADINGS)
def test_evidence_has_words_of_people(letter: str) -> None:
    [straggler] = late_by(letter, 5).stragglers
    assert "_" not in straggler.evidence


@pytest.mark.slow
@given(st.integers(2, 5), st.data())
def test_the_rank_that_is_made_late_is_found(ranks: int, data: st.DataObject) -> None:
    late = data.draw(st.integers(0, ranks - 1))
    job = late_by("c", data.draw(st.integers(1, 9)), ranks=ranks, late=late)
    assert [straggler.rank for straggler in job.stragglers] == [late]
    assert all(one.late_rank == late for one in job.instances[1:])


def test_always_the_same_rank_and_now_this_now_that_are_told_apart() -> None:
    always = analyzed(make_job(play("AAAAAA", [[1] * 6, [4] * 6, [1] * 6])))
    assert [straggler.rank for straggler in always.stragglers] == [1]
    assert "late again and again" in always.stragglers[0].evidence
    turns = analyzed(make_job(play("AAAAAA", [[4, 1, 1, 4, 1, 1], [1, 4, 1, 1, 4, 1], [1, 1, 4, 1, 1, 4]])))
    assert [straggler.rank for straggler in turns.stragglers] == [0, 1, 2]
    assert all("in turn with others" in straggler.evidence for straggler in turns.stragglers)


def test_more_kernels_are_more_work_and_as_many_are_slower_work() -> None:
    lanes = {0: "cAAAAAA", 1: "cAAAAAA", 2: "cAAAAAA"}
    slower = make_job({**lanes, 1: "ccccAAA"})
    more = make_job({**lanes, 1: ("c.c.AAA", ".c.c...")})
    assert "the same work took longer, 1 kernels against 1" in analyzed(slower).stragglers[0].evidence
    assert "it had more to do, 4 kernels against 1" in analyzed(more).stragglers[0].evidence


def test_less_than_ranks_scatter_is_nobodys_fault() -> None:
    below, above = LATE_NS_MIN // 4, LATE_NS_MIN
    drawings = play("AAAA", [[1] * 4, [4] * 4, [1] * 4])  # three beats late
    assert analyzed(make_job(drawings, beat_ns=below)).stragglers == []
    assert [one.rank for one in analyzed(make_job(drawings, beat_ns=above)).stragglers] == [1]


def test_a_trace_that_begins_later_says_nothing_of_the_work() -> None:
    """All do the same before the collective; rank 2's profiler began eight beats after the others'."""
    traces = make_job({0: "cAAAAAAAAAA", 1: "cAAAAAAAAAA", 2: "........cAA"})
    traces[2] = replace(traces[2], start_ns=8 * BEAT_NS)
    [straggler] = analyzed(traces).stragglers
    assert (straggler.rank, straggler.cause) == (2, "unknown")
    assert "8.000 of the 8.000 ms are older than the traces" in straggler.evidence


def test_what_another_collective_handed_on_is_exposed_communication() -> None:
    """Rank 2 is late to the second only because rank 3 kept it in a collective of the two."""
    every = {0: "cAAc.BBBBBBBB", 1: "cAAc.BBBBBBBB", 2: "cAAGGGGGGGcBB", 3: "cAAcccccGGcBB"}
    traces = make_job(every, has_sequence=True)
    named = []
    for trace in traces:
        metas = []
        for meta in trace.collectives:
            pair = meta.operation == "all_gather"
            group, ranks = ("pair", (2, 3)) if pair else ("world", (0, 1, 2, 3))
            number = 0 if pair or meta.bytes == 4_000_000 else 1
            metas.append(msgspec.structs.replace(meta, group=group, ranks=ranks, sequence=number))
        named.append(replace(trace, collectives=tuple(metas)))
    job = analyzed(named)
    assert {straggler.rank: straggler.cause for straggler in job.stragglers}[2] == "exposed_communication"
    assert {straggler.rank: straggler.cause for straggler in job.stragglers}[3] == "compute"


def test_clocks_that_nothing_ties_blame_nobody() -> None:
    traces = make_job(play("XXX", [[1] * 3, [5] * 3]), host={0: "a", 1: "b"}, group="g", ranks=(0, 1))
    job = analyzed(traces)
    assert len(job.instances) == 3
    assert job.stragglers == []
    assert "clocks_not_aligned" in {warning.code for warning in job.warnings}
