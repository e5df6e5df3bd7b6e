"""Requests: who may ask, whom a command reaches, and where the answers go."""

import os
import socket
import time

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.board import Board
from pacecar.monitor.inbox import Inbox
from pacecar.monitor.meeting import Meeting
from pacecar.monitor.requests import REQUESTS_MAX, Requests, Target
from pacecar.records import Answer, Command, Request
from pacecar.wire import Refusal, decode_frame, encode_frame


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


@pytest.fixture
def job(targets):
    return targets[0].hello.job


def test_a_request_reaches_the_ranks_of_its_job_only_and_the_asker_hears_whom(post, targets, job):
    Requests(post).ask(request(job=job), asker=1, uid=1000, targets=targets, at_step=44)
    (command,) = post.to(10)
    assert (command.action, command.at_step, command.arguments) == ("trace", 44, {"steps": 3})
    assert post.to(11) == [command]
    assert post.to(20) == []
    (accepted,) = post.to(1)
    assert (accepted.state, accepted.ranks, accepted.number, accepted.rank) == ("accepted", (0, 1), 7, None)


@pytest.mark.parametrize(("uid", "state"), [(1000, "accepted"), (0, "accepted"), (1001, "refused")])
def test_only_the_jobs_user_and_root_may_ask(post, targets, job, uid, state):
    Requests(post).ask(request(job=job), asker=1, uid=uid, targets=targets, at_step=0)
    assert post.to(1)[0].state == state
    assert bool(post.to(10)) == (state == "accepted")


def test_a_job_that_is_not_there_and_a_rank_that_does_not_read_are_said(post, targets, job):
    requests = Requests(post)
    requests.ask(request(job="nobody"), asker=1, uid=0, targets=targets, at_step=0)
    assert "no rank of a job 'nobody'" in post.to(1)[0].detail
    post.deaf = {10}
    requests.ask(request(job=job), asker=2, uid=0, targets=targets, at_step=0)
    assert post.to(2)[0].ranks == (1,)
    post.deaf = {10, 11}
    requests.ask(request(job=job), asker=3, uid=0, targets=targets, at_step=0)
    assert post.to(3)[0].state == "refused"


def answer_to(command, job, rank=0):
    return Answer(job=job, rank=rank, number=command.number, state="done", detail="here")


def test_an_answer_goes_to_whoever_asked_with_his_own_number(post, targets, job):
    requests = Requests(post)
    requests.ask(request(job=job, serial=7), asker=1, uid=0, targets=targets, at_step=0)
    requests.ask(request(job=job, serial=9), asker=2, uid=0, targets=targets, at_step=0)
    first, second = post.to(10)
    requests.answered(answer_to(second, job))
    assert [a.number for a in post.to(2)] == [9, 9]
    assert [a.number for a in post.to(1)] == [7]
    requests.answered(answer_to(first, "other"))  # a rank of another job that guesses numbers
    assert len(post.to(1)) == 1


def test_what_an_asker_wanted_is_forgotten_when_he_hangs_up_or_too_many_ask(post, targets, job):
    requests = Requests(post)
    requests.ask(request(job=job), asker=1, uid=0, targets=targets, at_step=0)
    requests.left(1)
    requests.answered(answer_to(post.to(10)[0], job))
    assert len(post.to(1)) == 1
    for asker in range(100, 100 + REQUESTS_MAX + 1):
        requests.ask(request(job=job), asker=asker, uid=0, targets=targets, at_step=0)
    oldest, *_, newest = post.to(10)[1:]
    requests.answered(answer_to(oldest, job))
    requests.answered(answer_to(newest, job))
    assert len(post.to(100)) == 1
    assert len(post.to(100 + REQUESTS_MAX)) == 2


@pytest.fixture
def inbox(tmp_path):
    board = Board(SystemClock(), jobs_max=3, ranks_max=4, job_forget_seconds=900)
    inbox = Inbox(Meeting(tmp_path / "pacecar.sock"), board, SystemClock())
    inbox.start()
    yield inbox
    inbox.close()


def connect(tmp_path):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10)
    peer.connect(str(tmp_path / "pacecar.sock"))
    return peer


def test_a_command_lies_ahead_of_the_furthest_rank_and_the_answer_comes_back(inbox, tmp_path, make_hello, make_step):
    rank, asker = connect(tmp_path), connect(tmp_path)
    hello = make_hello(pid=os.getpid())
    rank.send(encode_frame(hello))
    rank.send(encode_frame(make_step(step=500, wall_ns=100_000_000)))
    deadline = time.monotonic() + 10
    while inbox.frames < 2 and time.monotonic() < deadline:
        time.sleep(0.002)
    asker.send(encode_frame(Request(serial=3, job=hello.job, action="trace")))
    command = decode_frame(rank.recv(65536))
    assert isinstance(command, Command)
    assert command.at_step == 512  # a second of steps of 100 ms, and two
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
