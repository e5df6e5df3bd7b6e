"""Two jobs of one name are two jobs, at every place: on the board, in series, for commands, recordings and people."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.export.job_samples import job_samples
from pacecar.monitor.ingest.authorization import Denied, Target, reachable
from pacecar.monitor.ingest.command_routing import CommandRouting, RankSteps
from pacecar.monitor.jobs.state import DaemonState
from pacecar.monitor.recorder.triggers import Triggers
from pacecar.records import Answer, Goodbye, HangSuspicion, HelloRefused, Request
from pacecar.records.job_identity import JobKey
from pacecar.wire import FrameError, Refusal, decode_frame
from tests.kit.daemons import running_inbox
from tests.kit.waiting import until

SECOND = 1_000_000_000
NAME = "torchrun-29500"
A, B = "3f2a9c01d4e5b678", "3a00000000000001"
ALICE, BOB = 1001, 1002


@pytest.fixture
def board(clock):
    return DaemonState(clock, jobs_max=64, ranks_max=512, job_forget_seconds=900)


@pytest.fixture
def train(board, make_hello, make_step):
    """A function that lets the ranks of a job say hello and a step."""
    owners = iter(range(1, 10_000))

    def ranks(launch, uid=ALICE, world_size=2, **step):
        hellos = []
        for rank in range(world_size):
            hello = make_hello(job=NAME, launch=launch, rank=rank, world_size=world_size, pid=100 + rank)
            owner = next(owners)
            for record in (hello, make_step(job=NAME, rank=rank, **step)):
                board.record(record, hello=hello, uid=uid, owner=owner)
            hellos.append((hello, owner))
        return hellos

    return ranks


def series(board):
    return [(s.metric, s.labels) for s in job_samples(board.jobs())]


@pytest.mark.parametrize("other", [ALICE, BOB])
def test_a_second_job_of_a_name_is_seen_at_once_whoever_runs_it_and_no_series_is_there_twice(board, train, other):
    train(A, step=5)
    train(B, uid=other, step=7)
    assert [(job.key, job.uid, len(job.ranks)) for job in board.jobs()] == [
        (JobKey(NAME, B), other, 2),
        (JobKey(NAME, A), ALICE, 2),
    ]
    assert [name for name, count in Counter(series(board)).items() if count > 1] == []
    steps = {s.labels[1]: s.value for s in job_samples(board.jobs()) if s.metric == "pacecar_job_step"}
    assert steps == {A: 5, B: 7}


def test_who_learned_a_launch_cannot_speak_for_it(board, train, make_hello):
    train(A)
    stolen = make_hello(job=NAME, launch=A, rank=0)
    with pytest.raises(FrameError, match=f"{NAME}@{A}.* belongs to uid {ALICE}") as refused:
        board.record(stolen, hello=stolen, uid=BOB, owner=99)
    assert refused.value.refusal is Refusal.IDENTITY


def test_a_new_start_takes_the_place_of_the_one_that_is_over_and_of_no_other(board, train):
    first = train(A)
    train("0" * 16, uid=BOB)
    train(B)
    assert len(board.jobs()) == 3, "the first still runs"
    for hello, owner in first:
        board.record(Goodbye(job=NAME, rank=hello.rank, reason="", wall_ns=1), hello=hello, uid=ALICE, owner=owner)
    train("f" * 16)
    assert {job.launch for job in board.jobs()} == {"0" * 16, B, "f" * 16}


def test_a_job_that_is_started_a_hundred_times_has_the_series_of_one(board, train):
    sizes = set()
    for number in range(100):
        for hello, owner in train(f"{number:016x}"):
            board.leave(hello, owner)  # killed, and restarted by its scheduler
        sizes.add(len(series(board)))
    assert len(sizes) == 1


def test_a_restart_within_a_launch_goes_on_in_the_same_series(board, make_hello, make_step):
    for pid in (1, 2):
        hello = make_hello(job=NAME, launch=A, pid=pid, started_wall_ns=pid)
        for record in (hello, make_step(job=NAME, step=pid)):
            board.record(record, hello=hello, uid=ALICE, owner=pid)
    (job,) = board.jobs()
    assert [rank.step.step for rank in job.ranks] == [2]


# --- people ------------------------------------------------------------------------------------------


@pytest.fixture
def targets(make_hello):
    return [
        Target(10, make_hello(job=NAME, launch=A, pid=17), ALICE),
        Target(11, make_hello(job=NAME, launch=A, rank=1, pid=18), ALICE),
        Target(20, make_hello(job=NAME, launch=B, pid=19), ALICE),
        Target(30, make_hello(job=NAME, launch="0" * 16, pid=20), BOB),
    ]


def ask(name):
    return Request(serial=1, job=name, action="tune")


def test_an_ambiguous_name_gets_one_line_that_says_what_names_each(targets):
    with pytest.raises(Denied) as denied:
        reachable(ask(NAME), ALICE, targets)
    assert str(denied.value) == (
        f"2 jobs are called '{NAME}'; name one of them: {NAME}@3a00 (uid {ALICE}, pid 19);"
        f" {NAME}@3f2a (uid {ALICE}, pid 17, 18)"
    )
    with pytest.raises(Denied, match=f"3 jobs are called.*0000 .uid {BOB}, pid 20"):
        reachable(ask(NAME), 0, targets)


@pytest.mark.parametrize("name", [f"{NAME}@3f2a", f"{NAME}@3f", f"{NAME}@{A}"])
def test_as_much_of_the_launch_as_it_takes_names_one(targets, name):
    assert [target.connection for target in reachable(ask(name), ALICE, targets)] == [10, 11]


def test_a_namesake_of_another_user_is_in_nobodys_way_and_out_of_reach(targets):
    assert [target.connection for target in reachable(ask(NAME), BOB, targets)] == [30]
    with pytest.raises(Denied, match="belongs to another user"):
        reachable(ask(f"{NAME}@3f2a"), BOB, targets)


def test_an_answer_comes_back_to_who_named_a_job_by_its_launch(targets):
    sent = []
    requests = CommandRouting(lambda connection, message: sent.append((connection, message)) or True)
    met = []
    requests.route(
        ask(f"{NAME}@3f2a"),
        asker=1,
        uid=ALICE,
        targets=targets,
        steps_of=lambda key: met.append(key) or RankSteps(),
    )
    assert met == [JobKey(NAME, A)]
    assert [connection for connection, _ in sent] == [10, 11, 1]
    number = sent[0][1].number
    requests.forward(Answer(job=NAME, rank=0, number=number, state="done", detail="yes"), connection=10)
    assert sent[-1] == (1, Answer(job=NAME, rank=0, number=1, state="done", detail="yes"))


def test_a_hang_of_one_job_does_not_hide_that_of_its_namesake():
    triggers = Triggers(stall_ns=1)
    hang = HangSuspicion(
        job=NAME, rank=0, step=5, phase="backward", wall_ns=1, silent_ns=SECOND, last_collective=None,
        collectives=None, stack=None,
    )  # fmt: skip
    subjects = [t.subject for launch in (A, B) for t in triggers.hang(str(JobKey(NAME, launch)), hang, 1)]
    assert subjects == [f"{NAME}@{A}", f"{NAME}@{B}"]


# --- refused hooks are told why --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_rank_that_the_daemon_does_not_show_is_told_why_once(tmp_path, hooks, make_hello, make_step):
    board = DaemonState(SystemClock(), jobs_max=1, ranks_max=8, job_forget_seconds=900)
    with running_inbox(tmp_path / "s", board) as inbox:
        shown, turned_away = hooks(tmp_path / "s"), hooks(tmp_path / "s")
        shown.say(make_hello(job="first", pid=os.getpid()))
        until(lambda: len(board.jobs()) == 1, "the first job")
        turned_away.say(make_hello(job="second", pid=os.getpid()), *[make_step(job="second")] * 5)
        told = decode_frame(turned_away.socket.recv(65536))
        assert told == HelloRefused(reason=f"job 'second' is beyond jobs_max = 1, and uid {os.getuid()} has 1 of them")
        until(lambda: inbox.refused()[Refusal.LIMIT] == 6, "all of it was refused")
        turned_away.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            turned_away.socket.recv(65536)
        shown.socket.settimeout(0.1)
        with pytest.raises(TimeoutError):
            shown.socket.recv(65536)


@pytest.mark.parametrize("launch", ["A" * 16, "3f", "g" * 16, "3f2a9c01d4e5b6789", "\n", "3f2a9c01d4e5b67\n"])
def test_a_launch_that_no_hook_makes_is_refused(tmp_path, hooks, make_hello, launch):
    with running_inbox(
        tmp_path / "s", DaemonState(SystemClock(), jobs_max=1, ranks_max=8, job_forget_seconds=9)
    ) as inbox:
        hook = hooks(tmp_path / "s")
        hook.say(make_hello(launch=launch, pid=os.getpid()))
        assert "is not 16 hexadecimal digits" in decode_frame(hook.socket.recv(65536)).reason
        assert inbox.refused()[Refusal.MALFORMED] == 1
