"""Writes samples as Prometheus or OpenMetrics text at the tick, and serves it; the only file with prometheus_client.

A registry of gauges that ticks set would keep every series for ever: a job that ended would stay at its last value.  So
nothing is kept here but text, and a series without a sample is not served any more.

prometheus_client writes a page by asking for the samples and formatting each: some 15 us a series, in the scrape, while
the collectors wait for the interpreter.  Two thousand series are 30 ms.  But a series' name and labels do not change,
most values do not change either, and what a tick read does not change until the next.  So here

    at the first sight of a series   prometheus_client writes its name and labels, once
    at a tick                        the tick's thread writes the numbers, and compresses them if scrapers ask for that
    at a scrape                      the bytes are sent; only jobs and the daemon's own figures are written then

prometheus_client also writes the head of each family; a test compares whole pages with its own.  Numbers are written as
Python writes them, which both formats allow, and whole ones exactly.

Here the integers of the inside units become the base units of the metrics' names.  Nothing is measured here and no
driver is touched.
"""

from __future__ import annotations

import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import parse_qs

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from pacecar.metrics.catalog import CATALOG, MetricKind, by_name
from pacecar.metrics.catalog import Metric as Entry
from pacecar.records import Sample

from ..catalog_sample import sample
from ..fault_containment import ContainedPart, FaultContainment
from ..http.content_negotiation import GZIP_BITS, GZIP_LEVEL, choose_coding, choose_media

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

__all__ = ["Exporter", "outside"]

SERIES_MAX = 100_000
LINES_BYTES_MAX = 32 << 20
"""Lines remembered, and their bytes.  Beyond one of them those that were not written this time are forgotten: labels
that come and go must not fill memory."""

LINE_BYTES = 500
"""Bytes of a remembered line beside its text: objects, and its labels once more."""

ASKED_TICKS = 600
"""For so many ticks after a scrape the form that it asked for is made ready in advance."""

_EOF = b"# EOF\n"

Labels = tuple[str, ...]


class Form(NamedTuple):
    """How a scraper wants its page."""

    is_openmetrics: bool
    is_gzipped: bool


class _Family(Collector):
    """What prometheus_client needs to write one family."""

    def __init__(self, entry: Entry, labels: Labels | None = None) -> None:
        kind = CounterMetricFamily if entry.kind is MetricKind.COUNTER else GaugeMetricFamily
        self._family = kind(entry.name, entry.help, labels=entry.labels, unit=entry.unit.outside)
        if labels is not None:
            self._family.add_metric(labels, 0.0)

    def collect(self) -> Iterable[Metric]:
        """Return the family."""
        return [self._family]


def _head(entry: Entry, is_openmetrics: bool) -> str:
    if is_openmetrics:
        written: bytes = generate_openmetrics(_Family(entry))  # type: ignore[no-untyped-call]  # as of 0.26
        return written.removesuffix(_EOF).decode()
    return generate_latest(_Family(entry)).decode()


_HEADS: dict[tuple[str, bool], str] = {}
"""The head of each family that was served, in both formats: bounded by the catalog."""


def _head_of(metric: str, is_openmetrics: bool) -> str:
    key = (metric, is_openmetrics)
    if key not in _HEADS:
        _HEADS[key] = _head(by_name(metric), is_openmetrics)
    return _HEADS[key]


def outside(entry: Entry, value: int | float) -> float:
    """Return `value` in the base unit of the metric's name."""
    return float(entry.unit.convert(value))


def number(entry: Entry, value: int | float) -> str:
    """Return `value` in base units as both formats write it."""
    if entry.unit.scale == 1 and isinstance(value, int):
        return f"{value:d}"
    value = outside(entry, value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


class _Line:
    """One series as it was last written."""

    __slots__ = ("entry", "start", "text", "value")

    def __init__(self, sample: Sample) -> None:
        self.entry = by_name(sample.metric)
        written = generate_latest(_Family(self.entry, sample.labels)).decode().rstrip("\n")
        # A label's value has its line feeds escaped, so the last line is the series.
        self.start = written.rpartition("\n")[2].rpartition(" ")[0] + " "
        self.value: int | float | None = None
        self.text = ""

    def write(self, value: int | float) -> str:
        if value != self.value:  # also for NaN, which is not itself
            self.value = value
            self.text = f"{self.start}{number(self.entry, value)}\n"
        return self.text


class MetricWriter:
    """Writes samples as lines of text, and remembers the lines of each series.  One thread at a time."""

    def __init__(self, part: ContainedPart = ContainedPart.DAEMON, faults: FaultContainment | None = None) -> None:
        """A sample that cannot be written is left out, and counted in `faults` as of `part`."""
        self._part = part
        self._faults = faults or FaultContainment()
        self._lines: dict[tuple[str, Labels], _Line] = {}
        self._bytes = 0

    def write(self, samples: Iterable[Sample]) -> dict[str, str]:
        """Return metric -> its lines; of a series that comes twice the later value."""
        lines, families = self._lines, dict[str, dict[Labels, str]]()
        for one in samples:
            try:
                key = (one.metric, one.labels)
                line = lines.get(key)
                if line is None:
                    line = lines[key] = _Line(one)
                    self._bytes += LINE_BYTES + 2 * len(line.start)
                families.setdefault(one.metric, {})[one.labels] = line.write(one.value)
            except Exception as error:  # noqa: BLE001  one that cannot be written must not cost the page all others
                self._faults.caught(self._part, f"a sample of {one.metric}", error)
        if len(lines) > SERIES_MAX or self._bytes > LINES_BYTES_MAX:
            written = {(metric, labels) for metric, rows in families.items() for labels in rows}
            self._lines = {key: line for key, line in lines.items() if key in written}
            self._bytes = sum(LINE_BYTES + 2 * len(line.start) for line in self._lines.values())
        return {metric: "".join(rows.values()) for metric, rows in families.items()}


def page(families: dict[str, str], is_openmetrics: bool) -> bytes:
    """Return families with their heads, in the catalog's order."""
    return "".join(
        _head_of(entry.name, is_openmetrics) + families[entry.name] for entry in CATALOG if entry.name in families
    ).encode()


class _Part:
    """The part of the page that a tick wrote, in the forms that were asked for."""

    def __init__(self, families: dict[str, str]) -> None:
        self.families = families
        self._made: dict[Form, tuple[bytes, zlib._Compress | None]] = {}

    def made(self, form: Form) -> tuple[bytes, zlib._Compress | None]:
        """Return the bytes, and where they are compressed the state to go on from."""
        if form not in self._made:
            body, state = page(self.families, form.is_openmetrics), None
            if form.is_gzipped:
                state = zlib.compressobj(GZIP_LEVEL, zlib.DEFLATED, GZIP_BITS)
                body = state.compress(body) + state.flush(zlib.Z_SYNC_FLUSH)
            self._made[form] = (body, state)
        return self._made[form]


class Exporter:
    """Serves what ticks publish and what `live` gives, as Prometheus or OpenMetrics text.

    `live` is asked at each scrape: jobs, and the daemon's own figures.
    """

    def __init__(self, live: Callable[[], Iterable[Sample]], faults: FaultContainment | None = None) -> None:
        self._live = live
        self._lock = threading.Lock()
        self._tick_writer, self._live_pen = (
            MetricWriter(ContainedPart.COLLECTOR, faults),
            MetricWriter(ContainedPart.JOB, faults),
        )
        self._part = _Part({})
        self._ticks = 0
        self._asked: dict[Form, int] = {}
        self._scrapes = self._scrape_ns = 0

    def own_samples(self) -> Iterator[Sample]:
        """Yield how many scrapes were answered, and the time that they took here."""
        yield sample("pacecar_daemon_scrapes_total", self._scrapes)
        yield sample("pacecar_daemon_scrape_seconds_total", self._scrape_ns)

    def publish(self, samples: Iterable[Sample]) -> None:
        """Serve `samples` from now on; called by one thread."""
        part = _Part(self._tick_writer.write(samples))
        with self._lock:
            self._ticks += 1
            forms = [form for form, tick in self._asked.items() if self._ticks - tick <= ASKED_TICKS]
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
        form = Form(media.is_openmetrics, choose_coding(environ.get("HTTP_ACCEPT_ENCODING", "")) == "gzip")
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]")
        body = self._page(form) if names is None else self._some(form, frozenset(names))
        headers = [("Content-Type", media.content_type), ("Content-Length", str(len(body)))]
        headers.append(("Vary", "Accept, Accept-Encoding"))
        if form.is_gzipped:
            headers.append(("Content-Encoding", "gzip"))
        start_response("200 OK", headers)
        with self._lock:
            self._scrapes += 1
            self._scrape_ns += time.perf_counter_ns() - begun
        return [body]

    def _page(self, form: Form) -> bytes:
        part, families = self._part, self._write_live()
        with self._lock:
            self._asked[form] = self._ticks
            body, state = part.made(form)
            state = None if state is None else state.copy()
        rest = page({m: text for m, text in families.items() if m not in part.families}, form.is_openmetrics)
        rest += _EOF if form.is_openmetrics else b""
        return body + rest if state is None else body + state.compress(rest) + state.flush()

    def _some(self, form: Form, names: frozenset[str]) -> bytes:
        """Return the families that `names` has: as restricted_registry does, by the names of their series."""
        families = self._write_live() | self._part.families
        body = page({m: text for m, text in families.items() if m in names}, form.is_openmetrics)
        body += _EOF if form.is_openmetrics else b""
        return zlib.compress(body, GZIP_LEVEL, GZIP_BITS) if form.is_gzipped else body

    def _write_live(self) -> dict[str, str]:
        samples = list(self._live())
        with self._lock:
            return self._live_pen.write(samples)
