"""The page says what prometheus_client would say, and a scrape hands over what a tick has written."""

import gzip
import math
import random
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from pacecar.clock import NS_PER_SECOND
from pacecar.metrics.catalog import CATALOG, MetricKind, by_name
from pacecar.monitor.export import metric_writer, pages
from pacecar.monitor.export.pages import outside
from pacecar.monitor.export.prometheus import Exporter
from pacecar.monitor.histogram import BOUNDS_NS, DurationHistogram, HistogramSample
from pacecar.monitor.http.request import HttpRequest
from pacecar.records import Sample
from tests.kit.client_model import families as proto_families
from tests.kit.fake_clock import FakeClock
from tests.kit.own_samples import value_of
from tests.kit.selection import reduced

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited;q=0.6,*/*;q=0.1"
CPUS = "pacecar_host_cpus_online"
STEPS = "pacecar_job_step_duration_distribution_seconds"


def ask(exporter, *, accept="", encoding="", query=""):
    """Return status, headers and body of one scrape."""
    answer = exporter(HttpRequest("GET", "/metrics", query, {"accept": accept, "accept-encoding": encoding}))
    return answer.status, dict(answer.headers), answer.body


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
                if rows and entry.kind is MetricKind.HISTOGRAM:
                    family = HistogramMetricFamily(entry.name, entry.help, labels=entry.labels, unit=entry.unit.outside)
                    for labels, value in rows.items():
                        bounds = [str(outside(entry, bound)) for bound in BOUNDS_NS]
                        buckets = [*zip(bounds, value.below, strict=True), ("+Inf", value.count)]
                        family.add_metric(labels, buckets, outside(entry, value.sum_ns))
                    yield family
                elif rows:
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


def counted(*durations_ns):
    histogram = DurationHistogram()
    for duration in durations_ns:
        histogram.observe(duration)
    return histogram.view()


@st.composite
def samples(draw):
    entry = draw(st.sampled_from(CATALOG))
    label = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=8)
    if entry.kind is MetricKind.HISTOGRAM:
        durations = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=20))
        return HistogramSample(entry.name, tuple(draw(label) for _ in entry.labels), counted(*durations))
    value = draw(values) if entry.kind is MetricKind.GAUGE else draw(st.integers(0, 2**63))
    return Sample(entry.name, tuple(draw(label) for _ in entry.labels), value)


@pytest.mark.slow
@settings(max_examples=reduced(150), deadline=None)
@given(st.lists(samples(), max_size=12))
def test_both_formats_mean_what_prometheus_client_writes(drawn):
    exporter = serving(*drawn)
    for how, write, parse in (
        ("", generate_latest, parse_prometheus),
        (OPENMETRICS, generate_openmetrics, parse_openmetrics),
    ):
        assert meaning(text(exporter, accept=how), parse) == meaning(theirs(drawn, write), parse)


def test_the_heads_and_labels_are_prometheus_clients_to_the_letter():
    drawn = []
    for entry in CATALOG:
        labels = tuple(f'a"{i}\\\n' for i, _ in enumerate(entry.labels))
        is_histogram = entry.kind is MetricKind.HISTOGRAM
        drawn.append(
            HistogramSample(entry.name, labels, counted(1)) if is_histogram else Sample(entry.name, labels, 0.5)
        )

    def without_values(page):
        return [line if line.startswith("#") else line.rpartition(" ")[0] for line in page.splitlines()]

    exporter = serving(*drawn)
    assert without_values(text(exporter)) == without_values(theirs(drawn, generate_latest))
    assert without_values(text(exporter, accept=OPENMETRICS)) == without_values(theirs(drawn, generate_openmetrics))


def protobuf_meaning(page):
    """What a scraper takes from a page of messages, in the words of `meaning`."""
    kinds = {0: "counter", 1: "gauge", 4: "histogram"}
    found = {}
    for family in proto_families(page):
        rows = {}
        for metric in family.metric:
            labels = tuple(sorted((pair.name, pair.value) for pair in metric.label))
            if metric.HasField("histogram"):
                said = metric.histogram
                rows[family.name + "_count", labels] = float(said.sample_count)
                rows[family.name + "_sum", labels] = said.sample_sum
                bounds = {str(b.upper_bound): float(b.cumulative_count) for b in said.bucket}
                bounds["+Inf"] = float(said.sample_count)
                for bound, count in bounds.items():
                    rows[family.name + "_bucket", tuple(sorted([*labels, ("le", bound)]))] = count
            else:
                rows[family.name, labels] = (metric.counter if metric.HasField("counter") else metric.gauge).value
        found[family.name.removesuffix("_total"), kinds[family.type], family.help] = rows
    return found


@pytest.mark.slow
@settings(max_examples=reduced(150), deadline=None)
@given(st.lists(samples(), max_size=12))
def test_the_protobuf_means_what_the_text_does(drawn):
    exporter = serving(*drawn)
    of_text = {key[:3]: rows for key, rows in meaning(text(exporter), parse_prometheus).items()}
    assert protobuf_meaning(ask(exporter, accept=PROTOBUF)[2]) == of_text


def native_buckets(histogram):
    """Index -> count of a native histogram's message."""
    counts, index, count, deltas = {}, 0, 0, list(histogram.positive_delta)
    for span in histogram.positive_span:
        index += span.offset
        for _ in range(span.length):
            count += deltas.pop(0)
            counts[index] = count
            index += 1
    assert not deltas
    return counts


@pytest.mark.slow
@given(st.lists(st.integers(0, 10**13), min_size=1, max_size=50))
def test_each_duration_is_in_the_native_bucket_around_it_and_below_the_bounds_that_it_is_below(durations):
    exporter = serving(HistogramSample(STEPS, ("train", "l"), counted(*durations)))
    (family,) = proto_families(ask(exporter, accept=PROTOBUF)[2])
    (metric,) = family.metric
    histogram = metric.histogram
    buckets = native_buckets(histogram)
    assert histogram.zero_count == durations.count(0)
    assert histogram.sample_count == len(durations) == histogram.zero_count + sum(buckets.values())
    assert histogram.sample_sum == outside(by_name(STEPS), sum(durations))
    assert all(buckets.values())
    width = 2 ** (1 / 2**histogram.schema)
    for index, count in buckets.items():
        edges = width ** (index - 1) * (1 - 1e-12), width**index * (1 + 1e-12)
        assert sum(edges[0] < duration / 1e9 <= edges[1] for duration in durations) >= count
    for bucket in histogram.bucket:
        assert bucket.cumulative_count == sum(duration / 1e9 <= bucket.upper_bound for duration in durations)


def test_an_exact_power_of_two_is_in_the_bucket_that_it_ends(make_step):
    for seconds, index in ((1.0, 0), (0.5, -16), (2.0, 16), (1.0 + 1e-9, 1), (1.0 - 1e-9, 0), (0.25, -32)):
        assert counted(round(seconds * 1e9)).native == ((index, 1),)


def test_only_those_who_ask_for_protobuf_get_it_and_it_is_compressed_and_chosen_by_name_as_well():
    live = [HistogramSample(STEPS, ("train", "l"), counted(10**9))]
    exporter = serving(Sample(CPUS, (), 3), live=live)
    status, headers, body = ask(exporter, accept=PROTOBUF, encoding="gzip")
    assert status == "200 OK"
    assert headers["Content-Type"].startswith(
        "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily"
    )
    assert [family.name for family in proto_families(gzip.decompress(body))] == [CPUS, STEPS]
    some = ask(exporter, accept=PROTOBUF, query=f"name[]={STEPS}_bucket")[2]
    assert [family.name for family in proto_families(some)] == [STEPS]
    assert CPUS not in text(exporter, query=f"name[]={STEPS}_count")
    for accept in ("", OPENMETRICS, "application/vnd.google.protobuf", "application/vnd.google.protobuf;proto=other"):
        page = text(exporter, accept=accept)
        assert f'{STEPS}_bucket{{launch="l",le="1.0",training_job="train"}} 1\n' in page
        assert f'{STEPS}_bucket{{launch="l",le="0.5",training_job="train"}} 0\n' in page


def test_a_histogram_goes_on_between_scrapes():
    histogram = DurationHistogram()
    assert histogram.view() is None
    exporter = Exporter(lambda: [HistogramSample(STEPS, ("train", "l"), histogram.view())])
    for expected in (1, 2):
        histogram.observe(3 * 10**8)
        assert histogram.view() is histogram.view()
        assert f'{STEPS}_count{{launch="l",training_job="train"}} {expected}\n' in text(exporter)
        (family,) = proto_families(ask(exporter, accept=PROTOBUF)[2])
        assert family.metric[0].histogram.sample_count == expected
    assert (histogram.view().min_ns, histogram.view().max_ns) == (3 * 10**8, 3 * 10**8)


@pytest.mark.parametrize("accept", ["", PROTOBUF])
def test_a_histogram_that_cannot_be_written_is_left_out_of_every_page(accept):
    sound = counted(3 * 10**8)
    served = [HistogramSample(STEPS, ("train", "l"), sound)]
    exporter = Exporter(lambda: served)
    assert ask(exporter, accept=accept)[2]
    served = [HistogramSample(STEPS, ("train", "l"), msgspec.structs.replace(sound, below=sound.below[:-1]))]
    assert [ask(exporter, accept=accept)[2] for _ in range(3)] == [b""] * 3


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


def test_name_parameter():
    exporter = serving(Sample(CPUS, (), 3), live=[Sample("pacecar_inbox_jobs", (), 2)])
    assert text(exporter, query="name[]=pacecar_inbox_jobs").splitlines()[-1] == "pacecar_inbox_jobs 2"
    assert CPUS not in text(exporter, query="name[]=pacecar_inbox_jobs")
    both = text(exporter, query=f"name[]=pacecar_inbox_jobs&name[]={CPUS}", accept=OPENMETRICS)
    assert len(list(parse_openmetrics(both))) == 2
    assert gzip.decompress(ask(exporter, query=f"name[]={CPUS}", encoding="gzip")[2]).count(b"\n") == 3
    assert text(exporter, query="name[]=nothing") == ""


def test_lines_of_labels_that_come_and_go_do_not_fill_memory(monkeypatch):
    monkeypatch.setattr(metric_writer, "SERIES_MAX", 10)
    pen = metric_writer.MetricWriter(pages.text_line)
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


@pytest.mark.slow
def test_a_page_after_many_ticks_is_the_page_of_the_last_one():
    """However series come, go, change place, come twice or change their values: a page depends on its tick alone."""
    chance = random.Random(4)
    served = Exporter(list)
    names = [("pacecar_host_network_up", (f"eth{n}",)) for n in range(6)] + [
        (CPUS, ()),
        ("pacecar_rdma_port_active", ("m", "1")),
    ]
    samples = [Sample(*name, 1) for name in names]
    for _ in range(300):
        for _ in range(chance.randrange(3)):
            place = chance.randrange(len(samples))
            one = samples[place]
            samples[place] = Sample(one.metric, one.labels, chance.choice([0, 1, 2.5, math.nan, 7]))
        match chance.randrange(12):
            case 0:
                samples = [Sample(*name, 1) for name in chance.sample(names, chance.randrange(1, len(names) + 1))]
            case 1:
                chance.shuffle(samples)
            case 2:
                samples = [*samples, samples[0]]
            case 3:
                samples = [Sample(one.metric, one.labels, "no number") if one is samples[0] else one for one in samples]
        served.publish(list(samples))
        for how in ({"accept": PROTOBUF}, {"accept": OPENMETRICS}, {}):
            if chance.random() < 0.5:
                assert ask(served, **how)[2] == ask(serving(*samples), **how)[2]
        samples = [one for one in samples if not isinstance(one.value, str)] or [Sample(CPUS, (), 3)]


def test_a_page_that_nobody_waits_for_is_not_written_and_one_that_is_expected_is():
    clock = FakeClock()
    exporter = Exporter(list, None, clock)
    sample = Sample(CPUS, (), 1)
    written = []

    class Noted(list):
        def __iter__(self):
            written.append(clock.monotonic_ns())
            return super().__iter__()

    def ticks(count):
        written.clear()
        for _ in range(count):
            clock.advance(NS_PER_SECOND)
            exporter.publish(Noted([sample]))
        return len(set(written))

    assert ticks(20) == 0
    for _ in range(4):
        text(exporter)
        ticks(15)
    assert 1 <= ticks(15) <= 3
    text(exporter)
    written.clear()
    text(exporter)
    assert written == []  # the page of a tick is written once


def test_scrapes_are_counted_and_timed():
    exporter = serving()
    scrapes, nanoseconds = "pacecar_daemon_scrapes_total", "pacecar_daemon_scrape_seconds_total"
    assert (value_of(exporter, scrapes), value_of(exporter, nanoseconds)) == (0, 0)
    text(exporter)
    text(exporter)
    assert value_of(exporter, scrapes) == 2
    assert value_of(exporter, nanoseconds) > 0
