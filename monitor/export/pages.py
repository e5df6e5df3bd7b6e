"""Writes samples as Prometheus text, OpenMetrics text or protobuf; the only module that uses prometheus_client.

prometheus_client formats every sample of a page, about 15 us for a series and 30 ms for two thousand.  But names and
labels do not change, and most values do not change either.  So prometheus_client writes each series once, when it first
appears, and this module keeps the line and replaces the number.

prometheus_client also writes the head of each family; a test compares whole pages with its own.  Numbers are written as
Python writes them, which both text formats allow, and whole numbers exactly.  Clients that ask for protobuf, the only
form with native histograms, get the same series from `protobuf`.

The integers of the internal units become the base units of the metrics' names here.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import NamedTuple

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
from .metric_writer import Labels, MetricLine, MetricWriter, Value

__all__ = ["END", "Pages", "message", "outside", "text_line"]

_EOF = b"# EOF\n"
END = {MetricsFormat.OPENMETRICS: _EOF}
"""The end of a page; only OpenMetrics has one."""


class _Family(Collector):
    """One family, in the form that prometheus_client writes."""

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


@cache
def _head_of(metric: str, is_openmetrics: bool) -> bytes:
    """Return the head of a family; the cache is bounded by the catalog."""
    family = _Family(by_name(metric))
    if is_openmetrics:
        written: bytes = generate_openmetrics(family)  # type: ignore[no-untyped-call]  # as of 0.26
        return written.removesuffix(_EOF)
    return generate_latest(family)


def outside(entry: Entry, value: int | float) -> float:
    """Return `value` in the base unit of the metric's name."""
    return float(entry.unit.convert(value))


def number(entry: Entry, value: int | float) -> str:
    """Return `value` in base units as both text formats write it."""
    if entry.unit.scale == 1 and isinstance(value, int):
        return f"{value:d}"
    value = outside(entry, value)
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def text_line(one: Served) -> MetricLine:
    """Return the line of a series in both text formats; for a histogram its fixed buckets, count and sum."""
    entry = by_name(one.metric)
    written = generate_latest(_Family(entry, one.labels)).decode()
    # Line feeds in label values are escaped, so the lines without a hash are the series.
    starts = [row.rpartition(" ")[0] + " " for row in written.split("\n") if row and not row.startswith("#")]

    size = sum(map(len, starts))
    if entry.kind is MetricKind.HISTOGRAM:

        def encode_histogram(value: Value) -> bytes:
            assert isinstance(value, Histogram), entry.name
            numbers = (*map(str, value.below), str(value.count), str(value.count), number(entry, value.sum_ns))
            return "".join(f"{start}{n}\n" for start, n in zip(starts, numbers, strict=True)).encode()

        return MetricLine(size, encode_histogram)
    (start,) = starts

    def encode(value: Value) -> bytes:
        assert not isinstance(value, Histogram), entry.name
        return f"{start}{number(entry, value)}\n".encode()

    return MetricLine(size, encode)


def message(one: Served) -> MetricLine:
    """Return a series as a Metric of Prometheus' protocol buffers; a histogram has fixed and native buckets."""
    entry = by_name(one.metric)
    labels = protobuf.labels_of(entry, one.labels)
    if entry.kind is MetricKind.HISTOGRAM:
        bounds = [outside(entry, bound) for bound in BOUNDS_NS]

        def encode_histogram(value: Value) -> bytes:
            assert isinstance(value, Histogram), entry.name
            return protobuf.histogram(
                labels, count=value.count, total=outside(entry, value.sum_ns),
                below=zip(bounds, value.below, strict=True), schema=SCHEMA, native=value.native, zeroes=value.zeroes,
            )  # fmt: skip

        return MetricLine(len(labels), encode_histogram)
    start = protobuf.before_number(entry, labels)

    def encode(value: Value) -> bytes:
        assert not isinstance(value, Histogram), entry.name
        return start + protobuf.number(outside(entry, value))

    return MetricLine(len(start), encode)


class Page(NamedTuple):
    """A page without `END`, and its metrics."""

    body: bytes
    metrics: Collection[str]


class Pages:
    """Writes pages of samples in every format.  Any thread may call it: a scrape may be the first in its format."""

    def __init__(self, part: ContainedPart, faults: FaultContainment | None) -> None:
        self._text, self._protobuf = MetricWriter(text_line, part, faults), MetricWriter(message, part, faults)
        self._lock = threading.Lock()

    def write(self, samples: Sequence[Served], wanted: MetricsFormat, without: Collection[str] = ()) -> Page:
        """Return the page of `samples`, in the catalog's order, except the metrics in `without`."""
        is_protobuf = wanted is MetricsFormat.PROTOBUF
        with self._lock:
            families = (self._protobuf if is_protobuf else self._text).write(samples)
        entries = [entry for entry in CATALOG if entry.name in families and entry.name not in without]
        if is_protobuf:
            body = b"".join(protobuf.family(entry, families[entry.name]) for entry in entries)
        else:
            is_openmetrics = wanted is MetricsFormat.OPENMETRICS
            body = b"".join(_head_of(entry.name, is_openmetrics) + families[entry.name] for entry in entries)
        return Page(body, {entry.name for entry in entries})
