"""The uid that the kernel reports decides who may reach a running job: real sockets, real users."""

import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from pacecar.monitor.ingest.authorization import NOBODY, ROOT, Denied, Target, reachable
from pacecar.records import Request
from pacecar.wire import decode_frame, encode_frame
from tests.kit.daemons import running_inbox

OWNER, STRANGER = 12345, 23456
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become two other users")


def request(**changes):
    return Request(**{"serial": 1, "job": "run-7", "action": "tune"} | changes)


def test_one_rank_may_be_meant_and_one_that_is_elsewhere_is_named_with_those_here(make_hello):
    here = [Target(rank, make_hello(rank=rank, world_size=16), OWNER) for rank in range(8, 16)]
    assert reachable(request(), OWNER, here) == here
    assert reachable(request(ranks=(9,)), OWNER, here) == [here[1]]
    with pytest.raises(Denied, match=r"rank 0 of job .run-7. is on another node \(here: 8, 9, .*15\); ask the"):
        reachable(request(ranks=(0,)), OWNER, here)


def test_without_a_name_the_users_only_job_is_meant(make_hello):
    mine, other = Target(1, make_hello(job="mine"), OWNER), Target(2, make_hello(job="other"), STRANGER)
    assert reachable(request(job=""), OWNER, [mine, other]) == [mine]
    with pytest.raises(Denied, match=r"^name one of your jobs: mine, other$"):
        reachable(request(job=""), ROOT, [mine, other])
    with pytest.raises(Denied, match=r"^no job of yours is connected to this daemon$"):
        reachable(request(job=""), OWNER, [other])


@pytest.mark.parametrize(
    ("uid", "owner", "may"),
    [
        (OWNER, OWNER, True),
        (ROOT, OWNER, True),
        (STRANGER, OWNER, False),
        (NOBODY, NOBODY, False),
        (ROOT, NOBODY, True),
    ],
)
def test_the_jobs_user_and_root_may_and_a_user_whom_the_kernel_cannot_name_may_not(make_hello, uid, owner, may):
    target = Target(1, make_hello(), owner)
    if may:
        assert reachable(request(), uid, [target]) == [target]
    else:
        with pytest.raises(Denied, match="belongs to another user"):
            reachable(request(), uid, [target])


SPEAK = """
    import os, socket, sys
    from pacecar.records import JobHello, Request
    from pacecar.wire import decode_frame, encode_frame
    path, uid, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.setgroups([]); os.setgid(uid); os.setuid(uid)
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    peer.settimeout(10)
    peer.connect(path)
    if what == "ask":
        peer.send(encode_frame(Request(serial=1, job="run-7", action="tune", ranks=(0,))))
        answer = decode_frame(peer.recv(65536))
        print(answer.state, answer.detail)
    else:
        peer.send(encode_frame(JobHello(job="run-7", rank=0, local_rank=0, world_size=1, pid=os.getpid(), host="h",
                                        device="cpu", framework="t", pacecar_version="0", started_wall_ns=1)))
        print("said hello", flush=True)
        command = decode_frame(peer.recv(65536)) if what == "rank" else None
        print(command and (command.action, command.uid, command.at_step), flush=True)
        sys.stdin.read()
"""


@pytest.fixture
def folder():
    """One that other users may enter: what pytest makes is for its own user alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.fixture
def inbox(folder):
    with running_inbox(folder / "pacecar.sock") as inbox:
        (folder / "pacecar.sock").chmod(0o666)  # as the system's socket is
        yield inbox


@pytest.fixture
def speak(folder):
    """Start a process of another user that says something to the daemon."""
    speakers = []

    def start(uid, what):
        command = [sys.executable, "-c", textwrap.dedent(SPEAK), str(folder / "pacecar.sock"), str(uid), what]
        speakers.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        )
        return speakers[-1]

    yield start
    for speaker in speakers:
        speaker.kill()
        speaker.communicate()


def wait_for(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def asked(speak, uid):
    out, err = speak(uid, "ask").communicate(timeout=20)
    assert out, err
    return out.strip()


@pytest.mark.slow
@needs_root
def test_another_user_is_refused_and_the_jobs_own_and_root_are_heard_with_their_uid(inbox, speak):
    rank = speak(OWNER, "rank")
    assert rank.stdout.readline().strip() == "said hello"
    wait_for(lambda: inbox.members())
    assert asked(speak, STRANGER) == "refused job 'run-7' belongs to another user"
    assert asked(speak, OWNER).startswith("accepted")
    assert rank.stdout.readline().strip() == f"('tune', {OWNER}, 0)"
    assert asked(speak, ROOT).startswith("accepted")


@pytest.mark.slow
@needs_root
def test_a_stranger_who_claims_the_jobs_name_hears_nothing_and_locks_nobody_out(inbox, speak):
    rank = speak(OWNER, "rank")
    assert rank.stdout.readline().strip() == "said hello"
    wait_for(lambda: inbox.members())
    claimant = speak(STRANGER, "claim")
    assert claimant.stdout.readline().strip() == "said hello"
    wait_for(lambda: sum(inbox.refused().values()) == 1)
    assert asked(speak, STRANGER) == "refused job 'run-7' belongs to another user"
    assert asked(speak, OWNER).startswith("accepted"), "the owner is not taken for a stranger to his own job"
    assert rank.stdout.readline().strip() == f"('tune', {OWNER}, 0)"


def test_a_request_for_one_rank_goes_to_that_rank_at_once(inbox, folder, make_hello):
    peers = []
    for rank in (0, 1):
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer.settimeout(10)
        peer.connect(str(folder / "pacecar.sock"))
        peer.send(encode_frame(make_hello(rank=rank, pid=os.getpid())))
        peers.append(peer)
    wait_for(lambda: len(inbox.members()) == 2)
    asker = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    asker.settimeout(10)
    asker.connect(str(folder / "pacecar.sock"))
    asker.send(encode_frame(request(ranks=(1,))))
    answer = decode_frame(asker.recv(65536))
    assert (answer.state, answer.ranks) == ("accepted", (1,))
    assert decode_frame(peers[1].recv(65536)).at_step == 0
    peers[0].setblocking(False)
    with pytest.raises(BlockingIOError):
        peers[0].recv(65536)
    for peer in (*peers, asker):
        peer.close()
