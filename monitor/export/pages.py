"""Writes samples as text of Prometheus or OpenMetrics, or as protobuf; the only file with prometheus_client.

prometheus_client writes a page by asking for the samples and formatting each: some 15 us a series.  Two thousand series
are 30 ms.  But a series' name and labels do not change, and most values do not change either.  So prometheus_client
writes the name and labels of a series at its first sight, and here its line is kept and only a new number is written.

prometheus_client also writes the head of each family; a test compares whole pages with its own.  Numbers are written as
Python writes them, which both formats of text allow, and whole ones exactly.  For those who ask for protobuf, because
native histograms come in no other form, `protobuf` writes the same series from the same samples.

Here the integers of the inside units become the base units of the metrics' names.  Nothing is measured here and no
driver is touched.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import AnyStr, NamedTuple

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from pacecar.metrics.catalog import CATALOG, MetricKind, by_name
from pacecar.metrics.catalog import Metric as Entry

from ..fault_containment import ContainedPart, FaultContainment
from ..histogram import BOUNDS_NS, SCHEMA, Histogram, Served
from ..http.content_negotiation import MetricsFormat
from . import protobuf
from .metric_writer import Labels, Line, MetricWriter, Value

__all__ = ["END", "Pages", "message", "outside", "text_line"]

_EOF = b"# EOF\n"
END = {MetricsFormat.OPENMETRICS: _EOF}
"""What ends a page; only OpenMetrics has a word for it."""


class _Family(Collector):
    """What prometheus_client needs to write one family."""

    def __init__(self, entry: Entry, labels: Labels | None = None) -> None:
        self._family: Metric
        if entry.kind is MetricKind.HISTOGRAM:
            name, text, unit = entry.name, entry.help, entry.unit.outside
            self._family = histogram = HistogramMetricFamily(name, text, labels=entry.labels, unit=unit)
            if labels is not None:
                bounds = [str(outside(entry, bound)) for bound in BOUNDS_NS]
                histogram.add_metric(labels, [(bound, 0.0) for bound in (*bounds, "+Inf")], 0.0)
            return
        kind = CounterMetricFamily if entry.kind is MetricKind.COUNTER else GaugeMetricFamily
        self._family = family = kind(entry.name, entry.help, labels=entry.labels, unit=entry.unit.outside)
        if labels is not None:
            family.add_metric(labels, 0.0)

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


def _starts(one: Served) -> list[str]:
    """Return what stands before the number in each line of a series."""
    written = generate_latest(_Family(by_name(one.metric), one.labels)).decode()
    # A label's value has its line feeds escaped, so lines without a hash are the series.
    return [row.rpartition(" ")[0] + " " for row in written.split("\n") if row and not row.startswith("#")]


class _NumberLine:
    """A line of text, in both of its formats."""

    __slots__ = ("entry", "last", "size", "start", "value")

    def __init__(self, one: Served) -> None:
        self.entry = by_name(one.metric)
        (self.start,) = _starts(one)
        self.size = len(self.start)
        self.value: Value | None = None
        self.last = ""

    def write(self, value: Value) -> str:
        if value != self.value:  # also for NaN, which is not itself
            self.last = f"{self.start}{number(self.entry, value)}\n"  # type: ignore[arg-type]  # by its kind
            self.value = value  # last: a value that cannot be written must not seem to be
        return self.last


class _HistogramLines:
    """The lines of a histogram's fixed buckets, its count and its sum."""

    __slots__ = ("entry", "last", "size", "starts", "value")

    def __init__(self, one: Served) -> None:
        self.entry = by_name(one.metric)
        self.starts = _starts(one)
        self.size = sum(map(len, self.starts))
        self.value: Value | None = None
        self.last = ""

    def write(self, value: Value) -> str:
        if value is not self.value:
            assert isinstance(value, Histogram), self.entry.name
            numbers = (*map(str, value.below), str(value.count), str(value.count), number(self.entry, value.sum_ns))
            self.last = "".join(f"{start}{n}\n" for start, n in zip(self.starts, numbers, strict=True))
            self.value = value  # last, as above
        return self.last


def text_line(one: Served) -> Line[str]:
    """Return the lines of text of a series."""
    return _HistogramLines(one) if by_name(one.metric).kind is MetricKind.HISTOGRAM else _NumberLine(one)


class _NumberMessage:
    """A gauge or a counter as a Metric of Prometheus' protocol buffers."""

    __slots__ = ("entry", "last", "size", "start", "value")

    def __init__(self, one: Served) -> None:
        self.entry = by_name(one.metric)
        self.start = protobuf.before_number(self.entry, protobuf.labels_of(self.entry, one.labels))
        self.size = len(self.start)
        self.value: Value | None = None
        self.last = b""

    def write(self, value: Value) -> bytes:
        if value != self.value:
            self.last = self.start + protobuf.number(outside(self.entry, value))  # type: ignore[arg-type]
            self.value = value
        return self.last


class _HistogramMessage:
    """A histogram as a Metric, with its fixed buckets and its native ones."""

    __slots__ = ("entry", "labels", "last", "size", "value")

    def __init__(self, one: Served) -> None:
        self.entry = by_name(one.metric)
        self.labels = protobuf.labels_of(self.entry, one.labels)
        self.size = len(self.labels)
        self.value: Value | None = None
        self.last = b""

    def write(self, value: Value) -> bytes:
        if value is not self.value:
            assert isinstance(value, Histogram), self.entry.name
            bounds = (outside(self.entry, bound) for bound in BOUNDS_NS)
            self.last = protobuf.histogram(
                self.labels, count=value.count, total=outside(self.entry, value.sum_ns),
                below=zip(bounds, value.below, strict=True), schema=SCHEMA, native=value.native, zeroes=value.zeroes,
            )  # fmt: skip
            self.value = value
        return self.last


def message(one: Served) -> Line[bytes]:
    """Return the Metric of a series."""
    return _HistogramMessage(one) if by_name(one.metric).kind is MetricKind.HISTOGRAM else _NumberMessage(one)


def _without(families: dict[str, AnyStr], metrics: Collection[str]) -> dict[str, AnyStr]:
    return {metric: lines for metric, lines in families.items() if metric not in metrics} if metrics else families


def page(families: Mapping[str, str], is_openmetrics: bool) -> bytes:
    """Return families with their heads, in the catalog's order."""
    return "".join(
        _head_of(entry.name, is_openmetrics) + families[entry.name] for entry in CATALOG if entry.name in families
    ).encode()


def protobuf_page(families: Mapping[str, bytes]) -> bytes:
    """Return families as messages, in the catalog's order."""
    return b"".join(protobuf.family(entry, families[entry.name]) for entry in CATALOG if entry.name in families)


class Page(NamedTuple):
    """A page, without `END`, and the metrics that are on it."""

    body: bytes
    metrics: Collection[str]


class Pages:
    """Writes pages of samples in every format.  Any thread may ask: a scrape may be the first that wants a format."""

    def __init__(self, part: ContainedPart, faults: FaultContainment | None) -> None:
        self._text = MetricWriter[str](text_line, "", part, faults)
        self._protobuf = MetricWriter[bytes](message, b"", part, faults)
        self._lock = threading.Lock()

    def write(self, samples: Sequence[Served], wanted: MetricsFormat, without: Collection[str] = ()) -> Page:
        """Return the page of `samples` of all metrics but those in `without`."""
        with self._lock:
            if wanted is MetricsFormat.PROTOBUF:
                messages = _without(self._protobuf.write(samples), without)
                return Page(protobuf_page(messages), messages.keys())
            families = _without(self._text.write(samples), without)
        return Page(page(families, wanted is MetricsFormat.OPENMETRICS), families.keys())
