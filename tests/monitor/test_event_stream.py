"""Frames reach every viewer, and no viewer delays another, blocks the daemon or fills its memory."""

import socket
import time

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.http.event_stream import EventStream
from tests.kit.own_samples import value_of
from tests.kit.waiting import until

DISPLACED, DROPPED = "pacecar_daemon_viewers_displaced_total", "pacecar_daemon_viewers_dropped_total"


@pytest.fixture
def make_viewers():
    made = []

    def make(**limits):
        made.append(EventStream(SystemClock(), **limits))
        made[-1].start()
        return made[-1]

    yield make
    for viewers in made:
        viewers.close()


@pytest.fixture
def look():
    """Admit one more viewer and return its end."""
    ends = []

    def one(viewers):
        ours, theirs = socket.socketpair()
        theirs.settimeout(10)
        ends.append(theirs)
        viewers.admit(ours)
        return theirs

    yield one
    for end in ends:
        end.close()


def read(end, size):
    said = b""
    while len(said) < size:
        part = end.recv(65536)
        if not part:
            break
        said += part
    return said


def test_every_viewer_gets_the_same_frame(make_viewers, look):
    viewers = make_viewers()
    ends = [look(viewers) for _ in range(5)]
    until(lambda: len(viewers._viewers) == 5, "they are taken in")
    viewers.push(b"data: 1\n\n")
    assert {end.recv(100).replace(b": still here\n\n", b"") or end.recv(100) for end in ends} == {b"data: 1\n\n"}
    assert value_of(viewers, "pacecar_daemon_viewer_frames_total") == 1


@pytest.mark.slow
def test_a_slow_viewer_is_hung_up_and_the_others_lose_nothing(make_viewers, look):
    viewers = make_viewers(slow_seconds=0.5)
    slow, quick = look(viewers), look(viewers)
    until(lambda: len(viewers._viewers) == 2, "they are taken in")
    frame, heard = b"data: " + b"x" * 2_000_000 + b"\n\n", 0
    until(
        lambda: (viewers.push(frame), heard, read(quick, 100_000), value_of(viewers, DROPPED) == 1)[-1],
        "the slow one is dropped",
    )
    assert viewers.count == 1
    assert slow.recv(10_000_000)  # what the kernel had taken, and then the end


def test_pushing_never_waits_for_a_viewer_that_reads_nothing(make_viewers, look):
    viewers = make_viewers()
    look(viewers)
    until(lambda: len(viewers._viewers) == 1, "it is taken in")
    begun = time.monotonic()
    for _ in range(1000):
        viewers.push(b"x" * 100_000)
    assert time.monotonic() - begun < 2


def test_a_new_viewer_gets_the_place_of_the_one_that_came_first(make_viewers, look):
    viewers = make_viewers(viewers_max=2)
    first, second = look(viewers), look(viewers)
    third = look(viewers)
    assert read(first, 1000).replace(b": still here\n\n", b"") == b"", "hung up"
    until(lambda: len(viewers._viewers) == 2, "the new one is taken in")
    viewers.push(b"data: 1\n\n")
    for end in (second, third):
        said = b""
        while not said.endswith(b"data: 1\n\n"):
            part = end.recv(100)
            assert part, "it was hung up"
            said += part
    assert (viewers.count, value_of(viewers, DISPLACED), value_of(viewers, DROPPED)) == (2, 1, 0)


def test_who_leaves_or_speaks_is_forgotten_and_makes_room(make_viewers, look):
    viewers = make_viewers(viewers_max=2)
    gone, loud = look(viewers), look(viewers)
    gone.close()
    loud.send(b"GET / HTTP/1.1\r\n\r\n")
    until(lambda: viewers.count == 0, "both places are free")
    look(viewers)
    look(viewers)
    assert value_of(viewers, DISPLACED) == 0


def test_closing_hangs_up_and_ends_the_thread(look):
    viewers = EventStream(SystemClock())
    viewers.start()
    end = look(viewers)
    viewers.close()
    assert read(end, 1000).replace(b": still here\n\n", b"") == b""
    viewers.push(b"late")
    assert look(viewers).recv(10) == b""
    assert viewers.count == 0
