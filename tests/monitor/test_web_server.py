"""The server survives what clients and the machine do to it, and its threads are bounded."""

import socket
import threading
import time
from contextlib import ExitStack

import pytest

from pacecar.monitor.http.request import HttpResponse
from pacecar.monitor.http.web import pages
from tests.kit.net import get, scrape
from tests.kit.web import page, web_server

MANY = 8


@pytest.fixture
def serve():
    with ExitStack() as stack:
        yield lambda metrics: stack.enter_context(web_server(pages(metrics, lambda request: None, lambda: None)))


def test_a_large_answer_arrives_whole(serve):
    body = b"x" * 3_000_000

    server = serve(lambda request: HttpResponse("200 OK", [("Content-Length", str(len(body)))], body))
    assert get(server.port).body == body


def test_a_page_that_raises_is_500_and_the_next_request_is_answered(serve, caplog):
    """The traceback goes to the log: it is a bug of ours."""
    fail = [True] * MANY * 2

    def odd(request):
        if fail:
            fail.pop()
            raise ZeroDivisionError("by zero")
        return page(request)

    server = serve(odd)
    for _ in range(MANY * 2):
        assert get(server.port).status == 500
    assert scrape(server.port) == "ok\n"
    assert "ZeroDivisionError" in caplog.text


def test_clients_that_hang_up_in_the_middle_leave_every_thread_at_work(serve):
    server = serve(page)
    for part in (
        b"",
        b"GET",
        b"GET /metrics HTTP/1.1\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
        b"\0\xff\r\n\r\n",
    ):
        for _ in range(MANY):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                client.sendall(part)
    assert {scrape(server.port) for _ in range(MANY * 2)} == {"ok\n"}


def test_two_threads_serve_whoever_comes_and_end_with_the_server(serve):
    before = set(threading.enumerate())
    server = serve(page)
    assert len(set(threading.enumerate()) - before) == 2
    for _ in range(3 * MANY):
        get(server.port)
    assert len(set(threading.enumerate()) - before) == 2
    begun = time.monotonic()
    server.close()
    assert time.monotonic() - begun < 3
    assert set(threading.enumerate()) == before


def test_closing_does_not_wait_for_a_slow_client(serve):
    server = serve(page)
    with socket.create_connection(("127.0.0.1", server.port)):
        time.sleep(0.05)  # it is accepted and sends nothing
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 3
