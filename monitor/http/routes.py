"""Serves the page and its files, the status document, its history, and an event stream that pushes each tick.

    tick --> figures --> history             at each tick, viewers or not
         --> document --> one frame          if there are viewers, for all of them
    request --> document --> /api/snapshot   rebuilt if the last one is older than FRESH_SECONDS

A request reads no driver and no file, and cannot change anything: no address accepts a POST.  Left out: /metrics and
/-/ (`web`), the sockets (`server`), and what a figure means (`pacecar.records.status_document`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample
from pacecar.records.status_document import StatusDocument

from ..catalog_sample import sample
from .content_negotiation import choose_coding, coded
from .event_stream import EventStream
from .request import HttpRequest, HttpResponse
from .static_files import PAGE_HEADERS, load
from .status_history import Charted, HistoryKeeper, points

__all__ = ["FRESH_SECONDS", "PUSH_SECONDS_MIN", "Routes"]

PUSH_SECONDS_MIN = 0.9
"""However short the period, frames are pushed no more often: people read no faster."""

FRESH_SECONDS = 0.25
"""A document younger than this is served again: a flood of requests builds four a second."""

ASKED_SECONDS = 3.0
"""For this long after a request for a document another one is expected: `pacecar top` asks every second or two."""

RETRY_MS = 2000
"""A page that lost its connection connects again after this time."""


class Routes:
    """Everything under / except /metrics and /-/.  One thread calls `tick`; requests may come from any."""

    def __init__(
        self,
        clock: Clock,
        period_seconds: float,
        build: Callable[[], StatusDocument],
        figures: Callable[[], Charted] | None = None,
    ) -> None:
        """`build` returns the current document; `figures` only the part that the history keeps, which costs less.

        Two threads never call them at the same time.
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
        """Yield how many series of the last tick did not fit into the history; `viewers` yields its own samples."""
        yield sample("pacecar_daemon_history_series_left_out", self._history.left_out)

    def start(self) -> None:
        """Begin to push."""
        self.viewers.start()

    def close(self) -> None:
        """Disconnect all viewers."""
        self.viewers.close()

    def is_awaited(self) -> bool:
        """Return whether the page has viewers, or a client asked for a document recently."""
        asked_ns, now_ns = self._made_ns if self._made is not None else None, self._clock.monotonic_ns()
        return self.viewers.count > 0 or (asked_ns is not None and now_ns - asked_ns < ASKED_SECONDS * NS_PER_SECOND)

    def tick(self) -> None:
        """Add this tick to the history and push it to all viewers."""
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

    def __call__(self, request: HttpRequest) -> HttpResponse | None:
        """Answer a GET or HEAD; None if there is no such address here."""
        path = request.path or "/"
        if path == "/api/snapshot":
            return _json(request, self.snapshot())
        if path == "/api/history":
            return _json(request, self._history.json())
        if path == "/api/events":
            headers = [
                ("Content-Type", "text/event-stream"),
                ("Cache-Control", "no-store"),
                ("X-Accel-Buffering", "no"),
            ]
            greeting = b"retry: %d\n\nevent: snapshot\ndata: %b\n\n" % (RETRY_MS, self.snapshot())
            admit = partial(self.viewers.admit, source=request.source)
            return HttpResponse("200 OK", [*headers, *PAGE_HEADERS], greeting, admit)
        return self._asset(path, request) if path in self._assets else None

    def _asset(self, path: str, request: HttpRequest) -> HttpResponse:
        asset = self._assets[path]
        caching = [("Cache-Control", "no-cache"), ("ETag", asset.etag), ("Vary", "Accept-Encoding")]
        if asset.etag in request.header("if-none-match"):
            return HttpResponse("304 Not Modified", [*caching, *PAGE_HEADERS], b"")
        body = asset.body
        if choose_coding(request.header("accept-encoding")) == "gzip":
            body = asset.gzipped
            caching.append(("Content-Encoding", "gzip"))
        length = ("Content-Length", str(len(body)))
        return HttpResponse("200 OK", [("Content-Type", asset.kind), length, *caching, *PAGE_HEADERS], body)


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(value))


def _json(request: HttpRequest, body: bytes) -> HttpResponse:
    body, coding = coded(body, request.header("accept-encoding"))
    kind, length = ("Content-Type", "application/json"), ("Content-Length", str(len(body)))
    return HttpResponse("200 OK", [kind, length, ("Cache-Control", "no-store"), *coding, *PAGE_HEADERS], body)
