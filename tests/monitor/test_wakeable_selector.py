"""A thread that waits for sockets is woken by others, once for many, and never by writing into a stranger's file."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time

import pytest

from pacecar.monitor.wakeable_selector import WakeableSelector


@pytest.mark.slow
def test_a_wake_up_ends_the_wait_is_no_event_and_is_forgotten() -> None:
    selector = WakeableSelector()
    here, there = socket.socketpair()
    selector.register(here, selectors.EVENT_READ, "here")
    waker = threading.Timer(0.05, selector.wake)
    waker.start()
    assert selector.select(30.0) == []
    waker.join()
    for _ in range(100_000):  # more than a pipe holds
        selector.wake()
    there.send(b"x")
    assert [key.data for key, _ in selector.select(30.0)] == ["here"]
    here.recv(1)
    begun = time.monotonic()
    assert selector.select(0.05) == []
    assert time.monotonic() - begun >= 0.05, "all of them were one"
    selector.close()
    here.close()
    there.close()


def test_what_wakes_a_closed_one_writes_into_no_other_file() -> None:
    selector = WakeableSelector()
    selector.close()
    selector.close()
    pipes = [os.pipe() for _ in range(4)]  # which get the numbers that were its
    selector.wake()
    for read, write in pipes:
        os.set_blocking(read, False)
        with pytest.raises(BlockingIOError):
            os.read(read, 1)
        os.close(read)
        os.close(write)
