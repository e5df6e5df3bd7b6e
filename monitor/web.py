"""How do people and Prometheus reach the daemon?  A small HTTP server with bounded threads and four addresses.

The standard server resolves its own host name when it binds, which hangs where DNS is broken, and makes a thread for
every connection, however many come and however slowly they read.  Both are mended here: a fixed number of threads waits
for connections and answers what it takes.  That is also what makes a scrape short while collectors are at work: each
wait for another thread (a selector that hands over, a thread that starts, a second send) is a wait for the interpreter,
behind all collectors that want it.

Left out on purpose: TLS and passwords.  The daemon listens on 127.0.0.1 unless it is told otherwise; a proxy adds them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from socketserver import TCPServer
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["WebError", "WebServer", "pages"]

REQUESTS_MAX = 8
"""Requests answered at one time; Prometheus, a page and a person make three.  The others wait in the kernel's queue."""

REQUEST_SECONDS = 5.0
"""How long a client may take over a read or a write."""

ANSWER_BYTES = 1024 * 1024
"""An answer that is no larger leaves in one piece."""

ACCEPT_PAUSE_SECONDS = 0.1
"""After a failed accept: without file descriptors it would fail again at once, for ever."""

CLOSE_SECONDS = 0.5
"""What stopping waits for those threads that are still answering."""

_log = logging.getLogger(__name__)

_INDEX = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pacecar</title></head>
<body><h1>pacecar</h1><ul>
<li><a href="/metrics">/metrics</a> for Prometheus and OpenMetrics</li>
<li><a href="/api/snapshot">/api/snapshot</a> the latest readings and jobs as JSON</li>
<li><a href="/-/healthy">/-/healthy</a> 200 while the daemon ticks</li>
</ul></body></html>
"""


class WebError(RuntimeError):
    """The address cannot be had; the message names it and what to do."""


def pages(metrics: WSGIApplication, snapshot: Callable[[], bytes], is_healthy: Callable[[], bool]) -> WSGIApplication:
    """Return the application that hands each request to its page."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if path == "/metrics":
            return metrics(environ, start_response)
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return _answer(start_response, "405 Method Not Allowed", "text/plain", b"use GET\n")
        if path == "/":
            return _answer(start_response, "200 OK", "text/html; charset=utf-8", _INDEX)
        if path == "/api/snapshot":
            return _answer(start_response, "200 OK", "application/json", snapshot())
        if path == "/-/healthy":
            if is_healthy():
                return _answer(start_response, "200 OK", "text/plain", b"ok\n")
            return _answer(start_response, "503 Service Unavailable", "text/plain", b"no tick for too long\n")
        return _answer(start_response, "404 Not Found", "text/plain", b"there is /metrics, /api/snapshot, /-/healthy\n")

    return app


def _answer(start_response: StartResponse, status: str, kind: str, body: bytes) -> list[bytes]:
    start_response(status, [("Content-Type", kind), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")])
    return [body]


class _Handler(WSGIRequestHandler):
    timeout = REQUEST_SECONDS
    wbufsize = ANSWER_BYTES  # head and body leave in one send

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape a second is no news."""

    def address_string(self) -> str:
        """Return the address as it is: a name costs a DNS query for each request."""
        return str(self.client_address[0])


class _Server(WSGIServer):
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self.is_closing = False
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for our own name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def answer(self) -> None:
        """Take requests and answer them, one at a time, until the server closes; run by several threads."""
        while not self.is_closing:
            try:
                request, client_address = self.get_request()
            except OSError:
                if not self.is_closing:  # out of file descriptors, or the client went away while it waited
                    time.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            try:
                self.finish_request(request, client_address)
            except Exception:  # noqa: BLE001  the client went away in the middle, which is its right
                _log.debug("a request was not answered", exc_info=True)
            finally:
                self.shutdown_request(request)


class WebServer:
    """Serves a WSGI application at an address."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._threads: list[threading.Thread] = []

    @property
    def port(self) -> int:
        """The port that is bound; meaningful between `bind` and `close` where port 0 was asked for."""
        return self._server.server_port if self._server is not None else self._port

    def bind(self) -> None:
        """Take the address; raises WebError."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            self._server = _Server((str(address[0]), self._port), family)
        except OSError as error:
            raise WebError(
                f"cannot listen on {self._host}:{self._port}: {error.strerror or error};"
                " stop what listens there (another pacecar daemon?),"
                " or choose another address with --host and --port or [daemon] host and port"
            ) from error

    def start(self, app: WSGIApplication) -> None:
        """Serve `app` on threads of our own."""
        assert self._server is not None, "bind comes first"
        self._server.set_app(app)
        self._threads = [
            threading.Thread(target=self._server.answer, name=f"pacecar-web-{number}", daemon=True)
            for number in range(REQUESTS_MAX)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving and free the address; a client that reads slowly is left behind."""
        if self._server is None:
            return
        self._server.is_closing = True
        with suppress(OSError):  # it wakes the threads that wait in accept(2), on Linux
            self._server.socket.shutdown(socket.SHUT_RDWR)
        limit = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, limit - time.monotonic()))
        self._threads = []
        self._server.server_close()
        self._server = None
