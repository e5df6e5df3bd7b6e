"""How do people and Prometheus reach the daemon?  A small HTTP server with bounded threads and four addresses.

The standard server resolves its own host name when it binds, which hangs where DNS is broken, and makes a thread for
every connection, however many come and however slowly they read.  Both are mended here.

Left out on purpose: TLS and passwords.  The daemon listens on 127.0.0.1 unless it is told otherwise; a proxy adds them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["WebError", "WebServer", "pages"]

REQUESTS_MAX = 16
"""Requests answered at one time; Prometheus, a page and a person make three."""

REQUEST_SECONDS = 5.0
"""How long a client may take over a read or a write."""

_STOP_POLL_SECONDS = 0.25

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

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a scrape a second is no news."""

    def address_string(self) -> str:
        """Return the address as it is: a name costs a DNS query for each request."""
        return str(self.client_address[0])


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], family: socket.AddressFamily) -> None:
        self.address_family = family
        self._slots = threading.BoundedSemaphore(REQUESTS_MAX)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for our own name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Answer on a thread of its own while there are any left, else hang up."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client_address: object
    ) -> None:
        """Give the slot back whatever happened."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing: the client went away in the middle, which is its right."""


class WebServer:
    """Serves a WSGI application at an address."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._server: _Server | None = None
        self._thread: threading.Thread | None = None

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
        """Serve `app` on a thread."""
        assert self._server is not None, "bind comes first"
        self._server.set_app(app)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_STOP_POLL_SECONDS,), name="pacecar-web", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the address."""
        if self._server is None:
            return
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join()
            self._thread = None
        self._server.server_close()
        self._server = None
