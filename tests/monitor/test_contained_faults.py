"""A bug loses one job, collector or step of a tick: it is counted and logged once, and nothing else is lost."""

import json
import logging
import os
import threading
from contextlib import ExitStack
from functools import partial

import pytest

from pacecar.clock import NS_PER_SECOND
from pacecar.monitor.fault_containment import ContainedPart, FaultContainment
from pacecar.monitor.watched_threads import CHECKS, RESTARTS_MAX, StallConfirmation, ThreadWatch, WatchedThread
from pacecar.records import Ok, Sample, Vitals
from tests.kit.daemons import running_daemon
from tests.kit.fake_clock import FakeClock
from tests.kit.net import get, scraped
from tests.kit.own_samples import values_of
from tests.kit.waiting import until


def samples(port):
    return {(s.name, *sorted(s.labels.items())): s.value for s in scraped(port)}


def of_job(found, job):
    return {name for name, *labels in found if ("training_job", job) in labels}


@pytest.fixture
def start(tmp_path):
    with ExitStack() as stack:
        yield lambda *collectors: stack.enter_context(running_daemon(tmp_path, collectors))


@pytest.mark.slow
def test_a_job_that_cannot_be_turned_into_samples_costs_itself_alone(
    start, steady, hooks, make_hello, make_step, caplog
):
    daemon = start(steady())
    for job in ("good", "bad"):
        hook = hooks(daemon.socket)
        hook.say(make_hello(job=job, pid=os.getpid()), make_step(job=job))
    until(lambda: of_job(samples(daemon.port), "bad"))
    full = of_job(samples(daemon.port), "good")
    impossible = Vitals(
        job="bad", rank=0, step=1, ended_wall_ns=1, steps=1, wall_ns=1, samples=None, tokens=None, flops=1,
        flops_steps=1, flops_wall_ns=1, peak_flops_per_second=0,
    )  # fmt: skip
    (view,) = [view for view in daemon._state.jobs() if view.job == "bad"]
    with pytest.raises(ZeroDivisionError):  # what no frame can bring: the types refuse it
        _ = impossible.mfu_ratio
    daemon._state.record(impossible, hello=view.ranks[0].hello, uid=os.geteuid(), owner=2)  # the second connection
    fault = ("pacecar_daemon_faults_total", ("part", "job"))
    until(lambda: samples(daemon.port)[fault] >= 3)
    found = samples(daemon.port)
    assert of_job(found, "good") == full
    assert "pacecar_job_step" not in of_job(found, "bad")
    status, _, document = get(daemon.port, "/api/snapshot")
    assert (status, [job["job"] for job in json.loads(document)["jobs"]]) == (200, ["good"])
    ticks = ("pacecar_daemon_ticks_total",)
    until(lambda: samples(daemon.port)[ticks] >= found[ticks] + 3, "it ticks on")
    assert get(daemon.port, "/-/healthy").status == 200
    places = [record for record in caplog.records if "job 'bad'" in record.getMessage()]
    assert 1 <= len(places) <= 2, "once for each place in the code, however often it is met"


class Odd:
    """A collector whose samples cannot be written, or that raises."""

    name = "odd"

    def __init__(self, error=None):
        self.error = error

    def collect(self):
        if self.error is not None:
            raise self.error
        sound = Sample("pacecar_host_tasks_runnable", (), 5)
        return Ok((Sample("no_such_metric", (), 1), Sample("pacecar_host_tasks_blocked", (), "x"), sound))

    def close(self):
        """Hold nothing."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "error", [None, ValueError("a bug"), SystemExit(3), pytest.param(KeyboardInterrupt(), marks=pytest.mark.full)]
)
def test_a_collector_that_is_odd_costs_itself_alone(start, steady, error):
    daemon = start(steady(), Odd(error))
    found = samples(daemon.port)
    assert found["pacecar_host_cpus_online",] == 2
    ticks = ("pacecar_daemon_ticks_total",)
    until(lambda: samples(daemon.port)[ticks] >= found[ticks] + 3, "it ticks on")
    found = samples(daemon.port)
    if error is None:
        assert found["pacecar_daemon_faults_total", ("part", "collector")] >= 1
        # What it has that is sound is served, unless the machine is so busy that it came too late for a tick.
        until(lambda: samples(daemon.port).get(("pacecar_host_tasks_runnable",)) == 5, "its sound samples are served")
    else:
        assert found["pacecar_collector_outcome", ("collector", "odd"), ("outcome", "failed")] == 1
    assert daemon.is_healthy()


@pytest.mark.slow
def test_a_part_of_the_daemon_whose_samples_raise_costs_its_own_samples_alone(start, steady, monkeypatch):
    daemon = start(steady())
    whole, parts = samples(daemon.port), daemon._parts()

    def break_down(own_samples):
        yield from own_samples()
        raise ValueError("a bug")

    def document():
        status, _, said = get(daemon.port, "/api/snapshot")
        assert status == 200
        return json.loads(said)["daemon"]

    assert {"the process", "the state", "the flight recorder", "the faults"} <= parts.keys()
    for number, (name, own_samples) in enumerate(parts.items()):
        broken = parts | {name: partial(break_down, own_samples)}
        monkeypatch.setattr(daemon, "_parts", lambda broken=broken: broken)
        lost = whole.keys() - samples(daemon.port).keys()
        assert {metric for metric, *_ in lost} == {s.metric for s in own_samples()}, name
        assert len(lost) == len(list(own_samples())), name
        assert daemon._faults.counts()["daemon"] > number
        if name == "the process":
            until(lambda: (document()["pacecar_version"], document()["start_time_seconds"]) == (None, None))
        elif name == "the flight recorder":
            until(lambda: document()["recorder"] is None and document()["start_time_seconds"] is not None)
    assert daemon.is_healthy()


def test_faults_are_counted_by_part_and_logged_once_a_place(caplog):
    faults = FaultContainment()

    def fail(number):
        return 1 // number

    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            assert faults.contain(ContainedPart.TICK, "energy", lambda: fail(0), 9) == 9
        assert list(faults.each(ContainedPart.JOB, "job 'a'", lambda: (1 // n for n in (1, 0)))) == []
        assert faults.contain(ContainedPart.TICK, "energy", lambda: fail(1), 9) == 1
    assert {part: count for part, count in faults.counts().items() if count} == {"tick": 5, "job": 1}
    assert len(caplog.records) == 2
    assert "energy" in caplog.text
    assert "Traceback" in caplog.text


def test_a_loop_that_fails_is_entered_again_and_one_that_fails_again_and_again_has_ended():
    clock, runs = FakeClock(), []

    def run():
        runs.append(len(runs))
        raise SystemExit("not even this ends it")

    thread = WatchedThread("t", run, clock)
    thread._pause.set()  # do not wait between two runs
    watch = ThreadWatch()
    watch.add(lambda: thread)
    assert watch.troubles() == []
    thread.start()
    until(lambda: not thread.is_alive())
    assert (len(runs), thread.restarts) == (RESTARTS_MAX, RESTARTS_MAX - 1)
    assert watch.troubles() == ["the thread t has ended"]
    assert values_of(watch, "pacecar_daemon_thread_up") == {"t": 0}
    assert values_of(watch, "pacecar_daemon_thread_restarts_total") == {"t": RESTARTS_MAX - 1}
    thread.expect_end()
    assert watch.troubles() == []


def test_a_loop_that_takes_no_turn_is_told_from_one_that_waits():
    clock, release = FakeClock(), threading.Event()
    thread = WatchedThread("t", release.wait, clock, limit_seconds=10.0)
    thread.start()
    clock.advance(9 * NS_PER_SECOND)
    assert thread.trouble() is None
    thread.progress()
    clock.advance(10_500_000_000)
    assert thread.trouble() == "the thread t has made no progress for 10 s"
    thread.progress()
    assert thread.trouble() is None
    release.set()
    assert thread.join(30)


def test_one_look_at_a_thread_without_progress_ends_nothing():
    confirmation = StallConfirmation()
    for _ in range(3):  # a process that was stopped: the first look after it finds old times, the next new ones
        assert confirmation.update(["the thread tick has made no progress for 60 s"]) is None
        assert confirmation.update([]) is None
    said = [confirmation.update(["x", "y"]) for _ in range(CHECKS)]
    assert said == [None] * (CHECKS - 1) + ["x; y"]
