"""Late, hung and silent ranks of a job."""

import pytest

from pacecar.monitor.export.job_samples import job_samples
from pacecar.monitor.jobs.rank_health import SILENT_SECONDS, RankHealth, rank_health_samples
from pacecar.monitor.jobs.state import DaemonState
from pacecar.records import HangSuspicion, HangVerdict, Straggler
from pacecar.records.hangs import HangKind
from pacecar.records.job_identity import JobKey

S = 1_000_000_000
LONG = round(SILENT_SECONDS * S)


def suspicion(rank, *, ended=False, collectives=None):
    return HangSuspicion(
        job="j", rank=rank, step=7, phase="tail", wall_ns=0, silent_ns=1, last_collective=None, collectives=collectives,
        stack=None, ended=ended,
    )  # fmt: skip


@pytest.fixture
def crew():
    made = RankHealth()
    for rank in (0, 2):
        made.record(suspicion(rank), 10 * S)
    return made


def silent(crew, now_ns, **heard):
    return crew.view({int(rank[1:]): ns for rank, ns in heard.items()}, now_ns).silent


def test_the_rank_that_says_nothing_while_others_suspect_a_hang_is_told(crew):
    assert silent(crew, 10 * S + LONG - 1, r0=10 * S, r1=9 * S, r2=10 * S) == {0: False, 1: False, 2: False}
    assert silent(crew, 10 * S + LONG, r0=10 * S, r1=9 * S, r2=10 * S) == {0: False, 1: True, 2: False}


def test_who_suspects_a_hang_has_spoken_however_long_ago(crew):
    assert silent(crew, 500 * S, r0=10 * S, r2=10 * S) == {0: False, 2: False}


def test_who_still_reports_is_not_silent(crew):
    assert silent(crew, 500 * S, r1=500 * S - LONG + 1) == {1: False}


@pytest.mark.parametrize("how", ["it steps again", "it says goodbye"])
def test_nobody_is_silent_when_nobody_suspects_a_hang_any_more(crew, how):
    assert silent(RankHealth(), 500 * S, r1=0) == {}
    for rank in (0, 2):
        if how == "it steps again":
            crew.record(suspicion(rank, ended=True), 20 * S)
        else:
            crew.leave(rank)
    assert silent(crew, 500 * S, r1=0) == {}
    crew.record(suspicion(0), 600 * S)
    assert silent(crew, 601 * S, r1=0) == {1: False}, "a later hang is a new one"


def test_the_series_name_each_rank(crew):
    view = crew.view({0: 10 * S, 1: 9 * S}, 500 * S)
    found = {
        s.labels: s.value
        for s in rank_health_samples(JobKey("j", "3f" * 8), view)
        if s.metric == "pacecar_job_hang_silent"
    }
    assert found == {("j", "3f" * 8, "0"): 0, ("j", "3f" * 8, "1"): 1}


def test_collectives_are_told_of_the_ranks_that_suspect_a_hang_now_and_know_them():
    crew = RankHealth()
    for rank, collectives in ((0, 41), (1, 0), (2, None), (3, 42), (4, 43)):
        crew.record(suspicion(rank, collectives=collectives), 10 * S)
    crew.record(suspicion(3, ended=True, collectives=44), 11 * S)
    view = crew.view(dict.fromkeys(range(4), 10 * S), 12 * S)  # rank 4 is not connected any more
    assert view.collectives == {0: 41, 1: 0}
    told = [s for s in rank_health_samples(JobKey("j", ""), view) if s.metric == "pacecar_job_hang_collectives"]
    assert [(s.labels[2], s.value) for s in told] == [("0", 41), ("1", 0)]


def verdict(kind="not_joined", culprits=(1,), *, ended=False):
    return HangVerdict(
        job="run-7", rank=0, wall_ns=0, kind=HangKind(kind), culprits=culprits, waiting=(0,), waited_ns=1,
        summary="rank 1 never joined", ended=ended,
    )  # fmt: skip


def test_the_verdict_on_a_hang_is_told_until_the_job_goes_on_or_its_judge_leaves(board, make_hello):
    def said():
        samples = [s for s in job_samples(board.jobs()) if s.metric == "pacecar_job_hang_verdict"]
        return [(s.labels[2:], s.value) for s in samples]

    def tell(record):
        board.record(record, hello=make_hello(rank=0), uid=1, owner=0)

    assert said() == []
    tell(verdict(culprits=(1, 1)))
    assert said() == [(("1", "not_joined"), 1)]
    tell(verdict("unknown", ()))
    assert said() == [(("", "unknown"), 1)]
    tell(verdict(ended=True))
    assert said() == []
    tell(verdict())
    board.leave(make_hello(rank=0), 0)
    assert said() == []


def late(*, ended=False):
    return Straggler(
        job="run-7", late_rank=1, cause="host_bound", phase="backward", since_step=1, step=9, wall_ns=0, excess_ns=5,
        evidence="", ended=ended,
    )  # fmt: skip


@pytest.fixture
def board(clock, make_hello):
    """Two ranks; rank 0 says that rank 1 is late, and suspects a hang."""
    made = DaemonState(clock, jobs_max=2, ranks_max=4, job_forget_seconds=60)
    for rank in (0, 1):
        hello = make_hello(rank=rank)
        made.record(hello, hello=hello, uid=1, owner=rank)
    for record in (late(), suspicion(0)):
        made.record(record, hello=make_hello(rank=0), uid=1, owner=0)
    return made


def told(board):
    metrics = ("pacecar_job_straggler_excess_seconds", "pacecar_job_hang_suspected")
    return [(tuple(filter(None, s.labels)), s.value) for s in job_samples(board.jobs()) if s.metric in metrics]


LATE, HANGS, HANGS_NO_MORE = (("run-7", "1", "host_bound"), 5), (("run-7", "0"), 1), (("run-7", "0"), 0)


def test_a_job_that_was_killed_neither_hangs_nor_has_a_late_rank(board, make_hello):
    """It stays in the job table for a while, and its alerts would fire all that time."""
    assert told(board) == [LATE, HANGS]
    board.leave(make_hello(rank=0), 0)
    assert told(board) == [HANGS_NO_MORE]


def test_a_rank_that_lost_its_connection_for_a_moment_still_hangs(board, make_hello):
    hello = make_hello(rank=0)
    board.leave(hello, 0)
    board.record(hello, hello=hello, uid=1, owner=7)
    assert told(board) == [LATE, HANGS]


def test_a_job_that_was_started_anew_under_its_name_begins_without_hangs(board, make_hello):
    board.leave(make_hello(rank=0), 0)
    again = make_hello(rank=0, started_wall_ns=1)
    board.record(again, hello=again, uid=1, owner=7)
    assert told(board) == [HANGS_NO_MORE]
