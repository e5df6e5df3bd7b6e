"""How an order goes round 1024 simulated ranks, some of which are stopped: messages, bytes, and deadlines that pass."""

from __future__ import annotations

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.profiler.hangs.account_road import FRAME_BYTES_MAX, Silence
from pacecar.profiler.orders.passing_on import MEMBER_SECONDS, RELAY_SECONDS, STATE_SECONDS, OrderPassing
from pacecar.profiler.ranks.exchange.subgroups import subgroup_of
from pacecar.profiler.transport.record_queue import LOOK_SECONDS
from pacecar.records.hangs import ProcessState
from pacecar.records.job_orders import RankReply
from tests.profiler.orders.simulated_ranks import NOW_NS, ORDER, SimulatedJob


def test_of_1024_ranks_each_has_few_conversations_and_all_reply():
    job = SimulatedJob(1024)
    replies = job.passing(0).to_all(ORDER)
    assert [reply.rank for reply in replies] == list(range(1024))
    assert {reply.state for reply in replies} == {"done"}
    assert max(job.asked.values()) == job.asked[0] == 64 + 15
    assert sum(job.asked.values()) == 64 + 1024 - 64
    assert job.seconds == 0.0
    assert job.bytes < 2 * 1024 * 256, "each reply crosses twice, its relay's once"
    assert job.largest < 16 * 256 < FRAME_BYTES_MAX


def test_64_ranks_are_asked_directly():
    job = SimulatedJob(64, frozenset({9}))
    states = [reply.state for reply in job.passing(3).to_all(ORDER)]
    assert [rank for rank, state in enumerate(states) if state == "silent"] == [9]
    assert job.asked == {3: 63}


@pytest.mark.parametrize("asker", [5, 17, 1023])
def test_stopped_ranks_cost_their_deadline_once_and_no_other_rank_its_reply(asker):
    """Relays (16, 512), a whole node, and the last rank of a subgroup."""
    stopped = frozenset({16, 512, *range(808, 816), 31 + 16})
    replies = SimulatedJob(1024, stopped).passing(asker).to_all(ORDER)
    assert [reply.rank for reply in replies] == list(range(1024))
    assert {reply.rank for reply in replies if reply.state == "silent"} == stopped
    (words,) = {reply.detail for reply in replies if reply.rank == 810}
    assert words.endswith("process 811 is stopped by a signal")
    assert {reply.silent_ns for reply in replies if reply.state == "silent"} == {7 * NS_PER_SECOND}


def test_the_asker_is_the_relay_of_its_own_subgroup():
    replies = SimulatedJob(1024, frozenset({16, 31})).passing(17).to_all(ORDER)
    assert [reply.rank for reply in replies if reply.state == "silent"] == [16, 31]


def test_an_order_is_round_within_two_deadlines_of_a_relay_whoever_is_stopped():
    job = SimulatedJob(1024, frozenset(range(1, 1024)))
    replies = job.passing(0).to_all(ORDER)
    assert len(replies) == 1024
    assert job.seconds == pytest.approx(2 * RELAY_SECONDS)
    assert MEMBER_SECONDS + STATE_SECONDS < RELAY_SECONDS, "a relay answers in time if all its ranks are silent"
    assert 2 * RELAY_SECONDS + LOOK_SECONDS < 2.0, "from the daemon's command on"
    unasked = [reply for reply in replies if reply.detail.startswith("not asked")]
    assert len(unasked) == 1024 - 16
    assert unasked[0].detail == "not asked: neither rank 16 nor rank 31 answers, which would have passed it on"


def test_ranks_that_have_left_are_told_from_those_that_ended():
    job = SimulatedJob(3)
    answers = {1: Silence("nothing listens there any more", refused=True), 2: Silence("nothing", refused=True)}
    job.processes = lambda silent, heard, seconds: {
        1: ProcessState(pid=5, state="R"), 2: ProcessState(pid=6, exists=False, ended_by=9)
    }  # fmt: skip
    passing = OrderPassing(
        job, 0, 3, subgroup_of(0, 3), lambda _: RankReply(rank=0), lambda: NOW_NS, ask=lambda *_, **__: answers
    )
    assert [reply.detail for reply in passing.to_all(ORDER)[1:]] == [
        "it has left: pacecar is closed there", "process 6 was ended by SIGKILL",
    ]  # fmt: skip
