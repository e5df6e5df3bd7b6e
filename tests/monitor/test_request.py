"""Heads of requests: valid ones, refused ones, and clients that send one slowly or never."""

import socket
from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.monitor.http import server as web
from pacecar.monitor.http.request import HEAD_BYTES_MAX, HEADERS_MAX, HttpError, HttpResponse, ends, head, parse
from tests.kit.waiting import until
from tests.kit.web import page, web_server


def test_a_scrape_is_a_request():
    request = parse(
        b"GET /a%20b/c?name[]=x&y HTTP/1.1\r\nHost: here\r\nAccept:  text/plain \r\nX-A: 1\r\nx-a: 2\r\nX_B: 3\r\n\r\n"
    )
    assert request[:3] == ("GET", "/a b/c", "name[]=x&y")
    assert (request.header("accept"), request.header("x-a"), request.header("x-c")) == ("text/plain", "1,2", "")


@pytest.mark.parametrize(
    ("received", "status"),
    [
        (b"GET / HTTP/2\r\n\r\n", 400),
        (b"GET /\r\n\r\n", 400),
        (b"GET  / HTTP/1.1\r\n\r\n", 400),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", 400),
        (b"G\0T / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost : x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nHost: a\r\nhost: b\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n folded: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nA: \0\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n", 413),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", 413),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", 431),
    ],
)
def test_what_is_no_request_is_refused_and_not_repaired(received, status):
    with pytest.raises(HttpError) as caught:
        parse(received)
    assert int(caught.value.status[:3]) == status


def test_a_head_is_bounded():
    assert not ends(b"A" * HEAD_BYTES_MAX)
    with pytest.raises(HttpError, match="at most"):
        ends(b"A" * (HEAD_BYTES_MAX + 1))


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_but_a_refusal(received):
    with suppress(HttpError):
        parse(b"GET " + received + b"\r\n\r\n")


def test_the_administrators_headers_take_the_place_of_the_pages():
    text = head("200 OK", [("X-Frame-Options", "sameorigin"), ("A", "b")], [("X-Frame-Options", "deny")]).decode()
    assert "X-Frame-Options: deny" in text
    assert "sameorigin" not in text
    assert text.endswith("\r\n\r\n")


@pytest.fixture
def serve(monkeypatch):
    with ExitStack() as stack:

        def start(respond=page, **limits):
            for name, value in limits.items():
                monkeypatch.setattr(web, name, value)
            return stack.enter_context(web_server(respond))

        yield start


def ask(server, request=b"GET / HTTP/1.1\r\n\r\n"):
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(request)
        answer = b""
        while bits := client.recv(65536):
            answer += bits
        return answer


@pytest.mark.slow
def test_a_byte_at_a_time_is_a_request_and_too_slow_is_none(serve):
    server = serve(page)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        for byte in b"GET / HTTP/1.1\r\n\r\n":
            client.send(bytes([byte]))
        assert client.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")
    slow = serve(page, HEAD_SECONDS=0.3)
    with socket.create_connection(("127.0.0.1", slow.port), timeout=30) as client:

        def drip():
            with suppress(OSError):  # when it is hung up on
                client.send(b"A")  # each byte is within the time of a read; all together are not
            return slow.refused()["timeout"] == 1

        until(drip, "it is hung up on and counted")


@pytest.mark.slow
def test_who_does_not_read_is_hung_up_on_and_the_next_is_served(serve):
    large = b"x" * 20_000_000

    def respond(request):
        return page(request) if request.path == "/" else HttpResponse("200 OK", [], large)

    server = serve(respond, ANSWER_SECONDS=0.5)
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        client.sendall(b"GET /large HTTP/1.1\r\n\r\n")
        assert b"200 OK" in ask(server)
        until(lambda: server.refused()["timeout"] == 1, "it is hung up on")
        assert server.connections == 0


def test_a_large_head_a_body_and_head_requests_are_answered(serve):
    server = serve(page)
    assert ask(server, b"A" * (HEAD_BYTES_MAX + 100)).startswith(b"HTTP/1.1 431 ")
    assert ask(server, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    answer = ask(server, b"HEAD / HTTP/1.1\r\n\r\n")
    assert b"Content-Length: 3" in answer
    assert answer.endswith(b"\r\n\r\n")
    refused = {reason.value: count for reason, count in server.refused().items() if count}
    assert refused == {"head_size": 1, "body": 1}


def test_a_page_may_take_the_connection_over_once_its_first_words_have_left(serve):
    taken = []

    server = serve(
        lambda request: HttpResponse("200 OK", [("Content-Type", "text/event-stream")], b"retry: 1\n\n", taken.append)
    )
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as viewer:
        viewer.sendall(b"GET /events HTTP/1.1\r\n\r\n")
        until(lambda: taken, "the page has it")
        assert server.connections == 0, "it is no client of the server any more"
        taken[0].setblocking(True)
        taken[0].sendall(b"data: 2\n\n")
        taken[0].close()
        said = viewer.makefile("rb").read()
    assert said.startswith(b"HTTP/1.1 200 OK\r\n")
    assert said.endswith(b"\r\n\r\nretry: 1\n\ndata: 2\n\n")
    assert ask(server, b"HEAD /events HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 200")
    assert len(taken) == 1, "of a HEAD nothing goes on"
