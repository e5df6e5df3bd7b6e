"""Impossible values are missing and named, and cost nothing else; a counter that falls restarts once confirmed."""

import logging
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.metrics.value_ranges import ANYTHING, RANGES
from pacecar.monitor.sampling.sample_screen import CORRECTION_READINGS, KEPT_SCREENS, SampleScreen
from pacecar.monitor.sampling.ticker import SamplingTick
from pacecar.records import Absent, Failed, Ok, Sample
from tests.kit.own_samples import values_of
from tests.kit.selection import reduced

TICK = SamplingTick(0, 0, 0, 0)
FORKS, DROPS = "pacecar_host_forks_total", "pacecar_host_network_receive_drops_total"
POWER, ENERGY = "pacecar_gpu_power_watts", "pacecar_gpu_energy_joules_total"
BIG = 1_000_000


def of(metric, value, *labels):
    return Sample(metric, labels, value)


def served(screen, *samples):
    """Return the values of a tick that are served, by series."""
    sound, _ = screen.screen(samples)
    return {(s.metric, *s.labels): s.value for s in sound}


def forks(*values):
    """Return what is served of a counter with these readings; None: missing."""
    screen = SampleScreen()
    return [served(screen, of(FORKS, value)).get((FORKS,)) for value in values]


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (of("pacecar_gpu_utilization_ratio", 42949672.95, "3"), "gpu='3': 42949672.95 is outside 0 to 1"),
        (of(POWER, 4294967295, "3"), "NVML: pacecar_gpu_power_watts of gpu='3': 4294967.295 is outside 0 to 10000"),
        (of("pacecar_gpu_temperature_celsius", 2147483647, "3"), "2147483647 is outside -100 to 250"),
        (of("pacecar_gpu_performance_state", 32, "3"), "32 is outside 0 to 15"),
        (of("pacecar_host_swap_used_bytes", -18889465931478580723712), "pacecar_host_swap_used_bytes: -1.8"),
        (of("pacecar_host_tasks_blocked", 4294967295), "/proc/stat"),
        (of("pacecar_host_disk_requests_in_flight", 4294967295, "sda"), "/proc/diskstats"),
        (of("pacecar_host_load_average", math.nan, "1m"), "nan is outside"),
        (of("pacecar_host_load_average", math.inf, "1m"), "inf is outside"),
        (of("pacecar_rdma_receive_bytes_total", (2**64 - 1) * 4, "mlx5_0", "1"), "/sys/class/infiniband"),
        (of("pacecar_host_sensor_temperature_celsius", 2**31, "nvme", "nvme0", "Composite"), "sensor='Composite'"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_missing_and_named_and_costs_no_neighbour(sample, words):
    neighbours = (of("pacecar_host_cpus_online", 4), of(POWER, 700_000, "4"))
    sound, refusals = SampleScreen().screen((neighbours[0], sample, neighbours[1]))
    assert sound == neighbours
    (refusal,) = refusals
    assert refusal.sample is sample
    assert words in refusal.reason


def test_a_value_that_is_right_again_is_served_again():
    screen = SampleScreen()
    assert [served(screen, of(POWER, value, "0")) for value in (0, 2**32 - 1, 2**32 - 1, 0)] == [
        {(POWER, "0"): 0}, {}, {}, {(POWER, "0"): 0},
    ]  # fmt: skip


def test_a_part_above_its_whole_is_missing_and_the_whole_is_served():
    free, size = "pacecar_host_filesystem_available_bytes", "pacecar_host_filesystem_size_bytes"
    screen = SampleScreen()
    samples = (of(size, 10, "/"), of(free, 11, "/"), of(size, 20, "/data"), of(free, 20, "/data"))
    sound, refusals = screen.screen(samples)
    assert sound == (samples[0], samples[2], samples[3])
    assert [refusal.reason for refusal in refusals] == [f"statvfs: {free} of mountpoint='/': 11 is above {size}"]
    assert served(screen, of(size, 12, "/"), *samples[1:])[free, "/"] == 11


def test_a_second_source_of_a_series_is_named_and_the_first_is_served():
    screen = SampleScreen()
    for _ in range(2):
        sound, refusals = screen.screen((of(DROPS, 5, "eth0"), of(DROPS, 5, "eth1"), of(DROPS, 7, "eth0")))
        assert [(s.labels, s.value) for s in sound] == [(("eth0",), 5), (("eth1",), 5)]
        assert [r.reason.rpartition(": ")[2] for r in refusals] == ["7 comes from a second source with these labels"]


def test_a_fact_that_is_said_twice_is_served_once_and_no_failure():
    member = of("pacecar_cgroup_member_info", 1, "/a", "rank", "job", "", "0")
    assert SampleScreen().screen((member, Sample(member.metric, member.labels, 1))) == ((member,), [])


@pytest.mark.parametrize("glitch", [0, 3, BIG // 2, BIG - 1])
def test_a_counter_that_falls_once_and_is_back_has_never_fallen(glitch):
    assert forks(BIG, glitch, BIG + 5, BIG + 6) == [BIG, None, BIG + 5, BIG + 6]
    assert forks(BIG, glitch, BIG, glitch, BIG) == [BIG, None, BIG, None, BIG]


@pytest.mark.parametrize("values", [(BIG, 0, 0, 0), (BIG, 3, 9, 14), (BIG, 400_000, 600_000, 700_000), (7, 6, 6, 6)])
def test_a_counter_that_begins_again_is_served_from_the_second_reading_on(values):
    """The last: a link that went up and down seven times, and six times since it was recreated."""
    assert forks(*values) == [values[0], None, *values[2:]]


def test_a_counter_that_never_stops_falling_is_not_served():
    assert forks(BIG, 50, 40, 30, 20, 10) == [BIG, *[None] * 5]


def test_a_small_fall_is_no_restart_but_is_believed_after_a_while():
    back = forks(BIG, *[BIG - 10] * 200, BIG + 1)
    assert back == [BIG, *[None] * 200, BIG + 1]
    lasting = forks(BIG, *[BIG - 10] * (CORRECTION_READINGS + 1))
    assert lasting == [BIG, *[None] * (CORRECTION_READINGS - 1), BIG - 10, BIG - 10]


def test_an_object_that_was_not_read_anew_confirms_nothing():
    screen, fallen = SampleScreen(), of(FORKS, 0)
    assert served(screen, of(FORKS, BIG)) == {(FORKS,): BIG}
    for others in ((), (), (of("pacecar_host_cpus_online", 4),), ()):
        assert (FORKS,) not in served(screen, *others, fallen)
    assert served(screen, of(FORKS, 0)) == {(FORKS,): 0}


def test_a_counter_that_was_missing_for_a_moment_is_held_back_too_and_one_gone_for_long_is_new():
    for ticks, expected in ((1, {}), (KEPT_SCREENS - 1, {}), (KEPT_SCREENS + 2, {(DROPS, "eth0"): 0})):
        screen = SampleScreen()
        served(screen, of(DROPS, BIG, "eth0"))
        for n in range(ticks):
            served(screen, *[of(DROPS, n, f"veth{n % 2}")] * (n % 2))
        assert served(screen, of(DROPS, 0, "eth0")) == expected


def test_a_counter_whose_impossible_value_hides_a_fall_is_held_back():
    assert forks(BIG, 2**64, 5, BIG + 1) == [BIG, None, None, BIG + 1]


class Plain:
    """The same without optimizations: every sample is looked up at every tick."""

    def __init__(self):
        self.last, self.held = {}, {}

    def screen(self, samples):
        out, seen = [], set()
        for sample in samples:
            series, value = (sample.metric, sample.labels), sample.value
            limits = RANGES.get(sample.metric, ANYTHING)
            if series in seen:
                continue
            seen.add(series)
            if not limits.low <= value <= limits.high:
                continue
            if sample.metric.endswith("_total") and value < self.last.get(series, 0):
                fell_to, held, readings = self.held.get(series, (value, math.inf, 0))
                if value < held and readings:
                    fell_to, readings = value, 0
                self.held[series] = (fell_to, value, readings + 1)
                is_restart = fell_to < max(self.last[series] / 2, 1000)
                if readings + 1 < (2 if is_restart else CORRECTION_READINGS):
                    continue
            self.held.pop(series, None)
            self.last[series] = value
            out.append((series, value))
        return out


SERIES = [(FORKS, ()), (DROPS, ("eth0",)), (DROPS, ("eth1",)), (POWER, ("0",)), (ENERGY, ("0",))]
VALUES = st.sampled_from([0, 1, 900, 2_000, 2_500, 4_999, 5_000, 9_000_000, 2**32 - 1, 2**64 - 1, -1])


@pytest.mark.slow
@settings(max_examples=reduced(300), deadline=None)
@given(st.lists(st.lists(st.tuples(st.sampled_from(SERIES), VALUES), max_size=7), max_size=20))
def test_place_by_place_gives_what_looking_up_everything_gives(ticks):
    screen, plain = SampleScreen(), Plain()
    for tick in ticks:
        samples = tuple(Sample(metric, labels, value) for (metric, labels), value in tick)
        sound, refusals = screen.screen(samples)
        assert [((s.metric, s.labels), s.value) for s in sound] == plain.screen(samples)
        assert len(sound) + len(refusals) == len(samples)


@pytest.mark.slow
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=30))
def test_a_counter_that_is_served_lower_was_below_at_two_readings(values):
    shown = forks(*values)
    last, last_at = -1, 0
    for place, value in enumerate(shown):
        if value is not None:
            assert value >= last or place - last_at >= 2
            last, last_at = value, place


def test_a_tick_without_anything_wrong_hands_on_the_very_tuple():
    samples = (of(FORKS, 1), of("pacecar_host_cpus_online", 4))
    assert SampleScreen().screen(samples)[0] is samples


# --- in the sampler -------------------------------------------------------------------------------


class Scripted:
    name = "scripted"

    def __init__(self, *outcomes):
        self.outcomes, self.refused, self.glanced = list(outcomes), [], []

    def collect(self):
        return self.outcomes.pop(0)

    def glance(self):
        return self.glanced

    def note_refused(self, refusals):
        self.refused.append([refusal.sample.value for refusal in refusals])


def test_what_is_refused_is_counted_named_and_told_to_the_collector(start_sampler, caplog):
    caplog.set_level(logging.INFO)
    good, bad = of(FORKS, 7), of("pacecar_host_tasks_blocked", 2**32 - 1)
    collector = Scripted(
        Ok((good, bad), 2, "/proc/stat:3: odd"), Ok((good, bad)), Ok((good,)), Failed("down", (bad,)), Absent("gone")
    )
    sampler = start_sampler(collector)
    outcomes = [sampler.sample(TICK).outcomes["scripted"] for _ in range(5)]
    assert [type(outcome).__name__ for outcome in outcomes] == ["Ok", "Ok", "Ok", "Failed", "Absent"]
    assert [getattr(outcome, "read_failures", 0) for outcome in outcomes] == [3, 1, 0, 1, 0]
    assert [outcome.samples for outcome in outcomes[:4]] == [(good,), (good,), (good,), ()]
    assert outcomes[0].reason.startswith("/proc/stat:3: odd; /proc/stat: pacecar_host_tasks_blocked: 4294967295 is")
    assert outcomes[3].reason.startswith("down; /proc/stat: pacecar_host_tasks_blocked")
    assert values_of(sampler, "pacecar_collector_read_failures_total") == {"scripted": 5}
    assert values_of(sampler, "pacecar_collector_failures_total") == {"scripted": 1}
    assert collector.refused == [[2**32 - 1], [2**32 - 1], [], [2**32 - 1]]
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0:2] for line in lines] == [
        ["collector scripted", " 3 read failures"],
        ["collector scripted", " ok"],
        ["collector scripted", " failed"],
        ["collector scripted", " absent"],
    ]


def test_a_source_that_comes_and_goes_does_not_fill_the_log(start_sampler, caplog):
    caplog.set_level(logging.INFO)
    sampler = start_sampler(Scripted(*[Ok((), n % 2, "x" * (n % 2)) for n in range(100)]))
    for _ in range(100):
        sampler.sample(TICK)
    assert len(caplog.records) <= 11


def test_a_glance_that_reads_nonsense_is_in_no_window_and_named_by_the_next_tick(start_sampler):
    metric = "pacecar_gpu_utilization_ratio"
    collector = Scripted(Ok((of(metric, 0.5, "0"),)), Ok((of(metric, 0.5, "0"),)))
    sampler = start_sampler(collector)
    sampler.sample(TICK)
    collector.glanced = [of(metric, 42949672.95, "0"), of(metric, 0.75, "0")]
    sampler._glance()
    outcome = sampler.sample(TICK).outcomes["scripted"]
    highest = [s.value for s in outcome.samples if s.metric == "pacecar_gpu_utilization_window_max_ratio"]
    assert highest == [0.75]
    assert outcome.read_failures == 1
    assert "42949672.95" in outcome.reason
