"""The inbox over real sockets: accepted and refused frames, and peers that cannot block it."""

import logging
import os
import socket
import stat
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.clock import SystemClock
from pacecar.monitor.ingest.connection import Connection
from pacecar.monitor.ingest.frame_validation import FrameValidation, Peer, own_pid
from pacecar.monitor.ingest.socket_server import HELLO_SECONDS, SocketServer
from pacecar.monitor.ingest.unix_socket import UnixSocket, UnixSocketError
from pacecar.monitor.jobs.state import DaemonState
from pacecar.records import Decision, Goodbye, HelloRefused, Knobs, StepRecord, TunerStatus
from pacecar.records.ranges import ENTRIES_MAX
from pacecar.wire import FRAME_BYTES_MAX, VERSION, FrameError, Refusal, decode_frame, encode_frame
from tests.kit.daemons import running_inbox
from tests.kit.fake_clock import FakeClock
from tests.kit.waiting import until

PEER = Peer(pid=4242, uid=1000, gid=1000)


@pytest.fixture
def board():
    return DaemonState(SystemClock(), jobs_max=3, ranks_max=4, job_forget_seconds=900)


@pytest.fixture
def inbox(board, tmp_path):
    with running_inbox(tmp_path / "own" / "pacecar.sock", board) as inbox:
        yield inbox


@pytest.fixture
def path(inbox, tmp_path):
    return tmp_path / "own" / "pacecar.sock"


@pytest.fixture
def hello(make_hello):
    """A hello of this very process, which is what the kernel will say about it."""
    return lambda **changes: make_hello(pid=os.getpid(), **changes)


def rank_of(board, rank=0):
    for job in board.jobs():
        for view in job.ranks:
            if view.hello.rank == rank:
                return view
    return None


def test_hello_and_steps_reach_the_board(inbox, path, board, hooks, hello, make_step):
    hooks(path).say(hello(), make_step(), make_step(step=42))
    until(lambda: inbox.frames == 3, "three frames taken")
    assert rank_of(board).step.step == 42
    assert rank_of(board).connected
    assert set(inbox.refused().values()) == {0}


def test_two_ranks_are_apart(inbox, path, board, hooks, hello, make_step):
    for rank in (0, 1):
        hooks(path).say(hello(rank=rank, local_rank=rank), make_step(rank=rank, step=10 + rank))
    until(lambda: inbox.frames == 4, "four frames taken")
    assert [rank_of(board, rank).step.step for rank in (0, 1)] == [10, 11]
    assert inbox.connections == 2


@pytest.mark.parametrize(
    ("frame", "refusal"),
    [
        (b"PC\x01", Refusal.TRUNCATED),
        (b"", Refusal.TRUNCATED),
        (struct.pack(">2sBxI", b"PC", VERSION, 100) + b"short", Refusal.TRUNCATED),
        (struct.pack(">2sBxI", b"PC", VERSION, 1) + b"too long", Refusal.MALFORMED),
        (struct.pack(">2sBxI", b"XX", VERSION, 1) + b"x", Refusal.MAGIC),
        (struct.pack(">2sBxI", b"PC", VERSION + 1, 1) + b"x", Refusal.VERSION),
        (struct.pack(">2sBxI", b"PC", VERSION, 4) + b"\xc1\xc1\xc1\xc1", Refusal.MALFORMED),
        (b"\0" * (FRAME_BYTES_MAX + 1), Refusal.OVERSIZED),
        (b"GET / HTTP/1.1\r\n\r\n", Refusal.MAGIC),
    ],
)
def test_a_bad_frame_is_counted_and_the_connection_lives_on(
    frame, refusal, inbox, path, board, hooks, hello, make_step
):
    hook = hooks(path)
    hook.say(hello())
    hook.send(frame)
    hook.say(make_step(step=77))
    until(lambda: inbox.frames == 2, "the frames before and after are taken")
    assert {k: v for k, v in inbox.refused().items() if v} == {refusal: 1}
    assert rank_of(board).step.step == 77


def test_before_a_hello_nothing_is_taken(inbox, path, board, hooks, hello, make_step):
    hook = hooks(path)
    hook.say(make_step())
    until(lambda: inbox.refused()[Refusal.NO_HELLO] == 1, "refused for want of a hello")
    assert board.jobs() == ()
    hook.say(hello(), make_step())
    until(lambda: inbox.frames == 2, "taken after the hello")


def test_each_reason_is_logged_once_for_a_connection(inbox, path, hooks, caplog, make_step):
    hook = hooks(path)
    hook.say(*[make_step()] * 20)
    for _ in range(20):
        hook.send(b"garbage that is long enough")
    until(lambda: inbox.refused()[Refusal.MAGIC] == 20, "all counted")
    warnings = [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 2
    assert f"pid {os.getpid()}, uid {os.getuid()}" in warnings[0]


def test_a_hello_with_another_pid_is_refused(inbox, path, hooks, make_hello):
    hooks(path).say(make_hello(pid=1))
    until(lambda: inbox.refused()[Refusal.IDENTITY] == 1, "a foreign pid is refused")


def test_own_pid_is_what_the_kernel_says():
    assert own_pid(os.getpid()) == os.getpid()
    assert own_pid(2**22 + 1) is None


@pytest.mark.parametrize("end", [b"\x0c", b"\r"])
def test_no_process_says_its_own_pid_by_its_name(end):
    """The kernel escapes a line feed in a name and no other character at which python ends a line."""
    name = Path("/proc/self/comm")
    before = name.read_bytes().removesuffix(b"\n")
    name.write_bytes(end + b"NSpid:\t666")
    try:
        assert own_pid(os.getpid()) == os.getpid()
    finally:
        name.write_bytes(before)


@pytest.mark.distributed
def test_a_process_that_is_killed_is_noted(inbox, path, board, caplog, make_hello):
    """The peer's end comes without a goodbye: the rank stays on the board, not connected, and it is said once."""
    code = (
        "import socket,sys,os,msgspec;from pacecar.records import JobHello;from pacecar.wire import encode_frame;"
        "s=socket.socket(socket.AF_UNIX,socket.SOCK_SEQPACKET);s.connect(sys.argv[1]);"
        "h=msgspec.json.decode(sys.argv[2],type=JobHello);"
        "s.send(encode_frame(msgspec.structs.replace(h,pid=os.getpid())));sys.stdin.read()"
    )
    import msgspec

    argv = [sys.executable, "-c", code, str(path), msgspec.json.encode(make_hello()).decode()]
    with subprocess.Popen(argv, stdin=subprocess.PIPE) as process:
        until(lambda: rank_of(board) is not None, "hello came")
        process.kill()
    until(lambda: not rank_of(board).connected, "its end was noticed")
    assert rank_of(board).hello.pid == process.pid
    until(lambda: caplog.records, "it was said")
    assert [r.getMessage().partition(": ")[2] for r in caplog.records] == ["left without a goodbye"]


def test_goodbye_is_a_quiet_end(inbox, path, board, hooks, hello, caplog):
    hook = hooks(path)
    hook.say(hello(), Goodbye(job="run-7", rank=0, reason="done", wall_ns=1))
    hook.close()
    until(lambda: inbox.frames == 2 and inbox.connections == 0, "heard and hung up")
    assert rank_of(board).goodbye.reason == "done"
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_restarted_inbox_takes_the_same_path_and_the_hook_comes_back(board, tmp_path, hooks, hello, make_step):
    path = tmp_path / "s"
    for round_number in (1, 2):
        with running_inbox(path, board) as inbox:
            hooks(path).say(hello(), make_step(step=round_number))
            until(lambda inbox=inbox: inbox.frames == 2, "taken")
        assert not path.exists()
    assert rank_of(board).step.step == 2


def test_a_full_table_hangs_up_on_the_newcomer_unless_somebody_never_said_hello(tmp_path, hooks, hello, make_step):
    clock = FakeClock()
    board = DaemonState(clock, jobs_max=3, ranks_max=4, job_forget_seconds=900)
    with running_inbox(tmp_path / "s", board, clock, connections_max=2) as inbox:
        polite, _silent = hooks(tmp_path / "s"), hooks(tmp_path / "s")
        polite.say(hello())
        until(lambda: inbox.connections == 2 and inbox.frames == 1, "both are connected")
        refused = hooks(tmp_path / "s")
        until(lambda: inbox.refused()[Refusal.LIMIT] == 1, "the third is refused")
        assert decode_frame(refused.socket.recv(4096)) == HelloRefused(
            reason="2 hooks are connected already, hung up on this one"
        )
        assert refused.socket.recv(10) == b""
        clock.advance((HELLO_SECONDS + 1) * 1_000_000_000)
        late = hooks(tmp_path / "s")
        late.say(hello(rank=1))
        until(lambda: inbox.frames == 2, "the silent one made room")
        polite.say(make_step())
        until(lambda: inbox.frames == 3, "the polite one stayed")


def test_one_user_fills_his_own_places_and_not_those_of_others(tmp_path, board, hooks, hello, make_step):
    with running_inbox(tmp_path / "s", board, connections_max=10, connections_per_uid_max=2) as inbox:
        kept = [hooks(tmp_path / "s") for _ in range(2)]
        for rank, hook in enumerate(kept):
            hook.say(hello(rank=rank))
        until(lambda: inbox.frames == 2, "both are there")
        turned_away = hooks(tmp_path / "s").socket
        assert isinstance(decode_frame(turned_away.recv(4096)), HelloRefused)
        assert turned_away.recv(1) == b"", "hung up on"
        assert inbox.refused()[Refusal.LIMIT] == 1
        kept[0].close()
        until(lambda: inbox.connections == 1, "it went")
        hooks(tmp_path / "s").say(hello(rank=0))
        until(lambda: inbox.frames == 3, "its place is free again")


def test_a_hook_that_closes_without_reading_what_it_was_told_loses_none_of_its_frames(
    inbox, path, hooks, hello, make_step
):
    hook = hooks(path)
    hook.say(hello(), make_step(rank=1))
    until(lambda: inbox.refused()[Refusal.IDENTITY] == 1, "it was told why, and does not read it")
    hook.say(*[make_step(step=number) for number in range(50)])
    hook.close()
    until(lambda: inbox.connections == 0, "it went")
    assert inbox.frames == 51


def test_members_are_in_turns_of_users(tmp_path, board, make_hello):
    inbox = SocketServer(UnixSocket(tmp_path / "s"), board, SystemClock())
    for number, uid in enumerate([1, 1, 1, 2, 1, 2, 3]):
        conversation = FrameValidation(Peer(100 + number, uid, uid), own_pid=lambda pid: pid)
        conversation.hello = make_hello(pid=100 + number)
        inbox._connections[number] = Connection(number, None, conversation, 0)
    assert [pid for pid, _ in inbox.members()] == [100, 103, 106, 101, 105, 102, 104]


def test_a_flood_from_one_hook_does_not_shut_out_another(inbox, path, hooks, hello, make_step):
    flood = hooks(path)
    flood.socket.setblocking(False)
    try:
        while True:
            flood.send(b"x" * 1000)
    except BlockingIOError:
        pass
    hooks(path).say(hello(), make_step())
    until(lambda: inbox.frames == 2, "the other is heard")


@pytest.mark.slow
def test_running_out_of_file_descriptors_pauses_accepting_and_does_not_end_it(inbox, path, hello, caplog):
    """The listener stays readable while accept fails: a loop without a pause would spin."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as late:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # what is open stays open, nothing new fits
        try:
            late.connect(str(path))
            until(lambda: "cannot accept a hook" in caplog.text, "accept failed")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        late.send(encode_frame(hello()))
        until(lambda: inbox.frames == 1, "accepted after the pause")
    assert caplog.text.count("cannot accept a hook") <= 2


# --- the meeting place ----------------------------------------------------------------------------


def test_a_stale_socket_is_replaced(tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dead:
        dead.bind(str(path))
    assert path.exists()
    meeting = UnixSocket(path)
    meeting.open().close()
    meeting.close()
    assert not path.exists()


@pytest.mark.parametrize("kind", [socket.SOCK_SEQPACKET, socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_live_socket_is_left_alone(tmp_path, kind):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, kind) as live:
        live.bind(str(path))
        if kind != socket.SOCK_DGRAM:
            live.listen()
        with pytest.raises(UnixSocketError, match=r"is listening on .* already: stop it, or choose"):
            UnixSocket(path).open()
        assert stat.S_ISSOCK(path.lstat().st_mode)


def test_a_file_or_link_is_never_removed(tmp_path):
    path = tmp_path / "s"
    for make in (lambda: path.write_text("precious"), lambda: path.symlink_to(tmp_path / "nowhere")):
        make()
        with pytest.raises(UnixSocketError, match="exists and is not a socket"):
            UnixSocket(path).open()
        assert path.is_symlink() or path.read_text() == "precious"
        path.unlink()


def test_a_path_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnixSocketError, match=r"socket .*file/s cannot be made: .*choose a writable path"):
        UnixSocket(tmp_path / "file" / "s").open()
    with pytest.raises(UnixSocketError, match="107 are possible: choose a shorter one"):
        UnixSocket(tmp_path / ("x" * 120)).open()


def test_only_the_owner_may_use_a_socket_of_his_own(tmp_path):
    meeting = UnixSocket(tmp_path / "own" / "s")
    listener = meeting.open()
    assert stat.S_IMODE((tmp_path / "own").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "own" / "s").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "own") == ["s"]
    listener.close()
    meeting.close()


def test_a_socket_that_somebody_else_made_since_is_not_removed(tmp_path):
    path = tmp_path / "s"
    meeting = UnixSocket(path)
    listener = meeting.open()
    path.unlink()
    other = UnixSocket(path)
    other_listener = other.open()
    meeting.close()
    assert path.exists()
    listener.close()
    other_listener.close()
    other.close()


# --- what one connection may say, without sockets -------------------------------------------------


def refusal_of(conversation, record):
    with pytest.raises(FrameError) as caught:
        conversation.decode(encode_frame(record))
    return caught.value.refusal


@pytest.fixture
def conversation(make_hello):
    conversation = FrameValidation(PEER, own_pid=lambda pid: None)
    conversation.decode(encode_frame(make_hello()))
    return conversation


def test_a_rank_speaks_for_itself_and_its_job_only(conversation, make_hello, make_step):
    decision = {"knob": "k", "from_value": 1, "to_value": 2, "step": 1, "wall_ns": 1, "reason": "r"}
    foreign = Decision(job="other", decision=1, kind="trial", expected_gain_ratio=None, **decision)
    for record in (make_step(rank=1), make_step(job="other"), foreign, make_hello(rank=1), make_hello(job="x")):
        assert refusal_of(conversation, record) is Refusal.IDENTITY
    conversation.decode(encode_frame(make_hello()))  # the same again is fine


def test_a_job_in_a_container_is_known_by_its_own_pid(make_hello):
    inside = FrameValidation(Peer(40213, 0, 0), own_pid={40213: 4242}.get)
    assert inside.decode(encode_frame(make_hello()))[1].pid == 4242
    unseen = FrameValidation(Peer(0, 0, 0), own_pid=lambda pid: None)
    assert unseen.decode(encode_frame(make_hello()))[1].pid == 4242
    liar = FrameValidation(Peer(40213, 0, 0), own_pid={40213: 17}.get)
    assert refusal_of(liar, make_hello()) is Refusal.IDENTITY


def test_impossible_values_are_refused(conversation, make_hello, make_step):
    status = TunerStatus(
        job="run-7", rank=0, state="off", detail="x" * 5000, step=0, wall_ns=0, exploration_ns=0, trials=0
    )
    for record in (
        make_step(total_steps=-1),
        make_step(dropped_records=-1),
        make_step(knobs=Knobs(values={str(n): n for n in range(ENTRIES_MAX + 1)})),
        make_step(knobs=Knobs(values={"bucket_bytes": "v" * 300})),
        status,
    ):
        assert refusal_of(conversation, record) is Refusal.MALFORMED
    for changes in ({"rank": 2}, {"rank": -1}, {"job": ""}, {"job": "j" * 300}, {"host": "h" * 300}):
        fresh = FrameValidation(PEER, own_pid=lambda pid: None)
        assert refusal_of(fresh, make_hello(**changes)) is Refusal.MALFORMED


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_make_a_conversation_raise_anything_but_a_refusal(payload, framed):
    conversation = FrameValidation(PEER, own_pid=lambda pid: None)
    frame = struct.pack(">2sBxI", b"PC", VERSION, len(payload)) + payload if framed else payload
    with pytest.raises(FrameError):
        conversation.decode(frame)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_real_frame_is_taken_as_a_record_or_refused(data):
    hello = {
        "type": "hello", "job": "j", "rank": 0, "local_rank": 0, "world_size": 1, "pid": 4242, "host": "h",
        "device": "cpu", "framework": "t", "pacecar_version": "0", "started_wall_ns": 1,
    }  # fmt: skip
    import msgspec

    payload = msgspec.msgpack.encode(hello)
    frame = bytearray(struct.pack(">2sBxI", b"PC", VERSION, len(payload)) + payload)
    for _ in range(data.draw(st.integers(0, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    conversation = FrameValidation(PEER, own_pid=lambda pid: None)
    board = DaemonState(FakeClock(), jobs_max=1, ranks_max=1, job_forget_seconds=1)
    try:
        record, said = conversation.decode(bytes(frame))
    except FrameError:
        return
    board.record(record, hello=said, uid=0, owner=1)
    assert not isinstance(record, StepRecord)
