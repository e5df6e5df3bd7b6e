"""What is at which address?  The few pages of the daemon; `server` serves them.

Left out on purpose: anything that writes.  Whoever may read numbers may not thereby change a job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["pages"]

_INDEX = b"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>pacecar</title></head>
<body><h1>pacecar</h1><ul>
<li><a href="/metrics">/metrics</a> for Prometheus and OpenMetrics</li>
<li><a href="/api/snapshot">/api/snapshot</a> the latest readings and jobs as JSON</li>
<li><a href="/-/healthy">/-/healthy</a> 200 while the daemon ticks</li>
</ul></body></html>
"""


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
