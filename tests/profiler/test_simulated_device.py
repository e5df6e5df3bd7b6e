"""The real hook on a simulated device: its times are the device's, and whatever that does, the job is not harmed."""

from __future__ import annotations

import logging
from functools import cache

import pytest
import torch

from pacecar.config import HookConfig
from pacecar.profiler.timing.cuda_timer import EVENTS_MAX, STEPS_MAX
from tests.kit.hook_inspection import inspect
from tests.profiler.cuda_standin import CAPTURING, NEVER, NOT_READY, Capture, CudaStandIn
from tests.profiler.device_job import MS, US, DeviceJob

TIMED_ONLY = HookConfig(overhead_budget=1.0, windows=False, count_flops=False)
PROFILED = HookConfig(overhead_budget=1.0, window_interval_steps=5, count_flops=False)

LOOPS = {
    "plain": {"asks_every": 1},
    "accumulation": {"micro_batches": 4, "asks_every": 2},
    "two_streams": {"copies_us": 300, "asks_every": 2},
    "lags": {"work_us": 400, "launch_us": 5, "wait_us": 5, "asks_every": 20},
    "idles": {"work_us": 20, "launch_us": 200, "wait_us": 900},
}


@pytest.fixture
def cuda(monkeypatch):
    return CudaStandIn().install(monkeypatch)


class Watched:
    """A hook on a job, with what its device timer told of each step."""

    def __init__(self, attach, job, sink, config=TIMED_ONLY):
        self.job, self.sink = job, sink
        self.hook = attach(job, config=config, clock=job.cuda.clock)
        self.timer = inspect(self.hook).device_timer
        self.device_steps = []
        finish = self.timer.finish

        def watched():
            self.device_steps.append(finish())
            return self.device_steps[-1]

        self.timer.finish = watched

    def run(self, steps):
        outcome = self.job.run(steps, self.hook)
        self.hook.close()
        return outcome

    @property
    def records(self):
        return self.sink.steps

    def timed(self):
        """Return what was told of the device's phases, by step, as far as anything was."""
        told = enumerate(self.device_steps)
        return {
            step: {phase: ns for phase, ns in seen.phases.items() if ns}
            for step, seen in told
            if seen is not None and seen.phases is not None
        }


@cache
def bare(steps, **options):
    """Return what the same job computes without a hook."""
    return DeviceJob(CudaStandIn(), **options).run(steps)


def is_unharmed(watched, outcome, expected):
    """Check what holds whatever the device does."""
    cuda, timer = watched.job.cuda, watched.timer
    assert outcome == expected, "losses and parameters"
    assert cuda.synchronizations == 0
    assert not cuda.violations
    assert inspect(watched.hook).failures == 0
    assert len(timer._waiting) <= STEPS_MAX
    assert len(timer._free) <= cuda.made <= EVENTS_MAX
    assert [record.step for record in watched.records] == list(range(watched.job.step))
    for record in watched.records:
        assert record.ledger.wall_ns == record.wall_ns == sum(record.ledger.parts().values())


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_phases_are_those_of_the_kernels_and_every_step_sums_to_its_wall_time(cuda, attach, sink, loop):
    watched = Watched(attach, DeviceJob(cuda, **LOOPS[loop]), sink)
    is_unharmed(watched, watched.run(100), bare(100, **LOOPS[loop]))
    timed = watched.timed()
    assert len(timed) >= 78
    for step, phases in timed.items():
        assert phases == watched.job.on_device(step)


@pytest.mark.parametrize(("loop", "is_behind"), [("plain", False), ("lags", True)])
def test_the_comparison_of_ranks_hears_the_devices_phases_and_whether_it_lags(cuda, attach, loop, is_behind):
    job, heard = DeviceJob(cuda, **LOOPS[loop]), []

    def hear(timed, record):
        heard.append((record.step, timed.device))

    hook = attach(job, config=TIMED_ONLY, clock=cuda.clock, on_timed=hear)
    job.run(60, hook)
    hook.close()
    seen = [(step, device) for step, device in heard if device is not None and device.phases is not None]
    assert len(seen) >= 35
    for step, device in seen:
        assert {phase: ns for phase, ns in device.phases.items() if ns} == job.on_device(step)
    assert (sum(device.is_behind for _, device in seen) > len(seen) / 2) == is_behind


@pytest.mark.parametrize(("rate", "offset_ns"), [(1.001, 0), (1.05, 10**15), (0.98, -(10**9))])
def test_a_clock_at_another_rate_changes_no_proportion(monkeypatch, attach, sink, rate, offset_ns):
    cuda = CudaStandIn(rate=rate, offset_ns=offset_ns, resolution_ns=500).install(monkeypatch)
    watched = Watched(attach, DeviceJob(cuda, **LOOPS["plain"]), sink)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    timed = watched.timed()
    assert len(timed) >= 55
    for step, phases in timed.items():
        true = watched.job.on_device(step)
        for phase in true | phases:
            assert phases.get(phase, 0) == pytest.approx(true.get(phase, 0) * rate, abs=2 * cuda.resolution_ns)


AFTER_WARM_UP = 30

WAITS_FOR_COPIES = pytest.mark.xfail(
    reason="an event behind a wait for another stream is passed with it, and the window's rows do not show the wait: "
    "so data_wait is 12 % of the steps where it was 2 %, and exposed copies 8 % where they were 15 %"
)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [1.0, pytest.param(1.05, marks=pytest.mark.full)])
@pytest.mark.parametrize("loop", ["plain", "idles", pytest.param("two_streams", marks=WAITS_FOR_COPIES)])
def test_between_windows_the_ledger_says_what_the_device_did(monkeypatch, attach, sink, loop, rate):
    cuda = CudaStandIn(rate=rate, resolution_ns=500).install(monkeypatch)
    options = LOOPS[loop] | ({"asks_every": 1} if loop == "two_streams" else {})
    watched = Watched(attach, DeviceJob(cuda, **options), sink, PROFILED)
    is_unharmed(watched, watched.run(120), bare(120, **options))
    assert sum(record.source == "exact" for record in watched.records) >= 15
    steps = [record for record in watched.records if record.source == "estimate" and record.step > AFTER_WARM_UP]
    starts = [marks[0][1] for marks in watched.job.marks]
    wall = sum(record.wall_ns for record in steps)
    compute, busy = (
        sum(cuda.busy(starts[record.step], starts[record.step + 1], names) for record in steps)
        for names in ("gemm", None)
    )
    copied = busy - compute
    assert sum(record.ledger.compute_ns for record in steps) / wall == pytest.approx(compute / wall, abs=0.02)
    assert sum(record.ledger.exposed_copy_ns for record in steps) / wall == pytest.approx(copied / wall, abs=0.02)
    assert sum(record.ledger.unknown_ns for record in steps) < 0.01 * wall


@pytest.mark.slow
@pytest.mark.parametrize("steps_behind", [3, 10])
def test_a_device_far_behind_is_not_idle_however_punctual_its_copies_are(cuda, attach, sink, caplog, steps_behind):
    """What it computes in a window was launched before it and has no rows, while a prefetcher's copies have theirs."""
    caplog.set_level(logging.INFO)
    options = {"work_us": 400, "launch_us": 400, "wait_us": 5, "copies_us": 300}
    job = DeviceJob(cuda, is_prefetching=True, **options)
    job.at = lambda step, place: cuda.launch(steps_behind * 4 * MS) if (step, place) == (2, "forward") else None
    watched = Watched(attach, job, sink, PROFILED)
    is_unharmed(watched, watched.run(60), bare(60, is_prefetching=True, **options))
    assert "the device is more than a step behind" in caplog.text
    starts = [marks[0][1] for marks in job.marks]
    for record in watched.records:
        if record.source == "exact":
            busy = cuda.busy(starts[record.step], starts[record.step + 1], "gemm") / record.wall_ns
            assert record.ledger.compute_ns / record.wall_ns == pytest.approx(busy, abs=0.15)


def said(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_clock_that_jumps_back_leaves_its_step_unknown_and_no_phase_empty(cuda, attach, sink, caplog):
    job = DeviceJob(cuda, **LOOPS["plain"])

    def jump(step, place):
        if (step, place) in {(20, "backward"), (30, "forward")}:
            cuda.jumps.append((cuda.now_ns + 100 * US, -1000 * MS))

    job.at = jump
    watched = Watched(attach, job, sink)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    timed = watched.timed()
    assert {20, 30} & timed.keys() == set()
    assert len(timed) >= 55
    for step, phases in timed.items():
        assert phases == job.on_device(step)
    assert said(caplog) == []


@pytest.mark.slow
def test_events_that_say_so_fifty_steps_late_cost_no_step_its_times(cuda, attach, sink, caplog):
    job = DeviceJob(cuda, **LOOPS["plain"])
    cuda.late_ns = 50 * 2 * MS
    watched = Watched(attach, job, sink)
    is_unharmed(watched, watched.run(120), bare(120, **LOOPS["plain"]))
    timed = watched.timed()
    assert len(timed) >= 60, "all but those under way at the end"
    for step, phases in timed.items():
        assert phases == job.on_device(step)
    assert said(caplog) == []


@pytest.mark.slow
def test_a_device_that_is_never_done_costs_a_bound_and_one_line(cuda, attach, sink, caplog):
    job = DeviceJob(cuda, work_us=200)

    def hang(step, place):
        if (step, place) == (20, "backward"):
            cuda.launch(NEVER)

    job.at = hang
    watched = Watched(attach, job, sink)
    outcome = job.run(150, watched.hook)
    assert len(watched.timer._waiting) == STEPS_MAX
    assert cuda.made <= (STEPS_MAX + 2) * 10
    queries = cuda.calls["query"]
    watched.hook.close()
    is_unharmed(watched, outcome, bare(150, work_us=200))
    assert queries < 150 * 10
    assert max(watched.timed()) < 20
    assert len(said(caplog)) == 1
    assert f"more than {STEPS_MAX} steps behind" in said(caplog)[0]


@pytest.mark.slow
def test_a_device_that_hangs_for_a_while_is_timed_again(cuda, attach, sink, caplog):
    job = DeviceJob(cuda, **LOOPS["idles"])

    def hang(step, place):
        if (step, place) == (20, "backward"):
            cuda.launch(100 * 3 * MS)

    job.at = hang
    watched = Watched(attach, job, sink)
    is_unharmed(watched, watched.run(300), bare(300, **LOOPS["idles"]))
    timed = watched.timed()
    assert {250, 260, 270} <= timed.keys()
    for step, phases in timed.items():
        assert phases == job.on_device(step)
    assert len(said(caplog)) == 1


ILLEGAL = RuntimeError("CUDA error: an illegal memory access was encountered")
FAULTS = [
    ("make", torch.OutOfMemoryError("CUDA error: out of memory"), 10),
    ("make", ILLEGAL, 0),
    ("record", torch.OutOfMemoryError("CUDA error: out of memory"), 100),
    ("record", ILLEGAL, 0),
    ("query", RuntimeError("CUDA error: unspecified launch failure"), 150),
    ("query", RuntimeError(CAPTURING), 0),
    ("elapsed_time", RuntimeError(NOT_READY), 100),
    ("elapsed_time", RuntimeError("CUDA error: unspecified launch failure"), 0),
    ("current_stream", AttributeError("module 'torch.cuda' has no attribute 'current_stream'"), 90),
    ("is_current_stream_capturing", RuntimeError("CUDA error: initialization error"), 120),
    ("*", RuntimeError("Cannot re-initialize CUDA in forked subprocess"), 700),
]


@pytest.mark.parametrize(("call", "error", "after"), FAULTS)
def test_what_the_driver_raises_ends_device_times_with_one_line_and_nothing_else(
    monkeypatch, attach, sink, caplog, call, error, after
):
    cuda = CudaStandIn().install(monkeypatch)
    job = DeviceJob(cuda, **LOOPS["plain"])
    watched = Watched(attach, job, sink)
    cuda.fail(call, error, after=after)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    timed = watched.timed()
    assert len(timed) < 60
    for step, phases in timed.items():
        assert phases == job.on_device(step)
    assert not watched.timer.is_alive
    lines = [line for line in said(caplog) if "allocator" not in line]  # which is another reader
    assert len(lines) == 1
    assert str(error) in lines[0]
    unknown = [record.ledger.unknown_ns / record.wall_ns for record in watched.records[1:]]
    assert min(unknown) > 0.5, "nothing was measured of it, so nothing is said"


def test_a_reset_of_the_device_ends_device_times(cuda, attach, sink, caplog):
    job = DeviceJob(cuda, **LOOPS["plain"])
    job.at = lambda step, place: cuda.reset() if (step, place) == (20, "backward") else None
    watched = Watched(attach, job, sink)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    assert max(watched.timed()) < 20
    assert len(said(caplog)) == 1


class Capturing:
    """Captures the loop's work from one place on up to another."""

    def __init__(self, cuda, mode, first, last, steps):
        self.cuda, self.mode, self.first, self.last, self.steps = cuda, mode, first, last, steps
        self.under_way = None

    def __call__(self, step, place):
        if step in self.steps and place == self.first and self.under_way is None:
            self.under_way = self.cuda.capture(self.mode)
            self.under_way.__enter__()
        elif self.under_way is not None and place == self.last:
            self.under_way.__exit__(None, None, None)
            self.under_way = None


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["global", "thread_local", pytest.param("relaxed", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("first", "last"),
    [("forward", "backward"), ("forward", "optimizer"), ("backward", "optimizer"), ("optimizer", "forward")],
)
def test_nothing_is_recorded_or_asked_while_the_loop_captures(cuda, attach, sink, caplog, mode, first, last):
    """The capture begins behind a mark and ends behind one, so that steps are captured in part and as a whole."""
    job = DeviceJob(cuda, **LOOPS["plain"])
    job.at = Capturing(cuda, mode, first, last, {5, 9, 20, 21, 22, *range(34, 60, 5)})
    watched = Watched(attach, job, sink, PROFILED)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    assert watched.timer.is_alive
    timed = watched.timed()
    assert len(timed) >= 30
    for step, phases in timed.items():
        assert phases == job.on_device(step)
    assert said(caplog) == []


def test_a_capture_on_another_device_that_is_current_is_seen_and_so_is_one_on_ours(cuda, attach, sink, caplog):
    """The loop makes another device the current one amid a step, with a capture here or there."""
    job = DeviceJob(cuda, **LOOPS["plain"])

    def switch(step, place):
        if step % 10 == 3 and place == "forward":
            cuda.current_device = 1
        if step == 13 and place == "forward":
            own = cuda.current_stream(0)
            own.capture = Capture("global", is_elsewhere=False)
            cuda.captures.append(own.capture)
        if step == 13 and place == "optimizer":
            cuda.captures.remove(cuda.current_stream(0).capture)
            cuda.current_stream(0).capture = None
        if step % 10 == 3 and place == "optimizer":
            cuda.current_device = 0

    job.at = switch
    watched = Watched(attach, job, sink)
    is_unharmed(watched, watched.run(60), bare(60, **LOOPS["plain"]))
    timed = watched.timed()
    assert 13 not in timed
    assert len(timed) >= 55
    assert said(caplog) == []
