"""Maps each request to its page, and answers 503 with the reason while the numbers are old; `server` serves it.

Whoever scrapes a 503 sees that the target is down; frozen values would look like a machine at rest.  The page for
people and its files are served all the same; it shows that it receives no data.

Left out on purpose: anything that writes.  Permission to read numbers must not be permission to change a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from .content_negotiation import choose_coding

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

    Screen = Callable[[WSGIEnvironment, StartResponse], Iterable[bytes] | None]

__all__ = ["RETRY_SECONDS", "pages"]

RETRY_SECONDS = 5
"""Retry-After of a 503."""

NUMBERS = frozenset({"/metrics", "/api/snapshot", "/api/history", "/api/events", "/-/healthy"})
"""Addresses that serve the present state."""


def pages(
    metrics: WSGIApplication,
    screens: Screen,
    staleness_reason: Callable[[], str | None],
    has_begun: Callable[[], bool] = lambda: True,
) -> WSGIApplication:
    """Return the application that passes each request to its page; `screens` answers None for other addresses.

    `staleness_reason` says why numbers would be old, None while they are not; `has_begun` whether there are any yet.
    """

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "/")
        is_read = environ["REQUEST_METHOD"] in ("GET", "HEAD")
        why = staleness_reason() if is_read and path in NUMBERS else None
        if why is None and path == "/-/healthy" and not has_begun():
            why = "no tick yet"
        if why is not None:
            return _refuse(start_response, why)
        if not is_read:
            return _answer(start_response, "405 Method Not Allowed", "text/plain", b"use GET\n", ("Allow", "GET, HEAD"))
        if choose_coding(environ.get("HTTP_ACCEPT_ENCODING", "")) is None:
            said = b"every coding is refused by Accept-Encoding; there are identity and gzip\n"
            return _answer(start_response, "406 Not Acceptable", "text/plain", said)
        if path == "/metrics":
            return metrics(environ, start_response)
        if path == "/-/healthy":
            return _answer(start_response, "200 OK", "text/plain", b"ok\n")
        answer = screens(environ, start_response)
        if answer is not None:
            return answer
        return _answer(
            start_response, "404 Not Found", "text/plain", b"there is /, /metrics, /api/snapshot, /-/healthy\n"
        )

    return app


def _refuse(start_response: StartResponse, why: str) -> list[bytes]:
    body = f"{why}\n".encode()
    headers = [("Content-Type", "text/plain"), ("Content-Length", str(len(body))), ("Cache-Control", "no-store")]
    start_response("503 Service Unavailable", [*headers, ("Retry-After", str(RETRY_SECONDS))])
    return [body]


def _answer(
    start_response: StartResponse, status: str, kind: str, body: bytes, *headers: tuple[str, str]
) -> list[bytes]:
    length = ("Content-Length", str(len(body)))
    start_response(status, [("Content-Type", kind), length, ("Cache-Control", "no-store"), *headers])
    return [body]
