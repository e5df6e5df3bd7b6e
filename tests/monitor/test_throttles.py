"""Only its node's daemon tells a job that its device holds its clocks down."""

import os
import threading

import pytest

from pacecar.clock import SystemClock
from pacecar.config import DaemonConfig, HookConfig
from pacecar.monitor.collectors.gpu import GpuCollector
from pacecar.monitor.daemon import Daemon
from pacecar.monitor.gpu.nvml import PyNvml
from pacecar.monitor.jobs.node_signals import HELD_RATIO, WINDOW_SECONDS, Throttles
from pacecar.profiler.hook.commands.daemon_messages import ThrottleNews
from pacecar.profiler.ranks.rank_monitor import RankMonitor
from pacecar.profiler.timing.overhead_budget import OverheadBudget
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.profiler.transport.daemon_socket import DaemonSocket
from pacecar.records import JobHello, Knobs, Ok, Sample, Snapshot, Straggler, Throttling
from tests.kit.listeners import HeardInbox
from tests.kit.waiting import until

S = 1_000_000_000
WINDOW = round(WINDOW_SECONDS * S)


def snapshot(number, *, every_ns=WINDOW, uuids=("GPU-a", "GPU-b"), **counters):
    """Return tick `number`; `counters` are ns by reason of GPU 0."""
    samples = [Sample("pacecar_gpu_info", (str(gpu), uuid, *[""] * 6), 1) for gpu, uuid in enumerate(uuids)]
    samples += [
        Sample("pacecar_gpu_clock_event_seconds_total", ("0", reason, "driver"), value)
        for reason, value in counters.items()
    ]
    samples.append(Sample("pacecar_gpu_clock_event_seconds_total", ("1", "sw_power_cap", "sampled"), 7))
    return Snapshot(number, number * every_ns, 0, 0, {"gpu": Ok(tuple(samples))}, {})


def test_a_reason_that_held_for_a_fifth_of_the_window_throttles_and_one_that_did_not_is_none():
    throttles = Throttles()
    assert throttles.update(snapshot(0, sw_power_cap=5, hw_thermal_slowdown=5)) == {}
    held = round(HELD_RATIO * WINDOW)
    found = throttles.update(snapshot(1, sw_power_cap=5 + held - 1, hw_thermal_slowdown=5 + held))
    assert found == {
        "GPU-a": Throttling(device_uuid="GPU-a", reasons=("hw_thermal_slowdown",)),
        "GPU-b": Throttling(device_uuid="GPU-b", reasons=()),
    }


def test_idleness_and_clocks_that_somebody_set_throttle_nobody():
    throttles = Throttles()
    throttles.update(snapshot(0, gpu_idle=0, applications_clocks_setting=0, sw_power_cap=0))
    found = throttles.update(snapshot(1, gpu_idle=WINDOW, applications_clocks_setting=WINDOW, sw_power_cap=0))
    assert found["GPU-a"].reasons == ()


def test_a_gpu_of_which_nothing_was_read_is_not_known():
    throttles = Throttles()
    throttles.update(snapshot(0, sw_power_cap=0))
    assert set(throttles.update(snapshot(1))) == {"GPU-b"}
    assert set(throttles.update(snapshot(2, sw_power_cap=0))) == {"GPU-b"}, "one reading is no rate"
    assert throttles.update(Snapshot(3, 3 * WINDOW, 0, 0, {}, {})) == {}


def test_between_two_windows_the_last_word_stands():
    """Counters that are read every other tick would come and go otherwise."""
    throttles, tick = Throttles(), round(0.1 * S)
    counts = [min(value, 25) * 2 * tick for value in range(60) for _ in range(2)]
    found = [throttles.update(snapshot(n, every_ns=tick, sw_power_cap=count)) for n, count in enumerate(counts)]
    words = ["".join("ty"[bool(one["GPU-a"].reasons)] if one else "?" for one in found)]
    assert words == ["?" * 20 + "y" * 60 + "t" * 40]


def hello(rank, uuid):
    return JobHello(
        job="hot", rank=rank, local_rank=rank, world_size=3, pid=os.getpid(), host="h", device="cpu",
        device_uuid=uuid, backend="gloo", framework="torch", pacecar_version="0", started_wall_ns=0,
    )  # fmt: skip


def test_news_of_another_device_and_of_a_broken_connection_leave_nothing_known():
    news = ThrottleNews(hello(0, "GPU-1"))
    assert news.is_throttled() is None
    news.record(Throttling(device_uuid="GPU-2", reasons=("hw_slowdown",)))
    assert news.is_throttled() is None
    news.record(Throttling(device_uuid="GPU-1", reasons=()))
    assert news.is_throttled() is False
    news.record(None)
    assert news.is_throttled() is None
    news.record(Throttling(device_uuid="GPU-1", reasons=("hw_slowdown",)))
    assert news.is_throttled() is True
    news.record(Throttling(device_uuid="GPU-1", reasons=None))
    assert news.is_throttled() is None


class Seat:
    """A rank's end of roads in this process."""

    def __init__(self, table, rank):
        self.table, self.rank, self.taken, self.is_busy = table, rank, 0, False

    def connect(self, claim, name, rest):
        pass

    def post(self, words):
        self.table[self.rank].append(list(words))

    def receive(self):
        if min(map(len, self.table)) <= self.taken:
            return None
        self.taken += 1
        return [words[self.taken - 1] for words in self.table]

    def close(self):
        pass


class Recorded(HeardInbox):
    def __init__(self, news):
        self.receive_news = news.record


class Training:
    phase, evaluated_ns, trained_ns, is_alive = "forward", None, None, True

    def __init__(self):
        self.step, self.begun_ns = 0, None
        self.budget, self.records = OverheadBudget(1.0, warmup_steps=3, interval_steps=50), self

    def current_step(self):
        return self.step, self.begun_ns

    def watch_calls(self):
        pass

    def flush_in_background(self, after_seconds):
        pass

    is_ddp = True

    def meeting_phases(self):
        return frozenset()


class Record:
    knobs, disturbed, measured_every, source, calibration_age_steps, gc_ns = Knobs(), False, 1, "estimate", None, 0
    tokens = None

    def __init__(self, step):
        self.step = step


def feed(crews, steps, late):
    """Tell all crews `steps` steps; rank 1 computes `late` ms longer and the others wait for it."""
    for step in steps:
        for rank, crew in enumerate(crews):
            mine = late * 1_000_000 if rank == 1 else 0
            phases = {"forward": 10_000_000 + mine, "backward_tail": 5_000_000 + late * 1_000_000 - mine}
            end = (step + 1) * 20_000_000
            timed = TimedStep(
                start_ns=end - sum(phases.values()), end_ns=end, phases=phases, marks={}, micro_batches=1, overhead_ns=0
            )
            crew.note(timed, Record(step))
            crew._watched.step, crew._watched.begun_ns = step + 1, end
    until(lambda: not any(crew._notes for crew in crews), "the crews took all notes")


@pytest.mark.slow
@pytest.mark.parametrize("is_hot", [True, False])
def test_a_rank_that_computes_late_on_a_throttled_gpu_is_named_with_that_cause_end_to_end(standin, tmp_path, is_hot):
    """A real daemon over a stand-in driver, real outboxes, and crews of three ranks in this process."""
    collector = GpuCollector(PyNvml(), SystemClock(), kernel_log=str(tmp_path / "kmsg"))
    config = DaemonConfig(port=0, socket=str(tmp_path / "s"), period_seconds=0.1)
    daemon = Daemon(config, collectors=[collector])
    daemon.start()
    hellos = [hello(rank, f"GPU-{rank}") for rank in range(3)]
    news = [ThrottleNews(one) for one in hellos]
    outboxes = [DaemonSocket(daemon.socket, one, inbox=Recorded(mine)) for one, mine in zip(hellos, news, strict=True)]
    heard, table = [], [[] for _ in hellos]
    crews = [
        RankMonitor(
            one,
            HookConfig(),
            Training(),
            emit=heard.append,
            transport=Seat(table, rank),
            throttled=news[rank].is_throttled,
        )
        for rank, one in enumerate(hellos)
    ]
    try:
        for outbox, one in zip(outboxes, hellos, strict=True):
            outbox.put(one)
        until(
            lambda: [mine.is_throttled() for mine in news] == [False] * 3, "the daemon says that nothing is throttled"
        )
        for crew in crews:
            crew.start()
        feed(crews, range(64), 0)
        if is_hot:
            standin.page.reasons[1] = 0x8
            until(
                lambda: [mine.is_throttled() for mine in news] == [False, True, False], "the daemon tells of the heat"
            )
        feed(crews, range(64, 128), 9)
        until(lambda: any(isinstance(record, Straggler) for record in heard), "the late rank is named")
        named = next(record for record in heard if isinstance(record, Straggler))
        assert (named.late_rank, named.cause) == (1, "throttled" if is_hot else "compute")
        assert ("clocks" in named.evidence) is is_hot
    finally:
        for crew in crews:
            crew.close()
        for outbox in outboxes:
            outbox.close(1.0)
        daemon.close()
    if is_hot:
        assert news[1].is_throttled() is None, "without a daemon nobody knows"
    assert threading.active_count() < 40
