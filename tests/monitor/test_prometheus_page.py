"""The page says what prometheus_client would say, and a scrape hands over what a tick has written."""

import gzip
import math
import threading
from wsgiref.util import setup_testing_defaults

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from pacecar.metrics.catalog import CATALOG, MetricKind, by_name
from pacecar.monitor.export import prometheus as room
from pacecar.monitor.export.prometheus import Exporter, outside
from pacecar.records import Sample
from tests.kit.own_samples import value_of

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
CPUS = "pacecar_host_cpus_online"


def ask(exporter, *, accept="", encoding="", query="", method="GET"):
    """Return status, headers and body of one scrape."""
    environ = {"REQUEST_METHOD": method, "QUERY_STRING": query}
    environ |= {"HTTP_ACCEPT": accept, "HTTP_ACCEPT_ENCODING": encoding}
    setup_testing_defaults(environ)
    said = []
    body = b"".join(exporter(environ, lambda status, headers: said.append((status, dict(headers)))))
    return (*said[0], body)


def text(exporter, **how):
    return ask(exporter, **how)[2].decode()


def serving(*samples, live=()):
    exporter = Exporter(lambda: live)
    exporter.publish(samples)
    return exporter


def theirs(samples, write):
    """The page as prometheus_client writes it."""

    class Source:
        def collect(self):
            for entry in CATALOG:
                rows = {s.labels: s.value for s in samples if s.metric == entry.name}
                if rows:
                    kind = CounterMetricFamily if entry.kind is MetricKind.COUNTER else GaugeMetricFamily
                    family = kind(entry.name, entry.help, labels=entry.labels, unit=entry.unit.outside)
                    for labels, value in rows.items():
                        family.add_metric(labels, outside(entry, value))
                    yield family

    registry = CollectorRegistry()
    registry.register(Source())
    return write(registry).decode()


def meaning(page, parse):
    """What a scraper takes from a page; Prometheus keeps floats, so whole numbers beyond 2**53 are compared as such."""
    return {
        (family.name, family.type, family.documentation, family.unit): {
            (s.name, tuple(sorted(s.labels.items()))): float(s.value) for s in family.samples
        }
        for family in parse(page)
    }


values = st.one_of(st.integers(0, 2**63), st.floats(allow_nan=False, min_value=-1e300, max_value=1e300))


@st.composite
def samples(draw):
    entry = draw(st.sampled_from(CATALOG))
    label = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
    value = draw(values) if entry.kind is MetricKind.GAUGE else draw(st.integers(0, 2**63))
    return Sample(entry.name, tuple(draw(label) for _ in entry.labels), value)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(samples(), max_size=12))
def test_both_formats_mean_what_prometheus_client_writes(drawn):
    exporter = serving(*drawn)
    for how, write, parse in (
        ("", generate_latest, parse_prometheus),
        (OPENMETRICS, generate_openmetrics, parse_openmetrics),
    ):
        assert meaning(text(exporter, accept=how), parse) == meaning(theirs(drawn, write), parse)


def test_the_heads_and_labels_are_prometheus_clients_to_the_letter():
    drawn = [Sample(entry.name, tuple(f'a"{i}\\\n' for i, _ in enumerate(entry.labels)), 0.5) for entry in CATALOG]

    def without_values(page):
        return [line if line.startswith("#") else line.rpartition(" ")[0] for line in page.splitlines()]

    exporter = serving(*drawn)
    assert without_values(text(exporter)) == without_values(theirs(drawn, generate_latest))
    assert without_values(text(exporter, accept=OPENMETRICS)) == without_values(theirs(drawn, generate_openmetrics))


def test_numbers_are_exact_and_zero_is_a_measurement():
    def served(metric, value):
        entry = by_name(metric)
        return (
            text(serving(Sample(metric, tuple("x" for _ in entry.labels), value))).splitlines()[-1].rpartition(" ")[2]
        )

    assert served(CPUS, 0) == "0"
    assert served("pacecar_host_network_receive_bytes_total", 2**63 + 1) == str(2**63 + 1)  # no float has it
    assert served("pacecar_daemon_cpu_seconds_total", 300_000_000) == "0.3"
    assert served("pacecar_gpu_power_watts", 650_123) == "650.123"
    assert served("pacecar_host_cpu_utilization_ratio", 0.0) == "0.0"
    assert served("pacecar_host_cpu_utilization_ratio", math.inf) == "+Inf"
    assert served("pacecar_host_cpu_utilization_ratio", math.nan) == "NaN"
    assert served("pacecar_host_network_up", True) == "1"


def test_a_value_that_changes_is_written_anew_and_a_series_that_is_gone_is_gone():
    exporter = serving(Sample(CPUS, (), 3), Sample("pacecar_host_network_up", ("eth0",), 1))
    assert f"\n{CPUS} 3\n" in text(exporter)
    exporter.publish([Sample(CPUS, (), 4)])
    assert f"\n{CPUS} 4\n" in text(exporter)
    assert "eth0" not in text(exporter)
    exporter.publish([])
    assert text(exporter) == ""


def test_a_series_that_comes_twice_is_served_once():
    assert text(serving(Sample(CPUS, (), 3), Sample(CPUS, (), 4))).count(f"\n{CPUS} ") == 1
    assert text(serving(Sample(CPUS, (), 3), live=[Sample(CPUS, (), 4)])).count(f"\n{CPUS} ") == 1


def test_live_samples_are_of_the_moment_and_published_ones_of_the_tick():
    live = [Sample("pacecar_inbox_jobs", (), 1)]
    exporter = serving(Sample(CPUS, (), 3), live=live)
    assert "pacecar_inbox_jobs 1\n" in text(exporter)
    live[0] = Sample("pacecar_inbox_jobs", (), 2)
    assert "pacecar_inbox_jobs 2\n" in text(exporter)


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_compressed_pages_say_the_same_whether_made_in_advance_or_not(accept):
    live = [Sample("pacecar_inbox_jobs", (), 5)]
    exporter = serving(*(Sample("pacecar_host_network_up", (f"eth{i}",), 1) for i in range(500)), live=live)
    for _ in range(3):
        status, headers, body = ask(exporter, accept=accept, encoding="br, gzip;q=1")
        assert (status, headers["Content-Encoding"]) == ("200 OK", "gzip")
        assert int(headers["Content-Length"]) == len(body)
        plain = ask(exporter, accept=accept)[2]
        assert gzip.decompress(body) == plain
        assert len(body) < len(plain) / 5
        exporter.publish([Sample("pacecar_host_network_up", (f"eth{i}",), 0) for i in range(500)])


def test_name_parameter_and_methods():
    exporter = serving(Sample(CPUS, (), 3), live=[Sample("pacecar_inbox_jobs", (), 2)])
    assert text(exporter, query="name[]=pacecar_inbox_jobs").splitlines()[-1] == "pacecar_inbox_jobs 2"
    assert CPUS not in text(exporter, query="name[]=pacecar_inbox_jobs")
    both = text(exporter, query=f"name[]=pacecar_inbox_jobs&name[]={CPUS}", accept=OPENMETRICS)
    assert len(list(parse_openmetrics(both))) == 2
    assert gzip.decompress(ask(exporter, query=f"name[]={CPUS}", encoding="gzip")[2]).count(b"\n") == 3
    assert text(exporter, query="name[]=nothing") == ""
    assert ask(exporter, method="POST")[0].startswith("405")


def test_lines_of_labels_that_come_and_go_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr(room, "SERIES_MAX", 10)
    pen = room.MetricWriter()
    for round_ in range(5):
        pen.write([Sample("pacecar_host_network_up", (f"veth{round_}-{i}",), 1) for i in range(8)])
        assert len(pen._lines) <= 10 + 8


def test_scrapes_and_ticks_at_once_serve_whole_pages():
    """A page is of one tick: all its values are equal, whatever happens meanwhile."""
    exporter = Exporter(list)
    stop = threading.Event()

    def tick():
        n = 0
        while not stop.is_set():
            n += 1
            exporter.publish([Sample("pacecar_host_network_up", (f"eth{i}",), n) for i in range(50)])

    ticker = threading.Thread(target=tick)
    ticker.start()
    try:
        for turn in range(200):
            page = gzip.decompress(ask(exporter, encoding="gzip")[2]).decode() if turn % 2 else text(exporter)
            seen = {line.rpartition(" ")[2] for line in page.splitlines() if not line.startswith("#")}
            assert len(seen) <= 1
    finally:
        stop.set()
        ticker.join()


def test_scrapes_are_counted_and_timed():
    exporter = serving()
    scrapes, nanoseconds = "pacecar_daemon_scrapes_total", "pacecar_daemon_scrape_seconds_total"
    assert (value_of(exporter, scrapes), value_of(exporter, nanoseconds)) == (0, 0)
    text(exporter)
    text(exporter)
    assert value_of(exporter, scrapes) == 2
    assert value_of(exporter, nanoseconds) > 0
