"""Who holds the job up and why: the rank without whose excess the job is shorter, by the cause that makes it so.

These are drawn jobs; simulated ones with noise, and the real counterfactual, are in `tests/analysis/graph`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from pacecar.analysis.all_ranks.collective_arrivals import LATE_NS_MIN
from pacecar.analysis.document.report import TraceJob
from tests.analysis.jobs import BEAT_NS, make_job, play
from tests.analysis.models import analyzed

HEADINGS = {
    "c": ("compute", "compute"),
    "m": ("exposed_copy", "copies"),
    "d": ("data_wait", "data wait"),
    "o": ("optimizer_host", "optimizer on host"),
    "k": ("checkpoint", "checkpoint"),
}


def late_by(letter: str, beats: int, *, times: int = 10, ranks: int = 4, late: int = 1) -> TraceJob:
    """Return a job in which one rank does `letter` for so long before each collective.

    Ten collectives, because of fewer it could be chance.  All have a host row outside of everything, so that idle time
    has a cause.
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
    assert (straggler.rank, straggler.cause, straggler.kind, straggler.ranks) == (1, cause, "rank", [1])
    assert straggler.excess_ns == pytest.approx(10 * 5 * BEAT_NS, rel=1e-3)
    assert straggler.saved_ns == pytest.approx(10 * 5 * BEAT_NS, rel=1e-3)
    assert straggler.late_count == 10
    assert straggler.caused_wait_ns == 10 * 3 * 5 * BEAT_NS
    assert straggler.evidence.startswith(words)
    assert "_" not in straggler.evidence


def test_idle_time_that_no_launch_explains_names_nobody_and_does_not_claim_that_nobody_is_late() -> None:
    """Simulated jobs with launches name a slow host: `tests/analysis/graph`."""
    job = late_by(".", 5)
    assert job.stragglers == []
    assert "nobody_unproven" in {warning.code for warning in job.warnings}


@pytest.mark.parametrize("late", range(4))
def test_the_rank_that_is_made_late_is_found(late: int) -> None:
    job = late_by("c", 3, late=late)
    assert [straggler.rank for straggler in job.stragglers] == [late]
    assert all(one.late_rank == late for one in job.instances[1:])


@pytest.mark.slow
def test_ranks_that_are_late_in_turn_are_nobodys_fault() -> None:
    always = analyzed(make_job(play("A" * 12, [[1] * 12, [4] * 12, [1] * 12])))
    assert [straggler.rank for straggler in always.stragglers] == [1]
    turns = [[4 if index % 3 == rank else 1 for index in range(12)] for rank in range(3)]
    assert analyzed(make_job(play("A" * 12, turns))).stragglers == []


@pytest.mark.slow
def test_more_kernels_are_more_work_and_as_many_are_slower_work() -> None:
    slower = {rank: ("cccc" if rank == 1 else "c...").replace(".", "A") + "AA" for rank in range(3)}
    more = {rank: ("c.c.AA", ".c.c..") if rank == 1 else ("cAAAAA", "......") for rank in range(3)}
    one = analyzed(make_job({rank: lane * 12 for rank, lane in slower.items()})).stragglers[0]
    assert "it ran the same work slower: 12 kernels, its peers 12" in one.evidence
    one = analyzed(make_job({rank: tuple(lane * 12 for lane in lanes) for rank, lanes in more.items()})).stragglers[0]
    assert "it ran more: 48 kernels, its peers 12" in one.evidence


@pytest.mark.slow
def test_waits_below_what_ranks_scatter_are_counted_for_nobody() -> None:
    below, above = LATE_NS_MIN // 4, LATE_NS_MIN
    drawings = play("AAAA", [[1] * 4, [4] * 4, [1] * 4])  # three beats late
    for beat, expected in ((below, 0), (above, 4 * 2 * 3 * above)):
        shares = analyzed(make_job(drawings, beat_ns=beat, host="a")).shares
        assert shares[1].caused_wait_ns == expected


def test_a_trace_that_begins_later_says_nothing_of_the_work() -> None:
    """All do the same before the collective; rank 2's profiler began eight beats after the others'."""
    traces = make_job({0: "cAAAAAAAAAA", 1: "cAAAAAAAAAA", 2: "........cAA"})
    traces[2] = replace(traces[2], start_ns=8 * BEAT_NS)
    job = analyzed(traces)
    assert job.stragglers == []
    assert job.shares[2].caused_wait_ns == 16 * BEAT_NS
    [before, *_] = [part for part in job.critical_path if part.cause == "unknown"]
    assert (before.rank, before.duration_ns) == (2, 8 * BEAT_NS)


def test_who_was_held_up_by_another_is_not_to_blame() -> None:
    """Rank 2 is late to the collective of all only because rank 3 kept it in a collective of the two."""
    every = {0: "cAAc.BBBBBBBB", 1: "cAAc.BBBBBBBB", 2: "cAAGGGGGGGcBB", 3: "cAAcccccGGcBB"}
    traces = make_job({rank: lane * 10 for rank, lane in every.items()}, has_sequence=True)
    named = []
    for trace in traces:
        metas = []
        counts = {"pair": 0, "world": 0}
        for meta in trace.collectives:
            group = "pair" if meta.operation == "all_gather" else "world"
            ranks = (2, 3) if group == "pair" else (0, 1, 2, 3)
            metas.append(msgspec.structs.replace(meta, group=group, ranks=ranks, sequence=counts[group]))
            counts[group] += 1
        named.append(replace(trace, collectives=tuple(metas)))
    job = analyzed(named)
    assert [(straggler.rank, straggler.cause) for straggler in job.stragglers] == [(3, "compute")]
    assert job.shares[2].caused_wait_ns > 0


def test_clocks_that_nothing_ties_make_nobody_late() -> None:
    traces = make_job(play("XXX", [[1] * 3, [5] * 3]), host={0: "a", 1: "b"}, group="g", ranks=(0, 1))
    job = analyzed(traces)
    assert len(job.instances) == 3
    assert [share.caused_wait_ns for share in job.shares] == [0, 0]
    # How long a rank computes is told by its own clock.
    assert [(one.rank, one.cause, one.late_count) for one in job.stragglers] == [(1, "compute", 0)]
    assert "clocks_not_aligned" in {warning.code for warning in job.warnings}
