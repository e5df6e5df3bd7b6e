"""Pushes the samples that /metrics serves to a store that does not scrape, by OTLP, on its own thread.

OpenTelemetry's SDK would have an instrument for each metric, with callbacks.  Its instruments keep every set of
attributes they ever saw, so a job that ended would stay at its last value.  Here the samples become data points as they
are, and only the exporter is OpenTelemetry's: its encoding, retries, certificates and headers.

    name         as in the catalog, so that dashboards and alert rules work in any store
    unit         UCUM: s, By, By/s, W, J, Cel, Hz, 1 for a ratio; none for a count (converters to Prometheus' names
                 append _ratio to a gauge with unit 1)
    counters     cumulative, monotonic sums without a start time, which is unknown for most
    histograms   exponential, with the native buckets; the fixed ones can be derived from them
    attributes   the labels that have a value
    resource     service.name, service.version, service.instance.id (host:port, as a scrape's `instance`), host.name;
                 OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win

The exporter's variables OTEL_EXPORTER_OTLP_... set headers, certificates and compression, because a password does not
belong in a configuration file.  An endpoint that is down, slow or refusing delays this thread only; the daemon counts
failures and logs the first.

Left out: gRPC (collectors that speak it also speak HTTP), logs, traces, and a last export, which would delay the
daemon's end.
"""

from __future__ import annotations

import logging
import platform
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from pacecar.clock import Clock
from pacecar.config import OtlpConfig
from pacecar.metrics.catalog import Metric as Entry
from pacecar.metrics.catalog import MetricKind, by_name
from pacecar.records import Sample

from ..catalog_sample import sample
from ..histogram import SCHEMA, Histogram, Served
from ..watched_threads import WatchedThread

__all__ = ["Otlp", "OtlpError", "OtlpReading", "unit_of"]

POINTS_MAX = 10_000
"""Data points in one request: about 1 MB; collectors refuse more than 4 to 20 MB."""

REQUESTS_MAX = 10
"""Requests in one export; series beyond 100 000 are left out."""

CLOSE_SECONDS_MAX = 1.0
"""How long `close` waits for an export in progress; its thread ends with the process."""

INT64_MAX = 2**63 - 1
"""The largest integer of the protocol; larger ones are sent as floats."""

_UNITS = {
    "": "",
    "ratio": "1",
    "seconds": "s",
    "bytes": "By",
    "bytes_per_second": "By/s",
    "watts": "W",
    "joules": "J",
    "celsius": "Cel",
    "hertz": "Hz",
}
"""UCUM codes (ucum.org, case sensitive), as OpenTelemetry's semantic conventions ask for."""

_log = logging.getLogger(__name__)


class OtlpError(RuntimeError):
    """Exporting cannot start; the message says what to do."""


class OtlpReading(NamedTuple):
    """Samples and their time."""

    wall_ns: int
    samples: Iterable[Served]


def unit_of(entry: Entry) -> str:
    """Return the UCUM code of a metric's base unit."""
    return _UNITS[entry.unit.outside]


class _Reason(logging.Handler):
    """Keeps the last message that OpenTelemetry's exporter logged, because it returns no reason for a failure."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text = " ".join(record.getMessage().split())[:300]


class Otlp:
    """Exports what `read` returns, every period."""

    def __init__(
        self, config: OtlpConfig, clock: Clock, read: Callable[[], Iterable[OtlpReading]], *, version: str, port: int
    ) -> None:
        self._config = config
        self._clock = clock
        self._read = read
        self._resource = {
            "service.name": "pacecar",
            "service.version": version,
            "service.instance.id": f"{platform.node()}:{port}",
            "host.name": platform.node(),
        }
        self._exports = {"ok": 0, "failed": 0}
        self._duration_ns: int | None = None
        self._started_ns: int | None = None
        self._succeeded_ns: int | None = None
        self._is_failing = False
        self._reason = _Reason()
        self._exporter: Any = None  # its types differ between versions
        self._stopping = threading.Event()
        self.thread: WatchedThread | None = None
        """The thread that exports; None before `start`."""

    def start(self) -> None:
        """Start the thread; raises OtlpError if the library is missing."""
        assert self._config.endpoint is not None, "constructed only if there is one"
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
            from opentelemetry.sdk.metrics.export import MetricsData  # noqa: F401  the other half of the extra
        except ImportError as error:
            raise OtlpError(f"[otlp] endpoint: {error}; pip install 'pacecar[otlp]'") from error
        path = self._config.endpoint.rstrip("/")
        path += "" if path.endswith("/v1/metrics") else "/v1/metrics"
        library = logging.getLogger("opentelemetry")
        library.handlers, library.propagate = [self._reason], False
        self._exporter = OTLPMetricExporter(endpoint=path, timeout=self._config.timeout_seconds)
        self.thread = WatchedThread("otlp", self._run, self._clock)
        self.thread.start()

    def close(self) -> None:
        """Stop; an export in progress is abandoned."""
        self._stopping.set()
        if self.thread is not None:
            self._exporter.shutdown()
            self.thread.join(CLOSE_SECONDS_MAX)

    def own_samples(self) -> Iterator[Sample]:
        """Yield the exports by outcome, and their timing."""
        succeeded_ns, started_ns, duration_ns = self._succeeded_ns, self._started_ns, self._duration_ns
        for outcome, count in self._exports.items():
            yield sample("pacecar_daemon_otlp_exports_total", count, outcome)
        if started_ns is not None:  # an export that hangs shows while it hangs
            duration_ns = max(duration_ns or 0, time.monotonic_ns() - started_ns)
        if duration_ns is not None:
            yield sample("pacecar_daemon_otlp_export_duration_seconds", duration_ns)
        if succeeded_ns is not None:
            yield sample("pacecar_daemon_otlp_success_age_seconds", max(0, self._clock.monotonic_ns() - succeeded_ns))

    def _run(self) -> None:
        period = self._config.period_seconds
        wait = random.random() * period  # a thousand daemons that start together must not push together
        while not self._stopping.wait(wait):
            started_ns = self._started_ns = time.monotonic_ns()
            reason: str | None
            try:
                reason = self._export()
            except Exception as error:  # noqa: BLE001  a fault of the library or a sample it cannot hold: keep the thread
                reason = f"{type(error).__name__}: {error}"
            if self._stopping.is_set():
                return
            self._duration_ns, self._started_ns = time.monotonic_ns() - started_ns, None
            self._record_outcome(reason)
            wait = period - self._duration_ns / 1e9 % period  # an export that took longer skips the next

    def _record_outcome(self, reason: str | None) -> None:
        self._exports["ok" if reason is None else "failed"] += 1
        if reason is None:
            self._succeeded_ns = self._clock.monotonic_ns()
            if self._is_failing:
                _log.info("exporting by OTLP to %s works again", self._config.endpoint)
        elif not self._is_failing:
            _log.warning("cannot export by OTLP to %s (%s); it keeps trying", self._config.endpoint, reason)
        self._is_failing = reason is not None

    def _export(self) -> str | None:
        """Export once; return None, or the reason for a failure."""
        from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        resource = Resource(self._resource).merge(OTELResourceDetector().detect())
        scope = InstrumentationScope("pacecar", self._resource["service.version"])
        for number, metrics in enumerate(_requests(self._read())):
            if number == REQUESTS_MAX:
                return f"there are more than {POINTS_MAX * REQUESTS_MAX} series; the others are left out"
            self._reason.text = ""
            data = MetricsData([ResourceMetrics(resource, [ScopeMetrics(scope, metrics, "")], "")])
            if self._exporter.export(data) is not MetricExportResult.SUCCESS:
                return self._reason.text or "the exporter gave no reason"
        return None


def _requests(readings: Iterable[OtlpReading]) -> Iterator[list[Any]]:
    """Yield the metrics of all readings, at most `POINTS_MAX` points at a time; of a metric in two, the first's."""
    from opentelemetry.sdk.metrics.export import Metric, NumberDataPoint

    points: dict[str, list[Any]] = {}
    for wall_ns, samples in readings:
        seen = set(points)
        for one in samples:
            if one.metric in seen:
                continue
            entry = by_name(one.metric)
            attributes = {key: text for key, text in zip(entry.labels, one.labels, strict=True) if text}
            point: Any
            if isinstance(one.value, Histogram):
                point = _exponential(entry, one.value, attributes, wall_ns)
            else:
                value = entry.unit.convert(one.value)
                if isinstance(value, int) and abs(value) > INT64_MAX:
                    value = float(value)
                point = NumberDataPoint(attributes, 0, wall_ns, value)
            points.setdefault(one.metric, []).append(point)
    request: list[Any] = []
    room = POINTS_MAX
    for name, all_of_it in points.items():
        entry, unit = by_name(name), unit_of(by_name(name))
        while all_of_it:
            some, all_of_it = all_of_it[:room], all_of_it[room:]
            request.append(Metric(name, entry.help, unit, _data(entry.kind, some)))
            room -= len(some)
            if room == 0:
                yield request
                request, room = [], POINTS_MAX
    if request:
        yield request


def _data(kind: MetricKind, points: list[Any]) -> Any:  # noqa: ANN401  OpenTelemetry's, which is imported late
    from opentelemetry.sdk.metrics.export import AggregationTemporality, ExponentialHistogram, Gauge, Sum

    if kind is MetricKind.GAUGE:
        return Gauge(points)
    if kind is MetricKind.COUNTER:
        return Sum(points, AggregationTemporality.CUMULATIVE, True)
    return ExponentialHistogram(points, AggregationTemporality.CUMULATIVE)


def _exponential(entry: Entry, value: Histogram, attributes: dict[str, str], wall_ns: int) -> Any:  # noqa: ANN401
    """Return a histogram's point: all buckets from the first to the last; OTLP's index is one less than ours."""
    from opentelemetry.sdk.metrics.export import Buckets, ExponentialHistogramDataPoint

    counts = dict(value.native)
    first, end = (min(counts), max(counts) + 1) if counts else (1, 1)
    total, least, most = (float(entry.unit.convert(ns)) for ns in (value.sum_ns, value.min_ns, value.max_ns))
    return ExponentialHistogramDataPoint(
        attributes, 0, wall_ns, value.count, total, SCHEMA, value.zeroes,
        positive=Buckets(first - 1, [counts.get(index, 0) for index in range(first, end)]), negative=Buckets(0, []),
        flags=0, min=least, max=most,
    )  # fmt: skip
