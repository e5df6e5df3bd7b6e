"""What is at which address?  The few pages of the daemon; `server` serves them.

Left out on purpose: anything that writes.  Whoever may read numbers may not thereby change a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pacecar.monitor.negotiation import choose_coding

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    Screen = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes] | None]

__all__ = ["pages"]


def pages(metrics: WSGIApplication, screens: Screen, is_healthy: Callable[[], bool]) -> WSGIApplication:
    """Return the application that hands each request to its page; `screens` answers None for what is not its own."""

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            allowed = ("Allow", "GET, HEAD")
            return _answer(start_response, "405 Method Not Allowed", "text/plain", b"use GET\n", allowed)
        if choose_coding(environ.get("HTTP_ACCEPT_ENCODING", "")) is None:
            said = b"every coding is refused by Accept-Encoding; there are identity and gzip\n"
            return _answer(start_response, "406 Not Acceptable", "text/plain", said)
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/-/healthy":
            if is_healthy():
                return _answer(start_response, "200 OK", "text/plain", b"ok\n")
            return _answer(start_response, "503 Service Unavailable", "text/plain", b"no tick for too long\n")
        answer = screens(environ, start_response)
        if answer is not None:
            return answer
        return _answer(
            start_response, "404 Not Found", "text/plain", b"there is /, /metrics, /api/snapshot, /-/healthy\n"
        )

    return app


def _answer(
    start_response: StartResponse, status: str, kind: str, body: bytes, *headers: tuple[str, str]
) -> list[bytes]:
    length = ("Content-Length", str(len(body)))
    start_response(status, [("Content-Type", kind), length, ("Cache-Control", "no-store"), *headers])
    return [body]
