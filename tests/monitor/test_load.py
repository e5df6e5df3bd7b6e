"""What a bad day looks like: jobs that come and go, floods, slow clients and reloads, one by one and all together.

The short form is part of the suite; the long one, with the numbers that are promised, is a soak test.  Everything is
counted on both sides: what was sent must be what was taken and what was refused, frame for frame.
"""

import math
import os
import random
import signal
import socket
import threading
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pacecar.monitor.ingest.frame_validation import FrameValidation, Peer
from pacecar.monitor.jobs.tracked_job import RANK_BYTES_MAX
from pacecar.records import Decision, Goodbye, Vitals
from pacecar.wire import FrameError, encode_frame
from tests.kit.anyrecord import JOB_RECORDS, Drawn, make
from tests.kit.daemons import DaemonProcess

ROOT = Path(__file__).resolve().parents[2]

RSS_GROWTH_MAX = 16 * 1024 * 1024
"""Between the first and the second storm of the same size; the first one fills the bounded buffers."""


_DECISION = {
    "job": "flood", "decision": 1, "kind": "trial", "knob": "k", "from_value": 1, "to_value": 2, "step": 1,
    "wall_ns": 1, "reason": "r",
}  # fmt: skip
IMPOSSIBLE = [
    Vitals(
        job="flood", rank=0, step=1, ended_wall_ns=1, steps=1, wall_ns=1, samples=None, tokens=None, flops=100,
        flops_steps=1, flops_wall_ns=1, peak_flops_per_second=0,
    ),
    *(Decision(**_DECISION, expected_gain_ratio=gain) for gain in (math.nan, math.inf)),
]  # fmt: skip
"""Well-formed records that no job can mean: they would divide by zero, or stand in the page for ever."""


class Size(NamedTuple):
    jobs: int
    frames: int
    scrapers: int
    reloads: int
    slow_seconds: float
    drawn: int


SHORT = Size(jobs=20, frames=2_000, scrapers=80, reloads=5, slow_seconds=0.2, drawn=40)
LONG = Size(jobs=1000, frames=1_000_000, scrapers=200, reloads=50, slow_seconds=1.0, drawn=2_000)


def drawn_frames(hello, count):
    """Return frames of valid records that hypothesis made, of any type and with values at their bounds.

    They are of the job and rank of `hello`, and so short that a rank's may all be kept at once.
    """
    frames = []

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def draw(data):
        source = Drawn(data.draw)
        kind = source.pick(JOB_RECORDS)
        fields = make(kind, source)
        fields |= {name: getattr(hello, name) for name in ("job", "rank") if name in fields}
        conversation = FrameValidation(Peer(hello.pid, 0, 0))
        conversation.decode(encode_frame(hello))
        try:
            frame = encode_frame(msgspec.convert(fields, kind))
            conversation.decode(frame)
        except FrameError:
            return  # values that do not agree with each other, as a rank beyond its world
        if len(frame) * len(JOB_RECORDS) <= RANK_BYTES_MAX:
            frames.append(frame)

    draw()
    return frames


class Daemon(DaemonProcess):
    """A daemon whose configuration changes."""

    def __init__(self, folder):
        self.text = f'[daemon]\nport = 0\nsocket = "{folder / "s"}"\nperiod_seconds = 0.5\ndisable = ["gpu"]\n'
        self.text += "recorder_bytes = 4000000\n"  # so that it is full in the first storm
        super().__init__(folder, self.text + "cpu_budget = 0.5\n")
        self.told("READY=1")

    def reload(self):
        """Have the file read as it is now; return what is said at the end.

        The daemon also looks at the file by itself and says so in the same words: the answer is to a reload that began
        after the signal, told by the time in it as systemd tells it.
        """
        asked_usec = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        self.process.send_signal(signal.SIGHUP)
        while int(self.told("RELOADING=1").rpartition("=")[2]) < asked_usec:
            pass
        return self.told("READY=1")

    def memory(self):
        """Return what is resident but for the flight recorder's, which fills up to a bound of its own."""
        return self.resident_bytes() - int(self.value("pacecar_recorder_memory_bytes"))


@pytest.fixture
def daemon(tmp_path):
    daemon = Daemon(tmp_path)
    yield daemon
    daemon.close()


class Storm:
    """Everything that is done to a daemon, and what of it was counted here."""

    def __init__(self, daemon, hooks, make_hello, make_step):
        self.daemon = daemon
        self.hooks = hooks
        self.hello = lambda **changes: make_hello(pid=os.getpid(), **changes)
        self.step = make_step
        self.taken = self.scrapes = 0
        self.refused = {"malformed": 0, "magic": 0, "truncated": 0, "version": 0, "identity": 0}
        self.legitimate = {}
        self.sent = {}
        self.gaps = []
        self.drawn = [encode_frame(self.step(job="flood"))]
        self.lock = threading.Lock()

    def connect(self):
        """Return a hook's end; with a full backlog a hook tries again, as ours does."""
        for _ in range(1000):
            try:
                hook = self.hooks(self.daemon.path)
            except BlockingIOError:
                time.sleep(0.02)
            else:
                hook.socket.settimeout(120)
                return hook
        raise AssertionError("the daemon accepts nobody")

    def begin(self):
        """Two ranks of a real job, which go on through all of it."""
        for rank in (0, 1):
            hook = self.legitimate[rank] = self.connect()
            hook.say(self.hello(job="real", rank=rank))
            self.count(1)
            self.train(rank)

    def train(self, rank):
        self.sent[rank] = self.sent.get(rank, 0) + 1
        self.legitimate[rank].say(self.step(job="real", rank=rank, total_steps=self.sent[rank]))
        self.count(1)

    def count(self, taken, **refused):
        with self.lock:
            self.taken += taken
            for reason, number in refused.items():
                self.refused[reason] += number

    def jobs(self, size):
        for number in range(size.jobs):
            hook = self.connect()
            name = f"job-{number}"
            hook.say(self.hello(job=name), self.step(job=name), Goodbye(job=name, rank=0, wall_ns=1, reason="done"))
            self.count(3)
            hook.close()

    def flood(self, size):
        """A tenth of the frames are malformed, in each way, or lie about rank or job."""
        hook = self.connect()
        hook.say(self.hello(job="flood"))
        good = encode_frame(self.step(job="flood"))
        bad = {
            "malformed": [good[:-1] + b"\xc1", b"PC\x01\x00\x00\x00\x00\x01\xc1"],
            "magic": [b"XX" + good[2:]],
            "truncated": [good[:40], b"P"],
            "version": [good[:2] + b"\x09" + good[3:]],
            "identity": [encode_frame(self.step(job="flood", rank=1)), encode_frame(self.step(job="real", rank=0))],
        }
        bad["malformed"] = [*bad["malformed"][1:], *map(encode_frame, IMPOSSIBLE)]
        kinds = [(reason, frame) for reason, frames in bad.items() for frame in frames]
        refused = dict.fromkeys(bad, 0)
        taken = 1
        for number in range(size.frames):
            if number % 10:
                hook.send(self.drawn[number % len(self.drawn)] if number % 3 == 0 else good)
                taken += 1
            else:
                reason, frame = kinds[number // 10 % len(kinds)]
                hook.send(frame)
                refused[reason] += 1
        self.count(taken, **refused)
        hook.close()

    def slow_scrapers(self, size):
        """Half say half a request, half ask and do not read."""
        sockets = []
        try:
            for number in range(size.scrapers):
                sockets.append(socket.create_connection(("127.0.0.1", self.daemon.port), timeout=60))
                sockets[-1].sendall(b"GET /metrics HTTP/1.1\r\n" + (b"\r\n" if number % 2 else b"Host: x"))
            time.sleep(size.slow_seconds)
        finally:
            for one in sockets:
                one.close()

    def reloads(self, size):
        """Each fifth is a file that is half written."""
        for number in range(size.reloads):
            is_bad = number % 5 == 4
            line = "cpu_budg" if is_bad else f"cpu_budget = {0.5 + number / 1000}\n"
            self.daemon.file.write_text(self.daemon.text + line)
            assert ("cannot be used" in self.daemon.reload()) == is_bad
        self.daemon.file.write_text(self.daemon.text + "cpu_budget = 0.5\n")

    def watch(self, stop):
        """Scrape and train as if nothing were the matter, and note whatever is wrong with an answer."""
        chance = random.Random(1)
        before = {}
        while not stop.wait(0.05 + 0.05 * chance.random()):
            for rank in self.legitimate:
                self.train(rank)
            begun = time.monotonic()
            try:
                samples = self.daemon.samples()
            except Exception as error:  # noqa: BLE001  whatever it is, it is a gap
                self.gaps.append(f"{error!r} after {time.monotonic() - begun:.1f} s")
                continue
            self.scrapes += 1
            self.gaps += [f"{s.name} is {s.value}" for s in samples if not math.isfinite(s.value)]
            seen = {
                int(s.labels["rank"]): s.value
                for s in samples
                if s.name == "pacecar_job_steps_total" and s.labels["training_job"] == "real"
            }
            for rank, sent in self.sent.items():
                if not before.get(rank, 1) <= seen.get(rank, 0) <= sent:
                    self.gaps.append(f"rank {rank}: {before.get(rank)} then {seen.get(rank)}, {sent} were sent")
            before = seen

    def during(self, *acts):
        """Run `acts` side by side, watched."""
        stop, failed = threading.Event(), []

        def guarded(act, *arguments):
            try:
                act(*arguments)
            except Exception as error:  # noqa: BLE001  raised below, on the test's thread
                failed.append(error)

        watcher = threading.Thread(target=guarded, args=(self.watch, stop))
        actors = [threading.Thread(target=guarded, args=(act, size)) for act, size in acts]
        for thread in (watcher, *actors):
            thread.start()
        for actor in actors:
            actor.join()
        stop.set()
        watcher.join()
        assert not failed
        assert not self.gaps

    def settle(self):
        """Wait until all was taken in, and compare every count."""
        limit = time.monotonic() + 120
        while self.daemon.value("pacecar_inbox_frames_total") < self.taken:
            assert time.monotonic() < limit, (self.daemon.value("pacecar_inbox_frames_total"), self.taken)
            time.sleep(0.05)
        samples = self.daemon.samples()
        refused = {s.labels["refusal"]: s.value for s in samples if s.name == "pacecar_inbox_frames_refused_total"}
        assert self.daemon.value("pacecar_inbox_frames_total") == self.taken
        assert {reason: count for reason, count in refused.items() if count or reason in self.refused} == self.refused
        for rank, sent in self.sent.items():
            assert self.daemon.value("pacecar_job_steps_total", training_job="real", rank=str(rank)) == sent


def weather(storm, size):
    """One after the other, then together, twice; memory may grow the first time only."""
    storm.drawn = drawn_frames(storm.hello(job="flood"), size.drawn)
    storm.begin()
    acts = [storm.jobs, storm.flood, storm.slow_scrapers, storm.reloads]
    for act in acts:
        storm.during((act, size))
    storm.settle()
    storm.during(*((act, size) for act in acts))
    storm.settle()
    first = storm.daemon.memory()
    storm.during(*((act, size) for act in acts))
    storm.settle()
    grown = storm.daemon.memory() - first
    assert grown < RSS_GROWTH_MAX, f"grew by {grown} bytes"
    assert [s for s in storm.daemon.samples() if s.name == "pacecar_daemon_faults_total" and s.value] == []
    assert storm.daemon.process.poll() is None
    return grown, storm.scrapes


@pytest.mark.distributed
def test_a_short_storm_costs_no_scrape_no_frame_and_no_memory(daemon, hooks, make_hello, make_step):
    weather(Storm(daemon, hooks, make_hello, make_step), SHORT)


@pytest.mark.soak
@pytest.mark.distributed
def test_a_long_storm_costs_no_scrape_no_frame_and_no_memory(daemon, hooks, make_hello, make_step, capsys):
    begun = time.monotonic()
    grown, scrapes = weather(Storm(daemon, hooks, make_hello, make_step), LONG)
    with capsys.disabled():
        print(f"\n{time.monotonic() - begun:.0f} s, {scrapes} scrapes, grew by {grown / 1e6:.1f} MB")  # noqa: T201


@pytest.mark.distributed
def test_ten_thousand_hellos_are_survived_counted_and_leave_few_lines(daemon, hooks, make_hello, make_step, tmp_path):
    storm = Storm(daemon, hooks, make_hello, make_step)
    storm.begin()
    hook = hooks(daemon.path)
    hook.socket.settimeout(60)
    hook.say(storm.hello(job="many", rank=0, world_size=10_000))
    hello = storm.hello(job="many", rank=0, world_size=10_000)
    for rank in range(1, 5001):
        hook.say(storm.hello(job="many", rank=rank, world_size=10_000))
    for _ in range(5000):
        hook.say(hello)
    storm.count(5001, identity=5000)
    storm.settle()
    assert (tmp_path / "log").read_text().count("\n") < 100
