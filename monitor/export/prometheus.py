"""Serves what ticks read and what jobs report to a scraper, in the format that it asks for.

A registry of gauges set by ticks would keep every series for ever: a job that ended would stay at its last value.  So
only pages are kept here, and a series without a sample is not served.

Writing the whole page during the scrape would delay it, because the collectors compete for the interpreter.  But what a
tick read does not change until the next one.  So

    at a tick     if a scrape is expected before the next tick (`scrape_beat`), the tick's thread writes its part of
                  the page, in the scraper's format
    at a scrape   the bytes are sent; jobs and the daemon's own figures are written now, and the tick's part if no
                  scrape was expected

`pages` writes.  Nothing is measured here, and no driver is called.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple
from urllib.parse import parse_qs

from pacecar.clock import Clock, SystemClock
from pacecar.metrics.catalog import CATALOG
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import Served
from ..http.content_negotiation import GZIP_BITS, GZIP_LEVEL, MetricsFormat, choose_coding, choose_media
from ..http.request import HttpRequest, HttpResponse
from .pages import END, Pages
from .scrape_beat import ScrapeBeat

__all__ = ["Exporter"]

TICK_MARGIN_RATIO = 0.25
"""How much longer than the last interval the next one may be: ticks are jittered."""

_METRICS = {series: entry.name for entry in CATALOG for series in entry.series}
"""Name of a series -> its metric."""


class Form(NamedTuple):
    """The form in which a scraper wants its page."""

    format: MetricsFormat
    is_gzipped: bool


class _Part:
    """A tick's part of the page, in the forms that were requested."""

    def __init__(self, samples: Sequence[Served], pages: Pages) -> None:
        self.samples = samples
        self._pages = pages
        self._made: dict[Form, tuple[bytes, zlib._Compress | None]] = {}
        self.metrics: Collection[str] = ()
        """Its metrics; known once a form was written."""

    def made(self, form: Form) -> tuple[bytes, zlib._Compress | None]:
        """Return the bytes and, if they are compressed, the state to continue from."""
        if form not in self._made:
            (body, self.metrics), state = self._pages.write(self.samples, form.format), None
            if form.is_gzipped:
                state = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_BITS)
                body = state.compress(body) + state.flush(zlib.Z_SYNC_FLUSH)
            self._made[form] = (body, state)
        return self._made[form]


class Exporter:
    """Serves what ticks publish and what `live` returns, as Prometheus text, OpenMetrics text or protobuf.

    `live` is called at each scrape; it returns the samples of jobs and the daemon's own figures.
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
        """Yield how many scrapes were answered, and their total time."""
        yield sample("pacecar_daemon_scrapes_total", self._scrapes)
        yield sample("pacecar_daemon_scrape_seconds_total", self._scrape_ns)

    def is_awaited(self, now_ns: int) -> bool:
        """Return whether a scrape is expected for what the tick that begins at `now_ns` will publish."""
        with self._lock:
            return any(beat.is_due(now_ns, self._next_ns(now_ns)) for beat in self._beats.values())

    def _next_ns(self, now_ns: int) -> int:
        """Return the latest time at which the next tick will have published, if the current one does so at `now_ns`."""
        before_ns = self._published_ns
        return now_ns if before_ns is None else now_ns + int((now_ns - before_ns) * (1 + TICK_MARGIN_RATIO))

    def publish(self, samples: Sequence[Sample]) -> None:
        """Serve `samples` from now on; only one thread calls this."""
        part = _Part(samples, self._tick_pages)
        now_ns = self._clock.monotonic_ns()
        until_ns, self._published_ns = self._next_ns(now_ns), now_ns
        with self._lock:
            forms = [form for form, beat in self._beats.items() if beat.is_due(now_ns, until_ns)]
        for form in forms:
            part.made(form)
        self._part = part  # one assignment: a scrape has the old part or the new one

    def __call__(self, request: HttpRequest) -> HttpResponse:
        """Answer a scrape."""
        begun = time.perf_counter_ns()
        media = choose_media(request.header("accept"))
        form = Form(media.format, choose_coding(request.header("accept-encoding")) == "gzip")
        names = parse_qs(request.query).get("name[]")
        body = self._page(form, request.source) if names is None else self._some(form, frozenset(names))
        headers = [("Content-Type", media.content_type), ("Content-Length", str(len(body)))]
        headers.append(("Vary", "Accept, Accept-Encoding"))
        if form.is_gzipped:
            headers.append(("Content-Encoding", "gzip"))
        with self._lock:
            self._scrapes += 1
            self._scrape_ns += time.perf_counter_ns() - begun
        return HttpResponse("200 OK", headers, body)

    def _page(self, form: Form, source: str) -> bytes:
        part, live = self._part, list(self._live())
        with self._lock:
            self._beats[form].record(source, self._clock.monotonic_ns())
            body, state = part.made(form)
            state = None if state is None else state.copy()
        rest = self._live_pages.write(live, form.format, part.metrics).body + END.get(form.format, b"")
        return body + rest if state is None else body + state.compress(rest) + state.flush()

    def _some(self, form: Form, names: frozenset[str]) -> bytes:
        """Return the families with a series in `names`, as prometheus_client's restricted_registry does."""
        part, live = self._part, list(self._live())
        wanted = {_METRICS[name] for name in names if name in _METRICS}
        ticked = self._tick_pages.write([one for one in part.samples if one.metric in wanted], form.format)
        of_live = [one for one in live if one.metric in wanted]
        body = (
            ticked.body + self._live_pages.write(of_live, form.format, ticked.metrics).body + END.get(form.format, b"")
        )
        return zlib.compress(body, GZIP_LEVEL, GZIP_BITS) if form.is_gzipped else body
