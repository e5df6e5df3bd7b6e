"""Messages to systemd, received by a real datagram socket."""

import os
import socket
import time

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.systemd import Notifier


@pytest.fixture
def manager(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def heard(manager):
    manager.setblocking(False)
    said = []
    while True:
        try:
            said.append(manager.recv(4096).decode())
        except BlockingIOError:
            return said


def test_the_life_of_a_service_is_told_in_its_words(manager):
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.ready("serving\nWATCHDOG=1")
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.reloading()
    notifier.stopping()
    ready, reloading, stopping = heard(manager)
    assert ready == "READY=1\nSTATUS=serving WATCHDOG=1", "a status cannot smuggle in a second assignment"
    word, _, usec = reloading.partition("\nMONOTONIC_USEC=")
    assert word == "RELOADING=1"
    assert before <= int(usec) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert stopping.startswith("STOPPING=1")


def test_an_abstract_socket_is_reached():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0pacecar-test-{os.getpid()}")
        Notifier({"NOTIFY_SOCKET": f"@pacecar-test-{os.getpid()}"}).ready("here")
        assert heard(sock) == ["READY=1\nSTATUS=here"]


def test_the_watchdog_is_fed_before_half_its_time_and_only_while_the_beat_goes_on(manager):
    environ = {"NOTIFY_SOCKET": manager.getsockname(), "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(environ)
    assert notifier.interval_seconds < 1.0
    for tenth in range(31):
        notifier.feed(tenth * NS_PER_SECOND // 10, is_alive=tenth < 20)
    assert heard(manager) == ["WATCHDOG=1"] * 3, "at 0, 0.8 and 1.6 s; the beat stops at 2 s"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "", "WATCHDOG_USEC": "1000000"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"},
        {"NOTIFY_SOCKET": "/nowhere/at/all", "WATCHDOG_USEC": "soon"},
    ],
)
def test_where_nobody_listens_nothing_happens(environ):
    notifier = Notifier(environ)
    assert notifier.interval_seconds is None
    notifier.ready("x")
    notifier.feed(0, is_alive=True)
    notifier.stopping()


@pytest.mark.slow
def test_a_manager_that_does_not_listen_is_said_once_and_not_waited_for(manager, caplog):
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    begun = time.monotonic()
    for _ in range(5000):  # far more than its queue holds
        notifier.stopping()
    assert time.monotonic() - begun < 30
    assert len(caplog.records) == 1
