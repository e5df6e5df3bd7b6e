"""Which users may send requests, which ranks a command reaches, and where the answers go."""

import os
import socket
import time

import pytest

from pacecar.monitor.ingest.command_routing import REQUESTS_MAX, CommandRouting, RankSteps, Target
from pacecar.records import Answer, Command, Ledger, Request
from pacecar.records.job_orders import JobAnswer, RankReply
from pacecar.wire import Refusal, decode_frame, encode_frame
from tests.kit.daemons import running_inbox


class Post:
    """What was sent to whom; connections in `deaf` take nothing."""

    def __init__(self):
        self.sent = []
        self.deaf = set()

    def __call__(self, connection, message):
        if connection in self.deaf:
            return False
        self.sent.append((connection, message))
        return True

    def to(self, connection):
        return [message for number, message in self.sent if number == connection]


@pytest.fixture
def post():
    return Post()


@pytest.fixture
def targets(make_hello):
    ranks = [Target(10 + rank, make_hello(rank=rank), 1000) for rank in (0, 1)]
    return [*ranks, Target(20, make_hello(job="other"), 1000)]


def request(**changes):
    return Request(**{"serial": 7, "job": "job-a", "action": "trace", "arguments": {"steps": 3}} | changes)


def meet(ahead):
    """All ranks at one place, whatever the job."""
    return lambda job: RankSteps(ahead - 10, ahead, 50_000_000) if ahead else RankSteps()


@pytest.fixture
def job(targets):
    return targets[0].hello.job


def test_a_request_reaches_the_ranks_of_its_job_only_and_the_asker_hears_whom(post, targets, job):
    CommandRouting(post).route(request(job=job), asker=1, uid=1000, targets=targets, steps_of=meet(44))
    (command,) = post.to(10)
    assert (command.action, command.at_step, command.arguments) == ("trace", 44, {"steps": 3})
    assert post.to(11) == [command]
    assert post.to(20) == []
    (accepted,) = post.to(1)
    assert (accepted.state, accepted.ranks, accepted.number, accepted.rank) == ("accepted", (0, 1), 7, None)


def test_a_job_that_claims_a_world_without_end_is_answered_like_any_other(post, make_hello):
    """Otherwise the inbox's one thread would look for ranks for ever and serve no other connection."""
    endless = [Target(10, make_hello(world_size=10**15), 1000)]
    CommandRouting(post).route(request(job=endless[0].hello.job), asker=1, uid=1000, targets=endless, steps_of=meet(44))
    (accepted,) = post.to(1)
    assert accepted.detail.endswith(
        "not on 1, 2, 3, 4, 5, 6, 7, 8, ... (not connected to this daemon; on another node?)"
    )


@pytest.mark.parametrize(("uid", "state"), [(1000, "accepted"), (0, "accepted"), (1001, "refused")])
def test_only_the_jobs_user_and_root_may_ask(post, targets, job, uid, state):
    CommandRouting(post).route(request(job=job), asker=1, uid=uid, targets=targets, steps_of=meet(0))
    assert post.to(1)[0].state == state
    assert bool(post.to(10)) == (state == "accepted")


def test_a_job_that_is_not_there_and_a_rank_that_does_not_read_are_said(post, targets, job):
    requests = CommandRouting(post)
    requests.route(request(job="nobody"), asker=1, uid=0, targets=targets, steps_of=meet(0))
    assert "no rank of a job 'nobody'" in post.to(1)[0].detail
    post.deaf = {10}
    requests.route(request(job=job), asker=2, uid=0, targets=targets, steps_of=meet(0))
    assert post.to(2)[0].ranks == (1,)
    post.deaf = {10, 11}
    requests.route(request(job=job), asker=3, uid=0, targets=targets, steps_of=meet(0))
    assert post.to(3)[0].state == "refused"


def answer_to(command, job, rank=0):
    return Answer(job=job, rank=rank, number=command.number, state="done", detail="here")


def test_an_answer_goes_to_whoever_asked_with_his_own_number(post, targets, job):
    requests = CommandRouting(post)
    requests.route(request(job=job, serial=7), asker=1, uid=0, targets=targets, steps_of=meet(0))
    requests.route(request(job=job, serial=9), asker=2, uid=0, targets=targets, steps_of=meet(0))
    first, second = post.to(10)
    requests.forward(answer_to(second, job), connection=10)
    assert [a.number for a in post.to(2)] == [9, 9]
    assert [a.number for a in post.to(1)] == [7]
    requests.forward(answer_to(first, "other"), connection=10)  # a rank of another job that guesses numbers
    assert len(post.to(1)) == 1


def test_what_an_asker_wanted_is_forgotten_when_he_hangs_up_or_too_many_ask(post, targets, job):
    requests = CommandRouting(post)
    requests.route(request(job=job), asker=1, uid=0, targets=targets, steps_of=meet(0))
    requests.forget(1)
    requests.forward(answer_to(post.to(10)[0], job), connection=10)
    assert len(post.to(1)) == 1
    for asker in range(100, 100 + REQUESTS_MAX + 1):
        requests.route(request(job=job), asker=asker, uid=0, targets=targets, steps_of=meet(0))
    oldest, *_, newest = post.to(10)[1:]
    requests.forward(answer_to(oldest, job), connection=10)
    requests.forward(answer_to(newest, job), connection=10)
    said = [answer.state for answer in post.to(100)]
    assert said[0] == "accepted"
    assert set(said[1:]) == {"refused"}, "it made room for the newest, and is told so"
    assert "made room" in post.to(100)[-1].detail
    assert len(post.to(100 + REQUESTS_MAX)) == 2


def test_an_order_to_the_job_goes_to_the_rank_heard_from_last_and_then_to_the_others(post, targets, job):
    """It may be stopped; what it sends before its final answer is passed on."""
    heard = [targets[0]._replace(heard_ns=5), targets[1]._replace(heard_ns=9)]
    requests = CommandRouting(post)
    for attempt, connection in enumerate((11, 10, 11)):
        asked = request(job=job, action="job", arguments={"attempt": attempt})
        requests.route(asked, asker=attempt, uid=1000, targets=heard, steps_of=meet(44))
        (command,) = post.to(connection)[attempt // 2 :]
        assert (command.action, command.at_step) == ("job", 0)
        assert post.to(attempt)[0].ranks == (connection - 10,)
    replies = JobAnswer(job=job, rank=0, number=post.to(10)[0].number, world_size=2, replies=(RankReply(rank=1),))
    requests.forward(replies, connection=10)
    requests.forget(10)
    _, passed_on, final = post.to(1)
    assert (passed_on.number, passed_on.replies, final.state) == (7, replies.replies, "refused"), "it still owed one"


def test_a_rank_that_goes_away_is_answered_for_and_one_that_had_answered_is_not(post, targets, job):
    requests = CommandRouting(post)
    requests.route(request(job=job), asker=1, uid=0, targets=targets, steps_of=meet(44))
    requests.forward(answer_to(post.to(10)[0], job), connection=10)
    requests.forget(10)
    requests.forget(11)
    _, done, gone = post.to(1)
    assert (done.rank, done.state) == (0, "done")
    assert (gone.rank, gone.state, gone.number) == (1, "refused", 7)
    assert "went away" in gone.detail


def test_two_jobs_of_one_name_are_told_apart_by_nobody(post, make_hello, job):
    twins = [Target(10, make_hello(pid=111), 1000), Target(11, make_hello(pid=222), 1000)]
    CommandRouting(post).route(request(job=job), asker=1, uid=1000, targets=twins, steps_of=meet(44))
    (answer,) = post.to(1)
    assert answer.state == "refused"
    assert "several jobs are called" in answer.detail
    assert "pid 111, 222" in answer.detail
    assert post.to(10) == []


def test_a_wrong_name_is_answered_with_the_names_that_the_asker_may_know(post, targets, make_hello):
    targets = [*targets, Target(30, make_hello(job="theirs"), 2000)]
    requests = CommandRouting(post)
    requests.route(request(job="runn-7"), asker=1, uid=1000, targets=targets, steps_of=meet(0))
    requests.route(request(job="runn-7"), asker=2, uid=0, targets=targets, steps_of=meet(0))
    requests.route(request(job="runn-7"), asker=3, uid=3000, targets=targets, steps_of=meet(0))
    assert post.to(1)[0].detail.endswith("there are 'other', 'run-7'")
    assert post.to(2)[0].detail.endswith("there are 'other', 'run-7', 'theirs'")
    assert post.to(3)[0].detail.endswith("no job of yours is")


def test_the_ranks_that_the_daemon_does_not_hear_are_named_and_when_it_begins(post, make_hello, job):
    here = [Target(10 + rank, make_hello(rank=rank, world_size=4), 1000) for rank in (0, 2)]
    CommandRouting(post).route(request(job=job), asker=1, uid=1000, targets=here, steps_of=meet(44))
    (accepted,) = post.to(1)
    assert accepted.detail == (
        "trace from step 44, in about 0.5 s, on 2 of 4 ranks: not on 1, 3 (not connected to this daemon;"
        " on another node?)"
    )
    assert (accepted.expected_ns, accepted.pace_ns) == (500_000_000, 50_000_000)


def test_the_asker_may_name_a_step_that_lies_far_enough_ahead(post, targets, job):
    """So that the daemons of several nodes can be asked for the same steps."""
    requests = CommandRouting(post)
    for asker, at_step in ((1, 44), (2, 1000), (3, 43), (4, -1), (5, "soon")):
        requests.route(
            request(job=job, arguments={"at_step": at_step}),
            asker=asker,
            uid=0,
            targets=targets,
            steps_of=meet(44),
        )
    assert [post.to(asker)[0].state for asker in (1, 2, 3, 4, 5)] == ["accepted"] * 2 + ["refused"] * 3
    assert [command.at_step for command in post.to(10)] == [44, 1000]
    assert "step 43 is too near: job 'run-7' is at 34" in post.to(3)[0].detail


def test_a_job_of_which_nothing_is_known_begins_when_it_hears(post, targets, job):
    CommandRouting(post).route(request(job=job), asker=1, uid=0, targets=targets, steps_of=meet(0))
    assert post.to(10)[0].at_step == 0
    assert "perhaps not at the same step" in post.to(1)[0].detail


@pytest.fixture
def inbox(tmp_path):
    with running_inbox(tmp_path / "pacecar.sock") as inbox:
        yield inbox


def connect(tmp_path):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10)
    peer.connect(str(tmp_path / "pacecar.sock"))
    return peer


def test_a_command_lies_ahead_of_the_furthest_rank_and_the_answer_comes_back(inbox, tmp_path, make_hello, make_step):
    rank, asker = connect(tmp_path), connect(tmp_path)
    hello = make_hello(pid=os.getpid())
    rank.send(encode_frame(hello))
    ran = Ledger(wall_ns=50_100_000_000, unknown_ns=50_100_000_000)
    rank.send(encode_frame(make_step(step=500, wall_ns=100_000_000, totals=ran, total_steps=501)))
    deadline = time.monotonic() + 10
    while inbox.frames < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    asker.send(encode_frame(Request(serial=3, job=hello.job, action="trace")))
    command = decode_frame(rank.recv(65536))
    assert isinstance(command, Command)
    assert 512 <= command.at_step <= 522  # a second of steps of 100 ms, as many as went by since, and two
    assert decode_frame(asker.recv(65536)).ranks == (hello.rank,)
    rank.send(encode_frame(Answer(job=hello.job, rank=0, number=command.number, state="done", detail="x")))
    assert decode_frame(asker.recv(65536)).state == "done"
    rank.send(encode_frame(Request(serial=3, job=hello.job, action="trace")))  # a hook asks for nothing
    rank.send(encode_frame(Answer(job="else", rank=0, number=command.number, state="done", detail="x")))
    while sum(inbox.refused().values()) < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    refused = {reason: count for reason, count in inbox.refused().items() if count}
    assert refused == {Refusal.MALFORMED: 1, Refusal.IDENTITY: 1}
    for peer in (rank, asker):
        peer.close()


def test_an_asker_that_never_reads_holds_up_nobody(inbox, tmp_path):
    flood, patient = connect(tmp_path), connect(tmp_path)
    flood.settimeout(5)
    frame = encode_frame(Request(serial=1, job="nobody", action="trace"))
    for _ in range(2000):  # its answers fill the socket's buffer and are dropped
        flood.send(frame)
    patient.send(frame)
    assert decode_frame(patient.recv(65536)).state == "refused"
    flood.close()
    patient.close()
