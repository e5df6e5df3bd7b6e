"""Ranks ask each other over sockets: strangers, nonsense and silent ranks cost no more than their own answer."""

from __future__ import annotations

import gc
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from pacecar.process_state import own_identity, read_process
from pacecar.profiler.hangs.account_road import (
    QUESTION_BYTES_MAX,
    AccountListener,
    Door,
    Heard,
    Question,
    Road,
    Silence,
    ask,
)
from pacecar.profiler.hangs.hang_detector import where
from pacecar.profiler.hangs.rank_account import thread_stacks
from pacecar.records.hangs import RankAccount
from tests.kit.waiting import until

TOKEN = "right"
PROCESS = own_identity(threading.get_native_id())


@pytest.fixture
def listener():
    made = AccountListener(
        lambda question: Heard() if question.what != "account" else RankAccount(rank=1, world_size=2)
    )
    made.port = made.open("127.0.0.1")
    made.start(TOKEN)
    yield made
    made.close()


def road(*ports, token=TOKEN):
    return Road(token, tuple(Door("127.0.0.1", port, PROCESS) for port in ports))


def question(what="account"):
    return Question(what=what)


EXCHANGE_AFTER_UPGRADE = """
import os, sys
from torch.distributed import HashStore
from pacecar.process_state import own_identity
from pacecar.profiler.hangs.account_road import Door, exchange_doors

for name in [name for name in sys.modules if name.partition(".")[0] == "pacecar"]:
    del sys.modules[name]
own = Door("127.0.0.1", 1, own_identity(os.getpid()))
print(exchange_doors(HashStore(), 0, 1, own, name="test", seconds=5.0, rest=None).doors == (own,))
"""


@pytest.mark.full
@pytest.mark.slow
def test_doors_are_exchanged_though_pacecar_was_upgraded_meanwhile():
    """A decoder made only then looks for the types of its fields in modules that are no longer there."""
    done = subprocess.run([sys.executable, "-c", EXCHANGE_AFTER_UPGRADE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.slow
def test_a_rank_answers_and_one_that_has_left_is_told_from_one_that_is_silent(listener):
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as left:
        left_port = left.getsockname()[1]
        left.close()
        begun = time.monotonic()
        answers = ask(road(listener.port, silent.getsockname()[1], left_port), range(3), question(), seconds=0.5)
    assert time.monotonic() - begun < 5.0
    assert answers[0] == RankAccount(rank=1, world_size=2)
    assert answers[1] == Silence("no answer within 0.5 s")
    assert answers[2].refused


@pytest.mark.slow
def test_a_host_that_takes_no_connection_is_told_from_a_process_that_does_not_answer():
    """The kernel takes connections for a process that is stopped; here it takes none, as on a dead link."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        socket.create_connection(full.getsockname()),
        socket.socket() as second,
    ):
        second.setblocking(False)
        second.connect_ex(full.getsockname())
        answer = ask(road(full.getsockname()[1]), [0], question(), seconds=0.5)[0]
    assert answer == Silence("no connection within 0.5 s", unreachable=True)


def test_a_stranger_gets_no_answer_and_is_counted_and_said(listener):
    assert isinstance(ask(road(listener.port, token="wrong"), [0], question())[0], Silence)
    assert listener.problems() == ("1 connections were no questions of this job",)
    assert ask(road(listener.port), [0], question("greeting"))[0] == Heard()


def test_the_token_does_not_cross_the_network_and_a_question_cannot_be_changed_on_its_way(listener):
    with socket.create_server(("127.0.0.1", 0)) as recorder:
        asker = threading.Thread(
            target=ask, args=(road(recorder.getsockname()[1]), [0], question("greeting")), kwargs={"seconds": 0.3}
        )
        asker.start()
        with recorder.accept()[0] as connection:
            frame = connection.recv(4096)
        asker.join()
    assert TOKEN.encode() not in frame
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.sendall(frame.replace(b"greeting", b"counters"))
        assert connection.recv(1) == b""
    assert listener.problems() == ("1 connections were no questions of this job",)


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", QUESTION_BYTES_MAX + 1), struct.pack(">I", 3) + b"\xc1\xc1\xc1"],
    ids=["nothing", "another protocol", "too long", "no MessagePack"],
)
def test_nonsense_is_counted_and_the_next_question_answered(listener, sent):
    with socket.create_connection(("127.0.0.1", listener.port)) as connection:
        connection.sendall(sent)
        with suppress(OSError):  # it may have been closed already
            connection.shutdown(socket.SHUT_WR)
        until(lambda: listener.refused == 1)
    assert ask(road(listener.port), [0], question("greeting"))[0] == Heard()


def test_an_answer_that_is_nonsense_or_too_long_is_a_silence():
    frames = [struct.pack(">I", 2**31), struct.pack(">I", 1) + b"\xc1", msgspec.msgpack.encode({"rank": "x"})]
    for frame in frames:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def serve(server=server, frame=frame):
                connection, _ = server.accept()
                with connection:
                    connection.recv(4096)
                    connection.sendall(frame)

            thread = threading.Thread(target=serve)
            thread.start()
            answer = ask(road(server.getsockname()[1]), [0], question())[0]
            thread.join()
        assert isinstance(answer, Silence)


def test_more_ranks_than_are_asked_at_once_are_all_asked(listener):
    answers = ask(road(*[listener.port] * 150), range(150), question("greeting"))
    assert {rank: Heard() for rank in range(150)} == answers


def test_a_closed_listener_refuses_even_if_a_child_has_inherited_its_socket(listener):
    kept = os.dup(listener._socket.fileno())
    listener.close()
    try:
        assert ask(road(listener.port), [0], question("greeting"))[0].refused
    finally:
        os.close(kept)


def test_an_interrupted_round_ends_and_blames_nobody():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        ports = [silent.getsockname()[1]] * 3
        answers = ask(road(*ports), range(3), question(), is_over=lambda: True)
    assert [answer.was_asked for answer in answers.values()] == [False] * 3


def test_a_process_is_known_by_when_it_began():
    state = read_process(PROCESS)
    assert state.exists
    assert state.state in ("R", "S")
    assert state.processor_ns > 0
    assert not read_process(msgspec.structs.replace(PROCESS, began=PROCESS.began + 1)).exists


def test_a_child_that_has_ended_is_gone_before_its_parent_has_asked():
    with subprocess.Popen(["true"]) as child:
        until(lambda: os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT) is not None)
        stat = Path(f"/proc/{child.pid}/stat").read_text()
        began = int(stat.rpartition(")")[2].split()[19])
        state = read_process(msgspec.structs.replace(PROCESS, pid=child.pid, thread=child.pid, began=began))
        assert (state.exists, state.state) == (False, "Z")


def test_stacks_begin_with_the_training_thread_and_leave_pacecars_own_out(listener):
    stacks = thread_stacks(threading.get_ident())
    assert stacks[0].is_training
    assert any("test_account_road.py" in frame for frame in stacks[0].frames)
    assert not any("pacecar-" in stack.name for stack in stacks)


def test_a_script_whose_name_is_not_utf8_does_not_silence_its_rank():
    names = {}
    exec(compile("def run(call): return call()", "/tmp/entra\udceenement.py", "exec"), names)
    stacks, words = names["run"](lambda: (thread_stacks(threading.get_ident()), where(threading.get_ident())))
    assert any(frame.startswith("entra\ufffdnement.py:1 run") for frame in stacks[0].frames)
    assert msgspec.msgpack.encode((stacks, words))


def test_reading_stacks_keeps_no_local_variable_of_the_training_thread_alive():
    class Activation:
        pass

    def forward():
        activation = Activation()
        reader = threading.Thread(target=thread_stacks, args=(threading.get_ident(),))
        reader.start()
        reader.join()
        return weakref.ref(activation)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        assert forward()() is None
    finally:
        if was_enabled:
            gc.enable()
