"""What the daemon says without being asked reaches the hook; what cannot be understood costs nobody anything."""

import socket

import pytest

from pacecar.profiler.transport.daemon_socket import COMMANDS_PER_LOOK, DaemonSocket
from pacecar.records import Command, Goodbye, Throttling
from pacecar.records.host_signals import HostSignals
from pacecar.wire import FRAME_BYTES_MAX, encode_frame
from tests.kit.listeners import HeardInbox
from tests.kit.records import job_hello
from tests.kit.waiting import until

pytestmark = pytest.mark.slow

WAIT_SECONDS = 10.0

HELLO = job_hello(interface="eth0", hears_signals=True)


class Line:
    """A connection to a hook whose listeners keep what they hear."""

    def __init__(self, path):
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(1)
        inbox = HeardInbox()
        self.heard, self.obeyed = inbox.news, inbox.commands
        self.outbox = DaemonSocket(str(path), HELLO, inbox=inbox)
        self.outbox.put(Goodbye(job="j", rank=0, reason="r", wall_ns=1))
        self.peer, _ = self.listener.accept()

    def close(self):
        self.outbox.close(1.0)
        self.peer.close()
        self.listener.close()


@pytest.fixture
def line(tmp_path):
    line = Line(tmp_path / "s")
    yield line
    line.close()


def signals(number):
    return HostSignals(period_ns=3, taken_ns=number, host_available_bytes=0)


@pytest.mark.slow
def test_signals_and_throttling_come_in_order_and_a_hang_up_is_told(line):
    told = [signals(1), Throttling(device_uuid="GPU-1", reasons=()), signals(2)]
    for news in told:
        line.peer.send(encode_frame(news))
    until(lambda: len(line.heard) == 3)
    assert line.heard == told
    line.peer.close()
    until(lambda: line.heard[-1] is None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "frame",
    [
        b"x",
        encode_frame(signals(1))[:-3],
        encode_frame(signals(1)) + b"more",
        encode_frame(HostSignals(period_ns=-1, taken_ns=1)),
        encode_frame(signals(1)).replace(b"host_signals", b"host_signalz"),
        bytes(range(200)),
    ],
)
def test_a_frame_that_is_not_understood_is_complained_of_once_and_the_next_is_taken(line, frame, caplog):
    for _ in range(3):
        line.peer.send(frame)
    line.peer.send(encode_frame(signals(7)))
    line.peer.send(encode_frame(Command(number=1, action="tune", at_step=0)))
    until(lambda: line.obeyed)
    assert line.heard == [signals(7)]
    assert len([r for r in caplog.records if "does not understand" in r.getMessage()]) == 1


def test_an_oversized_frame_is_cut_by_the_kernel_and_refused(line):
    line.peer.send(b"PC" + b"\0" * (FRAME_BYTES_MAX + 100))
    line.peer.send(encode_frame(signals(7)))
    until(lambda: line.heard)
    assert line.heard == [signals(7)]


@pytest.mark.slow
def test_a_daemon_that_talks_without_end_does_not_keep_records_from_leaving(line):
    for number in range(5 * COMMANDS_PER_LOOK):
        line.peer.send(encode_frame(signals(number)))
    line.peer.settimeout(WAIT_SECONDS)
    line.peer.recv(65536)
    line.peer.recv(65536)
    line.outbox.put(Goodbye(job="j", rank=0, reason="later", wall_ns=2))
    assert b"later" in line.peer.recv(65536)
    until(lambda: len(line.heard) == 5 * COMMANDS_PER_LOOK)
