"""Maps each request to its page, and answers 503 with the reason while the numbers are old.

A scraper that gets a 503 reports the target as down; frozen values would look like an idle machine.  The page for
people and its files are served all the same, and show that they receive no data.

Left out on purpose: anything that writes.  Permission to read numbers must not be permission to change a job.
"""

from __future__ import annotations

from collections.abc import Callable

from .content_negotiation import choose_coding
from .request import HttpRequest, HttpResponse, plain

__all__ = ["RETRY_SECONDS", "pages"]

RETRY_SECONDS = 5
"""Retry-After of a 503."""

NUMBERS = frozenset({"/metrics", "/api/snapshot", "/api/history", "/api/events", "/-/healthy"})
"""Addresses that serve the current state."""


def pages(
    metrics: Callable[[HttpRequest], HttpResponse],
    screens: Callable[[HttpRequest], HttpResponse | None],
    staleness_reason: Callable[[], str | None],
    has_begun: Callable[[], bool] = lambda: True,
) -> Callable[[HttpRequest], HttpResponse]:
    """Return a function that passes each request to its page; `screens` returns None for unknown addresses.

    `staleness_reason` returns why the numbers are old (None: they are not), `has_begun` whether there are any yet.
    """

    def respond(request: HttpRequest) -> HttpResponse:
        is_read = request.method in ("GET", "HEAD")
        why = staleness_reason() if is_read and request.path in NUMBERS else None
        if why is None and request.path == "/-/healthy" and not has_begun():
            why = "no tick yet"
        if why is not None:
            return plain("503 Service Unavailable", why, ("Retry-After", str(RETRY_SECONDS)))
        if not is_read:
            return plain("405 Method Not Allowed", "use GET", ("Allow", "GET, HEAD"))
        if choose_coding(request.header("accept-encoding")) is None:
            return plain("406 Not Acceptable", "Accept-Encoding refuses both codings that exist: identity and gzip")
        if request.path == "/metrics":
            return metrics(request)
        if request.path == "/-/healthy":
            return plain("200 OK", "ok")
        return screens(request) or plain("404 Not Found", "try /, /metrics, /api/snapshot or /-/healthy")

    return respond
