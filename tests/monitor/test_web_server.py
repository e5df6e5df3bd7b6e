"""The server survives what clients and the machine do to it, and its threads are bounded."""

import http.client
import socket
import threading
import time

import pytest

from pacecar.monitor.http.server import WebServer
from pacecar.monitor.http.web import pages

MANY = 8


@pytest.fixture
def serve():
    started = []

    def start(metrics):
        server = WebServer("127.0.0.1", 0)
        server.bind()
        server.start(pages(metrics, lambda environ, start_response: None, lambda: None))
        started.append(server)
        return server

    yield start
    for server in started:
        server.close()


def page(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", "3")])
    return [b"ok\n"]


def get(port, path="/metrics"):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def test_a_large_answer_arrives_whole(serve):
    body = b"x" * 3_000_000

    def large(environ, start_response):
        start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
        return [body]

    assert get(serve(large).port) == (200, body)


def test_a_page_that_raises_is_500_and_the_next_request_is_answered(serve, caplog):
    """The traceback goes to the log: it is a bug of ours."""
    fail = [True] * MANY * 2

    def odd(environ, start_response):
        if fail:
            fail.pop()
            raise ZeroDivisionError("by zero")
        return page(environ, start_response)

    server = serve(odd)
    for _ in range(MANY * 2):
        assert get(server.port)[0] == 500
    assert get(server.port) == (200, b"ok\n")
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
    answers = [get(server.port) for _ in range(MANY * 2)]
    assert set(answers) == {(200, b"ok\n")}


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
        time.sleep(0.05)  # it is accepted, and says nothing
        begun = time.monotonic()
        server.close()
        assert time.monotonic() - begun < 3
