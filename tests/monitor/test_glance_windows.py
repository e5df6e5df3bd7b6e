"""Minimum, mean and maximum between scrapes: correct, bounded, and unchanged by reading them."""

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.metrics.catalog import CATALOG, WINDOW_NAMES, MetricKind, by_name
from pacecar.monitor.sampling.ticker import SamplingTick
from pacecar.monitor.sampling.window_stats import MetricPlaces, WindowStats
from pacecar.records import Absent, Failed, Ok, Sample
from tests.kit.own_samples import values_of
from tests.kit.waiting import until

CPU = "pacecar_host_cpu_utilization_ratio"
LOW, MEAN, HIGH = WINDOW_NAMES[CPU]
TICK = SamplingTick(0, 0, 0, 0)


def cpu(value, metric=CPU):
    return Sample(metric, (), value)


def over(window, value):
    return {sample.metric: sample.value for sample in window.over([cpu(value)])}


@pytest.mark.parametrize(("values", "expected"), [([0.5, 0.25, 0.75], (0.25, 0.5, 0.75)), ([0], (0, 0, 0))])
def test_extremes_include_values_between_ticks_zero_is_a_measurement_and_reading_changes_nothing(values, expected):
    window = WindowStats(10)
    for value in values:
        window.add([cpu(value)])
    window.close(1)
    for _ in range(2):
        assert over(window, values[-1]) == dict(zip((LOW, MEAN, HIGH), expected, strict=True))


def test_what_is_not_windowed_and_what_is_gone_now_is_left_out():
    window = WindowStats(10)
    window.add([cpu(1.0), cpu(4, "pacecar_host_cpus_online")])
    window.close(1)
    assert window.over([cpu(4, "pacecar_host_cpus_online")]) == []
    assert window.over([]) == []


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.floats(0, 1), max_size=5), min_size=1, max_size=30), st.integers(1, 10))
def test_the_window_is_the_values_of_the_last_ticks_and_no_more(ticks, length):
    """Tick n closes at time n: the window has the values of the ticks after n - length."""
    window = WindowStats(length)
    for now, values in enumerate(ticks, start=1):
        window.add(map(cpu, values))
        window.close(now)
    inside = [value for values in ticks[max(0, len(ticks) - length) :] for value in values]
    found = over(window, 0)
    if not inside:
        assert found == {}
    else:
        assert (found[LOW], found[HIGH]) == (min(inside), max(inside))
        assert found[MEAN] == pytest.approx(sum(inside) / len(inside))


def test_the_catalog_windows_gauges_only_and_few():
    assert all(by_name(name).kind is MetricKind.GAUGE for names in WINDOW_NAMES.values() for name in names)
    assert len(WINDOW_NAMES) * 3 < len(CATALOG) / 4


OFTEN = {"glances_per_second": lambda: 1000.0, "window_seconds": 60.0}


class Glancing:
    """Collects 0.5 and glances at the given values."""

    name = "cpu"

    def __init__(self, *glances):
        self.glances = list(glances)
        self.threads = set()
        self.looked = threading.Event()
        self.outcome = Ok((cpu(0.5),))

    def collect(self):
        self.threads.add(threading.get_ident())
        return self.outcome

    def glance(self):
        self.threads.add(threading.get_ident())
        if not self.glances:
            self.looked.set()
            return []
        value = self.glances.pop(0)
        if isinstance(value, Exception):
            raise value
        return [cpu(value)]


def read(sampler):
    return {s.metric: s.value for s in sampler.sample(TICK).outcomes["cpu"].samples}


def test_glances_between_ticks_count_and_come_from_the_thread_that_collects(start_sampler):
    collector = Glancing(0.125, 0.875)
    sampler = start_sampler(collector, **OFTEN)
    assert collector.looked.wait(10)
    assert read(sampler) == {CPU: 0.5, LOW: 0.125, MEAN: 0.5, HIGH: 0.875}
    assert len(collector.threads) == 1


@pytest.mark.parametrize("n", [0, 1, 2])
def test_a_glance_that_fails_loses_only_itself(start_sampler, n):
    values = [0.25, 0.75]
    values.insert(n, OSError(5, "Input/output error"))
    collector = Glancing(*values)
    sampler = start_sampler(collector, **OFTEN)
    assert collector.looked.wait(10)
    assert read(sampler) == {CPU: 0.5, LOW: 0.25, MEAN: 0.5, HIGH: 0.75}
    assert values_of(sampler, "pacecar_collector_glance_failures_total") == {"cpu": 1}


def test_a_failed_collector_keeps_the_window_of_what_it_read_and_an_absent_one_has_none(start_sampler):
    collector = Glancing(0.25)
    collector.outcome = Failed("half of it", (cpu(0.75),))
    sampler = start_sampler(collector, **OFTEN)
    assert collector.looked.wait(10)
    assert read(sampler) == {CPU: 0.75, LOW: 0.25, MEAN: 0.5, HIGH: 0.75}
    collector.outcome = Absent("gone")
    assert sampler.sample(TICK).outcomes["cpu"] == Absent("gone")


@pytest.mark.slow
def test_a_glance_that_hangs_holds_up_nobody_and_is_read_when_it_returns(start_sampler):
    let_go = threading.Event()

    class Hanging(Glancing):
        name = "network"
        inside = 0

        def collect(self):
            assert not self.inside, "two threads are in one collector"
            return super().collect()

        def glance(self):
            self.inside += 1
            self.looked.set()
            let_go.wait(30)
            self.inside -= 1
            return []

    other, hanging = Glancing(), Hanging()
    sampler = start_sampler(hanging, other, **OFTEN)
    sampler._deadline_seconds = 0.5
    assert hanging.looked.wait(10)
    outcomes = sampler.sample(TICK).outcomes
    assert "still running since" in outcomes["network"].reason
    assert outcomes["cpu"].samples[0] == cpu(0.5)
    other.looked.clear()
    assert other.looked.wait(10), "the others are glanced at by another thread"
    assert not hanging.threads, "it was not read yet"
    let_go.set()
    until(lambda: hanging.threads, "it is read after all")
    sampler._deadline_seconds = 5
    assert isinstance(sampler.sample(TICK).outcomes["network"], Ok)


def test_all_that_glance_do_so_in_one_turn_of_one_thread(start_sampler):
    collectors = [type("Named", (Glancing,), {"name": name})(*[0.5] * 5) for name in ("cpu", "network", "rdma")]
    sampler = start_sampler(*collectors, **OFTEN)
    for collector in collectors:
        assert collector.looked.wait(10)
    assert len(set.union(*(collector.threads for collector in collectors))) == 1
    counts = values_of(sampler, "pacecar_collector_glances_total").values()
    assert max(counts) - min(counts) <= 1


def test_no_pace_no_glance_and_a_new_pace_is_taken_up_at_the_next_tick(start_sampler):
    collector = Glancing(0.25)
    rates = [0.0]
    sampler = start_sampler(collector, glances_per_second=lambda: rates[-1], window_seconds=60.0)
    time.sleep(0.05)
    assert read(sampler) == {CPU: 0.5, LOW: 0.5, MEAN: 0.5, HIGH: 0.5}
    assert values_of(sampler, "pacecar_collector_glances_total") == {"cpu": 0}
    assert values_of(sampler, "pacecar_collector_glance_failures_total") == {"cpu": 0}
    rates.append(1000.0)
    sampler.sample(TICK)
    assert collector.looked.wait(10)


def test_collectors_that_do_not_glance_are_not_asked_to(start_sampler, steady):
    sampler = start_sampler(steady(), **OFTEN)
    assert values_of(sampler, "pacecar_collector_glances_total") == {}


TICKS = st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), max_size=6), min_size=1, max_size=8)


@pytest.mark.slow
@given(TICKS)
def test_places_are_those_of_a_search(ticks):
    places, kept = MetricPlaces(), {}
    for tick in ticks:
        samples = tuple(kept.setdefault(one, Sample(one[0], (), one[1])) for one in tick)
        expected = {m: [at for at, s in enumerate(samples) if s.metric == m] for m in {s.metric for s in samples}}
        assert places.find(samples) == expected
