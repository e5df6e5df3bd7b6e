"""Ticks keep their own time, and no collector can delay another."""

import logging
import random
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.clock import SystemClock
from pacecar.monitor.sampling.sampler import Sampler
from pacecar.monitor.sampling.ticker import SamplingTick, sampling_ticks
from pacecar.records import Absent, Failed, Ok, Sample
from tests.kit.fake_clock import FakeClock
from tests.kit.own_samples import values_of
from tests.kit.waiting import until

PERIOD = 1_000_000_000
TICK = SamplingTick(0, 0, 0, 0)


def drive(clock, work_ns, jitter_ratio=0.0, ticks=10, chance=None):
    """Run `ticks` ticks whose work takes `work_ns(number)`; return them."""
    out = []

    def wait(seconds):
        clock.advance(round(seconds * PERIOD))
        return len(out) >= ticks

    for tick in sampling_ticks(
        clock, wait, period_ns=PERIOD, jitter_ratio=jitter_ratio, chance=chance or random.Random(1)
    ):
        out.append(tick)
        clock.advance(work_ns(tick.number))
    return out


def test_the_beat_does_not_drift_by_the_work():
    got = drive(FakeClock(), lambda number: 300_000_000)
    assert [tick.started_ns for tick in got] == [PERIOD * n for n in range(10)]
    assert {tick.lateness_ns for tick in got} == {0}
    assert got[-1].missed == 0


def test_missed_beats_are_left_out_and_counted_not_made_up_for():
    got = drive(FakeClock(), lambda number: 3_500_000_000 if number == 2 else 0)
    assert [tick.started_ns / PERIOD for tick in got[:6]] == [0, 1, 2, 5.5, 6, 7]
    assert got[3].lateness_ns == PERIOD // 2
    assert [tick.missed for tick in got[:5]] == [0, 0, 0, 2, 2]
    assert [tick.number for tick in got] == list(range(10))


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(st.floats(0, 0.5), st.integers(0, 1000), st.lists(st.integers(0, 4 * PERIOD), min_size=10, max_size=10))
def test_beats_keep_order_and_the_grid_whatever_the_jitter_and_the_work(jitter, seed, work):
    got = drive(FakeClock(), lambda number: work[number], jitter, chance=random.Random(seed))
    starts = [tick.started_ns for tick in got]
    assert starts == sorted(starts)
    for tick in got:
        planned = tick.started_ns - tick.lateness_ns
        slot = tick.number + tick.missed
        assert slot * PERIOD <= planned + 1
        assert planned <= (slot + jitter) * PERIOD + 1


def test_jitter_spreads_the_phase():
    got = drive(FakeClock(), lambda number: 0, 0.5, ticks=20)
    assert len({tick.started_ns % PERIOD for tick in got}) > 15


class Scripted:
    def __init__(self, name, *outcomes):
        self.name = name
        self.outcomes = list(outcomes)
        self.closed = False

    def collect(self):
        outcome = self.outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def close(self):
        self.closed = True


class Hanging:
    name = "hanging"

    def __init__(self):
        self.release = threading.Event()
        self.entered = 0
        self.closed = False

    def collect(self):
        self.entered += 1
        self.release.wait(30)
        return Ok(())

    def close(self):
        self.closed = True


def test_a_snapshot_has_every_outcome_and_duration(start_sampler, steady):
    sampler = start_sampler(steady("a"), Scripted("b", Absent("nothing there")))
    snapshot = sampler.sample(SamplingTick(7, 123, 45, 0))
    assert (snapshot.tick, snapshot.started_ns, snapshot.lateness_ns) == (7, 123, 45)
    assert snapshot.outcomes == {"a": Ok((Sample("pacecar_host_cpus_online", (), 2),)), "b": Absent("nothing there")}
    assert snapshot.durations_ns.keys() == {"a", "b"}


def test_a_collector_that_raises_is_failed_and_the_next_tick_is_fine(start_sampler, steady):
    sampler = start_sampler(Scripted("odd", ZeroDivisionError("by zero"), Ok(())), steady())
    first = sampler.sample(TICK)
    assert first.outcomes["odd"] == Failed("ZeroDivisionError: by zero")
    assert isinstance(first.outcomes["steady"], Ok)
    assert sampler.sample(TICK).outcomes["odd"] == Ok(())
    assert values_of(sampler, "pacecar_collector_failures_total") == {"odd": 1, "steady": 0}


@pytest.mark.slow
def test_a_hanging_collector_is_failed_asked_once_and_holds_up_nobody(start_sampler, steady):
    hanging, other = Hanging(), steady()
    sampler = start_sampler(hanging, other, deadline_seconds=0.3)
    for tick in range(1, 4):
        snapshot = sampler.sample(TICK)
        outcome = snapshot.outcomes["hanging"]
        assert isinstance(outcome, Failed)
        assert "still running since" in outcome.reason
        assert isinstance(snapshot.outcomes["steady"], Ok)
        assert other.calls == tick
    assert hanging.entered == 1
    hanging.release.set()
    late = start_sampler(hanging)  # released: it answers again
    assert late.sample(TICK).outcomes["hanging"] == Ok(())


def test_a_tick_does_not_wait_for_a_collector_that_hung_before_it(start_sampler, steady):
    hanging = Hanging()
    sampler = start_sampler(hanging, steady(), deadline_seconds=0.05)
    sampler.sample(TICK)
    sampler._deadline_seconds = 60
    begun = time.monotonic()
    snapshot = sampler.sample(TICK)
    hanging.release.set()
    assert time.monotonic() - begun < 30
    assert isinstance(snapshot.outcomes["hanging"], Failed)
    assert isinstance(snapshot.outcomes["steady"], Ok)


def test_collectors_that_return_are_read_by_one_thread_in_order(start_sampler):
    read = []

    class Noting(Scripted):
        def collect(self):
            read.append((self.name, threading.get_ident()))
            return super().collect()

    names = "abcdefgh"
    sampler = start_sampler(*(Noting(name, *[Ok(())] * 3) for name in names))
    for _ in range(3):
        sampler.sample(TICK)
    assert "".join(name for name, _ in read) == 3 * names
    assert len({thread for _, thread in read}) == 1


@pytest.mark.slow
def test_a_collector_for_which_there_is_no_thread_says_that_it_was_not_read(start_sampler, monkeypatch, caplog):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    hanging, behind = Hanging(), Scripted("behind", Ok(()), Ok(()))
    sampler = start_sampler(hanging, behind, deadline_seconds=0.05)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        for _ in range(2):
            outcomes = sampler.sample(TICK).outcomes
            assert "still running since" in outcomes["hanging"].reason
            assert "has not begun for" in outcomes["behind"].reason
    refusals = [record for record in caplog.records if "can't start new thread" in record.getMessage()]
    assert len(refusals) == 1
    until(lambda: sampler.sample(TICK).outcomes["behind"] == Ok(()), "it is read when there is a thread")
    hanging.release.set()


def test_closing_leaves_a_hanging_collector_behind_which_is_closed_when_it_returns():
    hanging, other = Hanging(), Scripted("other", Ok(()))
    sampler = Sampler([hanging, other], SystemClock(), deadline_seconds=0.05)
    sampler.start()
    sampler.sample(TICK)
    sampler.close()
    assert (hanging.closed, other.closed) == (False, True)
    hanging.release.set()
    until(lambda: hanging.closed, "the collector that hung is closed")


def test_a_collector_that_cannot_be_closed_keeps_no_other_open(caplog):
    class Stuck(Scripted):
        def close(self):
            raise OSError("no such device")

    other = Scripted("other", Ok(()))
    sampler = Sampler([Stuck("stuck", Ok(())), other], SystemClock(), deadline_seconds=5)
    sampler.start()
    sampler.close()
    assert other.closed
    assert [record.getMessage() for record in caplog.records] == ["collector stuck: cannot be closed"]


def test_a_change_of_state_is_logged_once_not_each_tick(start_sampler, caplog):
    caplog.set_level(logging.INFO)
    bad, fine = Failed("stat:3: bad"), Ok(())
    sampler = start_sampler(
        Scripted("cpu", fine, bad, bad, bad, fine, fine), Scripted("gpu", *[Absent("no driver")] * 6)
    )
    for _ in range(6):
        sampler.sample(TICK)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "collector gpu: absent: no driver",
        "collector cpu: failed: stat:3: bad",
        "collector cpu: ok",
    ]


def test_a_rarely_read_collector_is_served_again_and_retried_once_after_a_failure(start_sampler, steady):
    seldom, failing, fast = (
        steady("seldom"),
        Scripted("failing", Failed("no"), Failed("no"), Failed("no")),
        steady("fast"),
    )
    seldom.is_rarely_read = failing.is_rarely_read = True
    fast.collect_fast = lambda: Ok((Sample("pacecar_host_cpus_online", (), 3),))
    sampler = start_sampler(seldom, failing, fast)
    first = sampler.sample(TICK, everything=False)
    for _ in range(3):
        later = sampler.sample(TICK, everything=False)
    assert later.outcomes["seldom"] is first.outcomes["seldom"]
    assert later.outcomes["fast"].samples[0].value == 3
    assert (seldom.calls, fast.calls) == (1, 0)
    assert values_of(sampler, "pacecar_collector_failures_total")["failing"] == 2
    sampler.sample(TICK)
    assert (seldom.calls, fast.calls) == (2, 1)


def test_a_collector_without_a_glance_to_make_is_not_asked(start_sampler, steady):
    idle = steady()
    idle.is_glance_due, idle.glance = False, lambda: pytest.fail("asked")
    sampler = start_sampler(idle)
    sampler._glance()
    assert values_of(sampler, "pacecar_collector_glances_total")["steady"] == 0
