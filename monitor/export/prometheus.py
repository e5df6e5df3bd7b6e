"""Serves what ticks read and what jobs say to a scraper, in the form that it asks for.

A registry of gauges that ticks set would keep every series for ever: a job that ended would stay at its last value.  So
nothing is kept here but pages, and a series without a sample is not served any more.

To write all of a page in the scrape would hold it up, while the collectors wait for the interpreter.  What a tick read
does not change until the next.  So here

    at a tick     where a scrape is expected before the next one (`scrape_beat`), the tick's thread writes its part of
                  the page, in the form that the scraper asks for
    at a scrape   the bytes are sent; jobs and the daemon's own figures are written then, and the tick's part where
                  nobody was expected

`pages` writes.  Nothing is measured here and no driver is touched.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs

from pacecar.clock import Clock, SystemClock
from pacecar.metrics.catalog import CATALOG
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import Served
from ..http.content_negotiation import GZIP_BITS, GZIP_LEVEL, MetricsFormat, choose_coding, choose_media
from ..http.routes import SOURCE
from .pages import END, Pages
from .scrape_beat import ScrapeBeat

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["Exporter"]

TICK_MARGIN_RATIO = 0.25
"""How much later than after the last interval the next tick may come: ticks are jittered."""

_METRICS = {series: entry.name for entry in CATALOG for series in entry.series}
"""Name of a series -> its metric."""


class Form(NamedTuple):
    """How a scraper wants its page."""

    format: MetricsFormat
    is_gzipped: bool


class _Part:
    """The part of the page that is of a tick, in the forms that were asked for."""

    def __init__(self, samples: Sequence[Served], pages: Pages) -> None:
        self.samples = samples
        self._pages = pages
        self._made: dict[Form, tuple[bytes, zlib._Compress | None]] = {}
        self.metrics: Collection[str] = ()
        """The metrics of which it has samples; known once a form was made."""

    def made(self, form: Form) -> tuple[bytes, zlib._Compress | None]:
        """Return the bytes, and where they are compressed the state to go on from."""
        if form not in self._made:
            (body, self.metrics), state = self._pages.write(self.samples, form.format), None
            if form.is_gzipped:
                state = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_BITS)
                body = state.compress(body) + state.flush(zlib.Z_SYNC_FLUSH)
            self._made[form] = (body, state)
        return self._made[form]


class Exporter:
    """Serves what ticks publish and what `live` gives, as text of Prometheus or OpenMetrics, or as protobuf.

    `live` is asked at each scrape: jobs, and the daemon's own figures.
    """

    def __init__(
        self,
        live: Callable[[], Iterable[Served]],
        faults: FaultContainment | None = None,
        clock: Clock | None = None,
    ) -> None:
        self._live = live
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._tick_pages, self._live_pages = Pages(ContainedPart.COLLECTOR, faults), Pages(ContainedPart.JOB, faults)
        self._part = _Part((), self._tick_pages)
        self._published_ns: int | None = None
        self._beats: defaultdict[Form, ScrapeBeat] = defaultdict(ScrapeBeat)  # bounded by the forms that there are
        self._scrapes = self._scrape_ns = 0

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many scrapes were answered, and the time that they took here."""
        yield sample("pacecar_daemon_scrapes_total", self._scrapes)
        yield sample("pacecar_daemon_scrape_seconds_total", self._scrape_ns)

    def publish(self, samples: Sequence[Sample]) -> None:
        """Serve `samples` from now on; called by one thread."""
        part = _Part(samples, self._tick_pages)
        now_ns = self._clock.monotonic_ns()
        before_ns, self._published_ns = self._published_ns, now_ns
        until_ns = now_ns if before_ns is None else now_ns + int((now_ns - before_ns) * (1 + TICK_MARGIN_RATIO))
        with self._lock:
            forms = [form for form, beat in self._beats.items() if beat.is_due(now_ns, until_ns)]
        for form in forms:
            part.made(form)
        self._part = part  # one assignment: a scrape has the old part or the new one

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        """Answer a scrape (WSGI); the server drops the body of a HEAD."""
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD"), ("Content-Length", "0")])
            return [b""]
        begun = time.perf_counter_ns()
        media = choose_media(environ.get("HTTP_ACCEPT", ""))
        form = Form(media.format, choose_coding(environ.get("HTTP_ACCEPT_ENCODING", "")) == "gzip")
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        source = environ.get(SOURCE, "")
        body = self._page(form, source) if names is None else self._some(form, frozenset(names))
        headers = [("Content-Type", media.content_type), ("Content-Length", str(len(body)))]
        headers.append(("Vary", "Accept, Accept-Encoding"))
        if form.is_gzipped:
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        with self._lock:
            self._scrapes += 1
            self._scrape_ns += time.perf_counter_ns() - begun
        return [body]

    def _page(self, form: Form, source: str) -> bytes:
        part, live = self._part, list(self._live())
        with self._lock:
            self._beats[form].record(source, self._clock.monotonic_ns())
            body, state = part.made(form)
            state = None if state is None else state.copy()
        rest = self._live_pages.write(live, form.format, part.metrics).body + END.get(form.format, b"")
        return body + rest if state is None else body + state.compress(rest) + state.flush()

    def _some(self, form: Form, names: frozenset[str]) -> bytes:
        """Return the families that `names` has: as restricted_registry does, by the names of their series."""
        part, live = self._part, list(self._live())
        wanted = {_METRICS[name] for name in names if name in _METRICS}
        ticked = self._tick_pages.write([one for one in part.samples if one.metric in wanted], form.format)
        of_live = [one for one in live if one.metric in wanted]
        body = (
            ticked.body + self._live_pages.write(of_live, form.format, ticked.metrics).body + END.get(form.format, b"")
        )
        return zlib.compress(body, GZIP_LEVEL, GZIP_BITS) if form.is_gzipped else body
