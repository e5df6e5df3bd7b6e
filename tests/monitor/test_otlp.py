"""The daemon pushes what it serves to a real OTLP receiver, and what that receiver does costs it nothing."""

import contextlib
import http.server
import logging
import math
import os
import socket
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from pacecar.clock import SystemClock
from pacecar.config import ConfigError, DaemonConfig, OtlpConfig, load_config
from pacecar.metrics.catalog import CATALOG, MetricKind, MetricUnit, by_name
from pacecar.monitor.catalog_sample import sample
from pacecar.monitor.daemon import Daemon, DaemonError
from pacecar.monitor.export.otlp import POINTS_MAX, Otlp, OtlpReading, unit_of
from pacecar.monitor.histogram import DurationHistogram, HistogramSample
from tests.kit.daemons import running_daemon
from tests.kit.net import free_port, scraped
from tests.kit.own_samples import values_of
from tests.kit.waiting import until

try:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
except ImportError:
    if os.environ.get("CI"):
        raise
    pytest.skip("OpenTelemetry's exporter is not installed", allow_module_level=True)


PATIENCE_SECONDS = 60.0
"""There to fail, not to measure."""


class Receiver:
    """An OTLP receiver over HTTP, by OpenTelemetry's own messages; `answer` is the status that it gives."""

    def __init__(self, port=0, answer=200):
        self.requests, self.answer, self.headers = [], answer, []
        self.came, self.may_answer = threading.Event(), threading.Event()
        self.may_answer.set()
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.came.set()
                receiver.may_answer.wait(PATIENCE_SECONDS)
                if receiver.answer == 200:
                    assert self.path == "/v1/metrics"
                    receiver.headers.append(dict(self.headers))
                    receiver.requests.append(ExportMetricsServiceRequest.FromString(body))
                self.send_response(receiver.answer)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                """Say nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def metrics(self):
        """Metric -> its message, over all requests so far, the newest last."""
        found = {}
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    found |= {metric.name: metric for metric in scope.metrics}
        return found


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:

        def run(endpoint, **otlp):
            folder = Path(tempfile.mkdtemp(dir=tmp_path))
            config = OtlpConfig(endpoint=endpoint, **({"period_seconds": 1.0} | otlp))
            return stack.enter_context(running_daemon(folder, otlp=config, period_seconds=0.2))

        yield run


def served(daemon):
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for s in scraped(daemon.port)}


def exports(daemon):
    return {o: served(daemon)["pacecar_daemon_otlp_exports_total", (("outcome", o),)] for o in ("ok", "failed")}


def points(metric):
    return metric.sum.data_points if metric.HasField("sum") else metric.gauge.data_points


def value(point):
    return getattr(point, point.WhichOneof("value"))


@pytest.mark.slow
def test_what_arrives_is_what_is_served_under_the_catalogs_names_and_units(start, receiver):
    daemon = start(f"http://127.0.0.1:{receiver.port}")
    until(lambda: "pacecar_host_cpu_utilization_ratio" in receiver.metrics(), "the second tick")
    page, arrived = served(daemon), receiver.metrics()
    families = {name for name, _ in page}
    late = {name for name in families - arrived.keys() if "_otlp_" not in name}  # served since the export
    assert len(late) <= 3, late
    assert len(arrived) > 50
    for name, metric in arrived.items():
        entry = by_name(name)
        assert metric.unit == unit_of(entry)
        assert metric.description == entry.help
        assert metric.HasField("sum") == (entry.kind is MetricKind.COUNTER)
        if metric.HasField("sum"):
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == 2, "cumulative"
        for point in points(metric):
            assert abs(point.time_unix_nano - time.time_ns()) < 60e9
            attributes = {a.key: a.value.string_value for a in point.attributes}
            assert attributes.keys() <= set(entry.labels)
            assert all(attributes.values())
    for name in ("pacecar_host_memory_size_bytes", "pacecar_host_cpus_online", "pacecar_daemon_cpu_budget_ratio"):
        if name in arrived:
            assert [value(p) for p in points(arrived[name])] == [page[name, ()]]


@pytest.mark.slow
def test_the_resource_says_which_daemon_it_is_and_the_environment_may_say_more(start, receiver, monkeypatch):
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "k8s.node.name=n7,service.name=mine")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20x")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    daemon = start(f"http://127.0.0.1:{receiver.port}/v1/metrics")
    until(lambda: receiver.requests, "an export")
    resource = receiver.requests[0].resource_metrics[0].resource
    said = {a.key: a.value.string_value for a in resource.attributes}
    assert said["service.name"] == "mine"
    assert said["k8s.node.name"] == "n7"
    assert said["service.instance.id"].endswith(f":{daemon.port}")
    assert said["host.name"]
    assert {k.lower(): v for k, v in receiver.headers[0].items()}["authorization"] == "Bearer x"
    assert {"ok", "failed"} == exports(daemon).keys()


def test_every_unit_of_the_catalog_has_its_ucum_code():
    codes = {unit_of(entry) for entry in CATALOG}
    assert codes <= {"", "1", "s", "By", "By/s", "W", "J", "Cel", "Hz"}
    counts = {unit_of(entry) for entry in CATALOG if entry.unit is MetricUnit.COUNT}
    assert counts == {""}, "a gauge of unit 1 is named ..._ratio on its way to Prometheus"


@contextlib.contextmanager
def mute(speech=b""):
    """A port that takes connections and says `speech`, byte by byte, for ever, or nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stopped, held = threading.Event(), []

        def hold():
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    held.append(connection)
                    threading.Thread(target=drip, args=(connection,), daemon=True).start()

        def drip(connection):
            with contextlib.suppress(OSError):
                for byte in speech:
                    connection.send(bytes([byte]))
                    if stopped.wait(0.05):
                        return

        thread = threading.Thread(target=hold, daemon=True)
        thread.start()
        yield server.getsockname()[1]
        stopped.set()
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
        for connection in held:
            connection.close()


@contextlib.contextmanager
def refusing(status):
    receiver = Receiver(answer=status)
    yield receiver.port
    receiver.close()


@contextlib.contextmanager
def down():
    yield free_port()


@pytest.mark.slow
def test_neither_a_scrape_nor_a_tick_waits_for_an_export(start, receiver):
    """The receiver answers when five ticks were scraped, and not before."""
    receiver.may_answer.clear()
    daemon = start(f"http://127.0.0.1:{receiver.port}", timeout_seconds=PATIENCE_SECONDS)
    assert receiver.came.wait(PATIENCE_SECONDS)
    ticks = set()
    until(lambda: ticks.add(served(daemon)["pacecar_daemon_ticks_total", ()]) or len(ticks) >= 5, "ticks are served")
    assert exports(daemon) == {"ok": 0, "failed": 0}
    receiver.may_answer.set()
    until(lambda: exports(daemon)["ok"] >= 1, "the export ends")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("endpoint", "ends"),
    [
        (down, True),
        (lambda: refusing(400), True),
        pytest.param(lambda: refusing(503), True, marks=pytest.mark.full),
        pytest.param(mute, True, marks=pytest.mark.full),
        pytest.param(lambda: mute(b"no HTTP at all\r\n\r\n" * 3), True, marks=pytest.mark.full),
        (lambda: mute(b"HTTP/1.1 200 OK\r\nX: " + b"y" * 5000), False),
    ],
    ids=["down", "refuses", "is overloaded", "is silent", "speaks otherwise", "drips"],
)
def test_an_endpoint_that_fails_is_counted_and_said_once_and_scrapes_and_ticks_go_on(start, endpoint, ends, caplog):
    """Of one that drips its answer for ever no timeout ends the reading; the duration says so as it grows."""
    caplog.set_level(logging.INFO)
    with endpoint() as port:
        daemon = start(f"http://127.0.0.1:{port}", timeout_seconds=0.5)
        page, ticks, limit = {}, set(), time.monotonic() + PATIENCE_SECONDS
        while len(ticks) < 6 or (
            page["pacecar_daemon_otlp_exports_total", (("outcome", "failed"),)] < 1
            if ends
            else page.get(("pacecar_daemon_otlp_export_duration_seconds", ()), 0.0) < 1.5
        ):
            assert time.monotonic() < limit
            page = served(daemon)
            ticks.add(page["pacecar_daemon_ticks_total", ()])
            time.sleep(0.05)
        said = [line for line in caplog.messages if "OTLP" in line]
        assert len(said) == 1 if ends else len(said) <= 1  # on a busy machine a drip may come too late
        assert all(f"127.0.0.1:{port}" in line for line in said)
        assert exports(daemon)["ok"] == 0
        assert ("pacecar_daemon_otlp_success_age_seconds", ()) not in served(daemon)
        begun = time.monotonic()
        daemon.close()
        assert time.monotonic() - begun < PATIENCE_SECONDS  # the drip goes on for 250 s


@pytest.mark.slow
def test_an_endpoint_that_comes_back_gets_the_next_export(start, caplog):
    caplog.set_level(logging.INFO)
    with down() as port:
        daemon = start(f"http://127.0.0.1:{port}", timeout_seconds=0.5)
        until(lambda: exports(daemon)["failed"] >= 1, "a failure")
        receiver = Receiver(port)
        try:
            until(lambda: exports(daemon)["ok"] >= 1, "an export")
            assert served(daemon)["pacecar_daemon_otlp_success_age_seconds", ()] < 5
        finally:
            daemon.close()
            receiver.close()
    said = [line for line in caplog.messages if "OTLP" in line]
    assert len(said) == 2
    assert "works again" in said[1]


def push(receiver, *readings):
    otlp = Otlp(
        OtlpConfig(endpoint=f"http://127.0.0.1:{receiver.port}", period_seconds=1.0), SystemClock(),
        lambda: readings, version="1", port=9850,
    )  # fmt: skip
    otlp.start()
    try:
        until(lambda: sum(values_of(otlp, "pacecar_daemon_otlp_exports_total").values()), "an export")
    finally:
        otlp.close()
    return values_of(otlp, "pacecar_daemon_otlp_exports_total")


@pytest.mark.slow
def test_zero_is_a_measurement_and_what_the_protocol_cannot_hold_whole_goes_as_a_float(receiver):
    samples = [
        sample("pacecar_host_load_average", 0, "1m"),
        sample("pacecar_host_interrupts_total", 2**64),
        sample("pacecar_host_cpu_seconds_total", 300_000_000, "user"),
        sample("pacecar_host_cpu_utilization_ratio", float("nan")),
    ]
    assert push(receiver, OtlpReading(7, samples)) == {"ok": 1, "failed": 0}
    arrived = receiver.metrics()
    (load,) = points(arrived["pacecar_host_load_average"])
    assert (load.WhichOneof("value"), value(load), load.time_unix_nano) == ("as_int", 0, 7)
    assert value(points(arrived["pacecar_host_interrupts_total"])[0]) == 2.0**64
    (seconds,) = points(arrived["pacecar_host_cpu_seconds_total"])
    assert (value(seconds), seconds.start_time_unix_nano) == (0.3, 0)
    assert math.isnan(value(points(arrived["pacecar_host_cpu_utilization_ratio"])[0]))


@pytest.mark.slow
def test_a_histogram_arrives_with_each_step_in_the_bucket_around_it(receiver):
    durations = DurationHistogram()
    for nanoseconds in (0, 100_000_000, 101_000_000, 3_000_000_000):
        durations.observe(nanoseconds)
    name = "pacecar_job_step_duration_distribution_seconds"
    readings = [OtlpReading(7, [HistogramSample(name, ("train", ""), durations.view())])]
    assert push(receiver, *readings)["ok"] == 1
    metric = receiver.metrics()[name]
    assert metric.exponential_histogram.aggregation_temporality == 2, "cumulative"
    (point,) = metric.exponential_histogram.data_points
    assert {a.key: a.value.string_value for a in point.attributes} == {"training_job": "train"}
    assert (point.count, point.zero_count, point.sum, point.min, point.max) == (4, 1, 3.201, 0.0, 3.0)
    assert len(point.negative.bucket_counts) == 0
    base = 2 ** (2**-point.scale)  # bucket n of OpenTelemetry is from base**n to base**(n + 1)
    for seconds in (0.1, 0.101, 3.0):
        at = math.ceil(math.log(seconds, base)) - 1 - point.positive.offset
        assert point.positive.bucket_counts[at] > 0
    assert sum(point.positive.bucket_counts) == 3
    assert len(point.positive.bucket_counts) == math.ceil(math.log(3.0, base)) - math.ceil(math.log(0.1, base)) + 1


@pytest.mark.slow
def test_many_series_go_in_requests_of_bounded_size_and_each_once(receiver):
    number = 2 * POINTS_MAX + 5
    samples = [sample("pacecar_host_load_average", i, f"w{i}") for i in range(number)]
    later = [sample("pacecar_host_load_average", 1, "not this"), sample("pacecar_host_forks_total", 3)]
    assert push(receiver, OtlpReading(1, samples), OtlpReading(2, later))["ok"] == 1
    sizes, seen = [], set()
    for request in receiver.requests[:3]:
        metrics = request.resource_metrics[0].scope_metrics[0].metrics
        sizes.append(sum(len(points(metric)) for metric in metrics))
        seen |= {a.value.string_value for m in metrics for p in points(m) for a in p.attributes}
    assert sizes == [POINTS_MAX, POINTS_MAX, 6]
    assert len(seen) == number


def test_without_the_library_the_daemon_says_what_to_install_and_holds_nothing(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.exporter.otlp.proto.http.metric_exporter", None)
    daemon = Daemon(DaemonConfig(port=0, socket=str(tmp_path / "s")), otlp=OtlpConfig(endpoint="http://127.0.0.1:4318"))
    with pytest.raises(DaemonError, match=r"pip install 'pacecar\[otlp\]'"):
        daemon.start()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("endpoint", ["collector:4317", "grpc://collector", "http://", "4318"])
def test_what_is_no_address_of_http_is_a_mistake_in_the_configuration(endpoint):
    with pytest.raises(ConfigError, match="is not an http:// or https:// address"):
        load_config(environ={"PACECAR_OTLP_ENDPOINT": endpoint})
