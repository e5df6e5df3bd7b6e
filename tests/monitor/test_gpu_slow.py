"""A slow driver is not a dead one: real delays in the stand-in's calls, a real clock, and the log."""

from __future__ import annotations

import itertools
import logging
import time

import pytest

from pacecar.clock import SystemClock
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.gpu.call_deadlines import CALL_SECONDS_FIRST, CALL_SECONDS_MAX, CALL_SECONDS_MIN, CallTimes
from pacecar.monitor.gpu.change_log import LINES_PER_MINUTE, SETTLE_SECONDS, GpuChangeLog
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.recorder.triggers import Triggers
from pacecar.records import Absent, Snapshot
from tests.kit.waiting import until
from tests.monitor.nvml_standin.standin import GPUS

SECOND = 1_000_000_000
TICK_SECONDS = 0.1
"""A tenth of the default, like the deadline: 11 calls of 5 ms miss it as 11 calls of 50 ms miss half a second."""

POWER = "pacecar_gpu_power_watts"


class MonitoredHook:
    """A collector that ticks in real time, and the triggers of a recorder."""

    def __init__(self, folder, tick_seconds=TICK_SECONDS):
        self.collector = GpuCollector(
            PyNvml(), SystemClock(), deadline_seconds=tick_seconds / 2, kernel_log=str(folder / "kmsg")
        )
        self.tick_seconds = tick_seconds
        self.triggers, self.fired, self.ticks = Triggers(stall_ns=600 * SECOND), [], 0

    def tick(self):
        """Return (metric, GPU, other labels) -> value, a tick after the last time."""
        begun = time.monotonic()
        outcome = self.collector.collect()
        self.ticks += 1
        wall_ns = int(self.ticks * self.tick_seconds * SECOND)
        self.fired += self.triggers.tick(Snapshot(self.ticks, 0, wall_ns, 0, {"gpu": outcome}, {}))
        time.sleep(max(0.0, self.tick_seconds - (time.monotonic() - begun)))
        samples = () if isinstance(outcome, Absent) else outcome.samples
        return {(s.metric, *s.labels): s.value for s in samples}

    def until_up(self, gpus=GPUS):
        until(lambda: up(self.tick()) == list(range(gpus)), "all GPUs are up", seconds=120)


def up(read):
    return sorted(int(key[1]) for key, value in read.items() if key[0] == "pacecar_gpu_up" and value == 1)


def slow(read):
    return sorted(int(key[1]) for key, value in read.items() if key[0] == "pacecar_gpu_driver_slow" and value == 1)


@pytest.fixture
def watched(standin, tmp_path):
    made = []

    def watch(**options):
        made.append(MonitoredHook(tmp_path, **options))
        return made[-1]

    yield watch
    standin.release()
    for each in made:
        each.collector.close()


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def delay(standin, milliseconds, whom, *, jitter):
    for gpu in range(GPUS) if whom == "all" else (2,):
        standin.page.delay_us[gpu] = int(1000 * milliseconds)
    standin.page.jitter_percent = jitter


def check_slow_is_up(standin, watched, caplog, milliseconds, whom, *, jitter, ticks, tick_seconds=TICK_SECONDS):
    standin.page.links = 2
    watch = watched(tick_seconds=tick_seconds)
    watch.until_up()
    caplog.clear()
    delay(standin, milliseconds, whom, jitter=jitter)
    seen = [watch.tick() for _ in range(ticks)]
    assert [up(read) for read in seen] == [list(range(GPUS))] * ticks
    for gpu in range(GPUS):  # and each value is that GPU's, at every tick
        assert {read.get((POWER, str(gpu))) for read in seen} == {650103 + 1000 * gpu}
    assert watch.fired == []
    lines = [line for line in warnings(caplog) if "XID" not in line]
    assert len(lines) <= 1, lines
    return watch, seen


@pytest.mark.slow
@pytest.mark.parametrize(("milliseconds", "whom", "jitter"), [(1, "all", 50), (20, "all", 50), (20, "one", 0)])
def test_a_slow_driver_leaves_its_gpus_up_with_their_values_one_line_and_no_recording(
    standin, watched, caplog, milliseconds, whom, jitter
):
    _, seen = check_slow_is_up(standin, watched, caplog, milliseconds, whom, jitter=jitter, ticks=25)
    if milliseconds == 20:  # a busy machine may be slow without a delay
        assert {2} <= set(slow(seen[-1]))
        assert whom == "one" or slow(seen[-1]) == list(range(GPUS))


@pytest.mark.full
@pytest.mark.parametrize("jitter", [0, 80])
@pytest.mark.parametrize("whom", ["all", "one"])
@pytest.mark.parametrize("milliseconds", [1, 5, 20, 50, 100, 500])
def test_every_delay_up_to_half_a_second_a_call_leaves_gpus_up(standin, watched, caplog, milliseconds, whom, jitter):
    check_slow_is_up(standin, watched, caplog, milliseconds, whom, jitter=jitter, ticks=20, tick_seconds=1.0)


@pytest.mark.full
def test_gpus_that_wait_for_one_lock_are_slow_together_in_one_line(standin, watched, caplog):
    standin.page.one_lock = 1
    check_slow_is_up(standin, watched, caplog, 10, "all", jitter=20, ticks=30, tick_seconds=1.0)


@pytest.mark.slow
def test_a_slow_gpu_is_read_so_rarely_that_calls_take_half_the_time_and_the_others_at_each_tick(standin, watched):
    standin.page.links = 0
    watch = watched()
    watch.until_up()
    delay(standin, 20, "one", jitter=0)
    until(lambda: slow(watch.tick()) == [2], "it is known to be slow")
    begun, before, calls = time.monotonic(), watch.tick(), standin.calls_in_all()
    read = [watch.tick() for _ in range(20)][-1]
    seconds = time.monotonic() - begun

    def grown(metric, gpu):
        return read[metric, gpu] - before[metric, gpu]

    assert grown("pacecar_gpu_driver_call_seconds_total", "2") / SECOND <= 0.5 * seconds + 0.3  # and a reading begun
    assert read["pacecar_gpu_read_interval_seconds", "2"] > 2 * read["pacecar_gpu_read_interval_seconds", "3"]
    asked = [after - was for was, after in zip(calls, standin.calls_in_all(), strict=True)]
    assert 0 < asked[2] < asked[3] / 2


@pytest.mark.slow
def test_a_slow_phase_that_ends_is_over_in_one_line_and_the_gpu_is_read_at_each_tick_again(standin, watched, caplog):
    caplog.set_level(logging.INFO)
    watch = watched()
    watch.until_up()
    delay(standin, 20, "all", jitter=0)
    until(lambda: slow(watch.tick()) == list(range(GPUS)), "all are slow")
    delay(standin, 0, "all", jitter=0)
    until(lambda: slow(watch.tick()) == [], "none is slow")
    until(lambda: watch.tick() and "as fast as a tick again" in caplog.text, "it was said")
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if ": slow:" in line or line.endswith("again")]) == 2, lines
    assert watch.fired == []


@pytest.mark.slow
def test_a_driver_that_is_slow_from_the_start_shows_its_gpus_before_all_questions_were_asked(standin, watched):
    delay(standin, 20, "all", jitter=0)
    watch = watched()
    begun = time.monotonic()
    watch.until_up()
    first = watch.tick()
    assert all((POWER, str(gpu)) in first for gpu in range(GPUS))
    assert sum(standin.calls(0).values()) < 110  # of more than 130 that a whole probe takes
    remote = ("pacecar_gpu_nvlink_info", "0", "17", "4.0", "switch", "00000000:C1:00.0")
    until(lambda: remote in watch.tick(), "the rest was asked by later readings", seconds=60)
    assert time.monotonic() - begun < 60


@pytest.mark.slow
def test_calls_that_hang_are_found_in_the_stated_time_by_one_line_and_one_trigger_for_all(
    standin, clock, caplog, tmp_path
):
    collector = GpuCollector(PyNvml(), clock, deadline_seconds=3.0, kernel_log=str(tmp_path / "kmsg"))
    triggers, fired, tick = Triggers(stall_ns=600 * SECOND), [], itertools.count()

    def read():
        clock.advance(SECOND)
        outcome = collector.collect()
        fired.extend(triggers.tick(Snapshot(next(tick), 0, clock.monotonic_ns(), 0, {"gpu": outcome}, {})))
        return up({} if isinstance(outcome, Absent) else {(s.metric, *s.labels): s.value for s in outcome.samples})

    until(lambda: read() == list(range(GPUS)), "all GPUs are up")
    caplog.clear()
    for gpu in range(GPUS):
        standin.hold(gpu)
    begun_ns = clock.monotonic_ns() + SECOND
    while read():
        pass
    assert clock.monotonic_ns() - begun_ns == CALL_SECONDS_MIN * SECOND
    for _ in range(5):
        assert read() == []
    assert [(trigger.kind, trigger.detail) for trigger in fired] == [
        ("gpu_lost", "GPUs 0, 1, 2, 3, 4, 5, 6, 7 no longer answer")
    ]
    lines = [line for line in warnings(caplog) if "down" in line]
    assert len(lines) == 1, lines
    assert lines[0].startswith("gpus 0, 1, 2, 3, 4, 5, 6, 7: down: hung: no answer for 2.0 s to ")
    standin.release()
    until(lambda: read() == list(range(GPUS)), "they are back")
    assert len([line for line in warnings(caplog) if "down" in line]) == 1
    collector.close()


# --- the deadline of a call, and what is said, without waiting --------------------------------------


def call(times, clock, name, seconds):
    times.make(name, lambda: clock.advance(int(seconds * SECOND)))


def hang(times, clock, name):
    """Return how long a call of that name is in flight before it is overdue, to a tenth of a second."""
    found = []

    def wait():
        for tenth in range(1, 1000):
            clock.advance(SECOND // 10)
            overdue = times.overdue(clock.monotonic_ns())
            if overdue is not None:
                found.append((tenth / 10, overdue.call))
                return

    times.make(name, wait)
    return found[0]


@pytest.mark.parametrize(
    ("usual_seconds", "deadline_seconds"),
    [(0.0001, CALL_SECONDS_MIN), (0.05, CALL_SECONDS_MIN), (0.5, 5.0), (1.5, 15.0), (10.0, CALL_SECONDS_MAX)],
)
def test_the_deadline_of_a_call_is_ten_times_what_it_takes_between_two_bounds(clock, usual_seconds, deadline_seconds):
    times = CallTimes(clock)
    for _ in range(40):
        call(times, clock, "power", usual_seconds)
    assert hang(times, clock, "power") == (pytest.approx(deadline_seconds, abs=0.11), "power")


def test_a_first_call_has_its_own_allowance_and_one_outlier_is_no_habit(clock):
    times = CallTimes(clock)
    assert hang(times, clock, "first")[0] == pytest.approx(CALL_SECONDS_FIRST, abs=0.11)
    times = CallTimes(clock)
    for n in range(64):
        call(times, clock, "power", 1.0 if n == 20 else 0.001)
    assert hang(times, clock, "power")[0] == pytest.approx(CALL_SECONDS_MIN, abs=0.11)


def test_a_call_that_came_back_late_is_given_twice_its_time_while_it_is_among_the_latest(clock):
    times = CallTimes(clock)
    for _ in range(40):
        call(times, clock, "power", 0.001)
    call(times, clock, "power", 3.0)
    assert hang(times, clock, "power")[0] == pytest.approx(6.0, abs=0.11)


def test_what_a_call_raises_took_its_time_and_is_no_call_in_flight(clock):
    times = CallTimes(clock)
    with pytest.raises(OSError, match="refused"):
        times.make("power", _detach_all, clock)
    assert times.total_ns == SECOND
    assert times.overdue(clock.monotonic_ns() + 1000 * SECOND) is None


def _detach_all(clock):
    clock.advance(SECOND)
    raise OSError("refused")


def test_changes_of_one_kind_are_one_line_and_bounded_in_a_minute(clock, caplog):
    caplog.set_level(logging.INFO)
    changes = GpuChangeLog(clock)
    for gpu in "0123":
        changes.record(logging.WARNING, "slow", gpu, f"words of {gpu}")
    changes.flush()
    assert caplog.text == ""
    clock.advance(int(SETTLE_SECONDS["slow"] * SECOND))
    changes.flush()
    assert [record.getMessage() for record in caplog.records] == [
        "gpus 0, 1, 2, 3: slow: words of 0 (the first of them)"
    ]
    caplog.clear()
    for _ in range(50):
        changes.record(logging.WARNING, "down: lost", "5", "no answer")
        changes.flush()
    assert len(caplog.records) == LINES_PER_MINUTE + 1
    assert caplog.records[0].getMessage() == "gpu 5: down: lost: no answer"
