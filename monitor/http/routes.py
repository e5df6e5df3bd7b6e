"""Serves the page and its files, the status document, its history, and an event stream that pushes each tick.

    tick --> figures --> history         at each tick, whoever looks
         --> document --> one frame      where there are viewers, for all of them
    request --> document --> /api/snapshot   built anew when the last one is older than FRESH_SECONDS

A request reads no driver and no file, and cannot change anything: there is no address to post to.  Left out: /metrics
and /-/ (`web`), the sockets (`server`), and what a figure means (`pacecar.records.status_document`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample
from pacecar.records.status_document import StatusDocument

from ..catalog_sample import sample
from .content_negotiation import choose_coding, coded
from .event_stream import EventStream
from .static_files import PAGE_HEADERS, load
from .status_history import Charted, HistoryKeeper, points

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["FRESH_SECONDS", "HAND_OVER", "PUSH_SECONDS_MIN", "SOURCE", "Routes"]

HAND_OVER = "pacecar.hand_over"
"""Key of the WSGI environment: a function to which a page passes what takes the connection over after the answer."""

SOURCE = "pacecar.source"
"""Key of the WSGI environment: the client's source, among which bounds are shared out (`client_source`)."""

PUSH_SECONDS_MIN = 0.9
"""However short the period, no viewer is pushed to more often: people read no faster."""

FRESH_SECONDS = 0.25
"""A document younger than this is served again: a flood of requests builds four a second."""

RETRY_MS = 2000
"""After how long a page that was disconnected connects again."""


class Routes:
    """Everything under / but /metrics and /-/.  `tick` is called by one thread, requests come from any."""

    def __init__(
        self,
        clock: Clock,
        period_seconds: float,
        build: Callable[[], StatusDocument],
        figures: Callable[[], Charted] | None = None,
    ) -> None:
        """`build` returns the document of this moment, `figures` what of it the history keeps, at less cost.

        They are never called by two threads at a time.
        """
        self._clock = clock
        self._build = build
        self._figures: Callable[[], Charted] = figures or build
        self._lock = threading.Lock()
        self._assets = load()
        self._history = HistoryKeeper(max(period_seconds, 1.0))
        self._made: bytes | None = None
        self._made_ns = 0
        self._pushed_ns: int | None = None
        self.viewers = EventStream(clock)

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many series of the last tick the history had no room for; `viewers` yields its own."""
        yield sample("pacecar_daemon_history_series_left_out", self._history.left_out)

    def start(self) -> None:
        """Begin to push."""
        self.viewers.start()

    def close(self) -> None:
        """Disconnect all viewers."""
        self.viewers.close()

    def tick(self) -> None:
        """Add this tick to the history, and push it to all viewers."""
        now_ns = self._clock.monotonic_ns()
        if self._pushed_ns is not None and now_ns - self._pushed_ns < PUSH_SECONDS_MIN * NS_PER_SECOND:
            return
        self._pushed_ns = now_ns
        wall_seconds = self._clock.wall_ns() / NS_PER_SECOND
        with self._lock:
            document = self._build() if self.viewers.count else None
            figures = self._figures() if document is None else document
        point = self._history.add(round(wall_seconds, 3), points(figures))
        if document is not None:
            self.viewers.push(_event("snapshot", document) + _event("point", [document.time_seconds, point]))

    def snapshot(self) -> bytes:
        """Return the document as JSON."""
        with self._lock:
            now_ns = self._clock.monotonic_ns()
            if self._made is None or now_ns - self._made_ns >= FRESH_SECONDS * NS_PER_SECOND:
                self._made = msgspec.json.encode(self._build())
                self._made_ns = now_ns
            return self._made

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes] | None:
        """Answer a GET or HEAD (WSGI); None: there is no such address here."""
        path = environ.get("PATH_INFO", "") or "/"
        if path == "/api/snapshot":
            return _json(environ, start_response, self.snapshot())
        if path == "/api/history":
            return _json(environ, start_response, self._history.json())
        if path == "/api/events":
            return self._events(environ, start_response)
        return self._asset(path, environ, start_response) if path in self._assets else None

    def _asset(self, path: str, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        asset = self._assets[path]
        caching = [("Cache-Control", "no-cache"), ("ETag", asset.etag), ("Vary", "Accept-Encoding")]
        if asset.etag in environ.get("HTTP_IF_NONE_MATCH", ""):
            start_response("304 Not Modified", [*caching, *PAGE_HEADERS])
            return [b""]
        body = asset.body
        if choose_coding(environ.get("HTTP_ACCEPT_ENCODING", "")) == "gzip":
            body = asset.gzipped
            caching.append(("Content-Encoding", "gzip"))
        length = ("Content-Length", str(len(body)))
        start_response("200 OK", [("Content-Type", asset.kind), length, *caching, *PAGE_HEADERS])
        return [body]

    def _events(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        hand_over = environ.get(HAND_OVER)
        if hand_over is None:
            status, body = "503 Service Unavailable", b"this server pushes nothing; /api/snapshot still answers\n"
            return _answer(start_response, status, "text/plain", body, ("Retry-After", "10"))
        headers = [("Content-Type", "text/event-stream"), ("Cache-Control", "no-store"), ("X-Accel-Buffering", "no")]
        start_response("200 OK", [*headers, *PAGE_HEADERS])
        if environ["REQUEST_METHOD"] == "HEAD":
            return [b""]
        hand_over(partial(self.viewers.admit, source=environ.get(SOURCE, "")))
        return self._greeting()

    def _greeting(self) -> Iterator[bytes]:
        # A generator, not a list: of a list the server knows the length and says it, and a browser would stop there.
        yield b"retry: %d\n\nevent: snapshot\ndata: %b\n\n" % (RETRY_MS, self.snapshot())


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def _json(environ: WSGIEnvironment, start_response: StartResponse, body: bytes) -> list[bytes]:
    body, headers = coded(body, environ.get("HTTP_ACCEPT_ENCODING", ""))
    return _answer(start_response, "200 OK", "application/json", body, *headers)


def _answer(
    start_response: StartResponse, status: str, kind: str, body: bytes, *headers: tuple[str, str]
) -> list[bytes]:
    length = ("Content-Length", str(len(body)))
    start_response(status, [("Content-Type", kind), length, ("Cache-Control", "no-store"), *headers, *PAGE_HEADERS])
    return [body]
