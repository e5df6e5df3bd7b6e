"""Windows of a device job, the profiler a stand-in: what CUDA does to them costs a window and makes no wrong ledger."""

from __future__ import annotations

import logging
import os
import random
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._C._autograd import DeviceType

import pacecar
from pacecar.profiler.timing.overhead_budget import AFTERMATH_STEPS, BASELINE_STEPS, OverheadBudget, WindowAftermath
from pacecar.profiler.timing.step_timer import TimedStep
from pacecar.profiler.windows.kineto_window import (
    LAZY_VARIABLE,
    TEARDOWN_VARIABLE,
    WindowProfiler,
    WindowUnavailable,
    _rows_of,
)
from pacecar.profiler.windows.trace_spans import read_rows
from pacecar.profiler.windows.window_reader import BLIND_WINDOWS_MAX, WindowReader
from tests.kit.fake_clock import FakeClock
from tests.kit.hook_inspection import hook_of
from tests.profiler.test_trace_spans import Row

MS = 1_000_000
STEP_NS = 10 * MS


class Session:
    """What the hook's window sees of torch: says which rows it saw when it is closed."""

    def __init__(self):
        self.is_open = False
        self.is_settled = True
        self.outlived_by = None
        self.rows = []
        self.log = []

    def install(self):
        pass

    def uninstall(self):
        self.discard()

    def may_open(self):
        return not self.is_open

    def open(self):
        self.is_open = True
        self.log.append("open")

    def close(self):
        self.is_open = False
        self.log.append("close")
        return self.rows, True

    def discard(self):
        self.is_open = False

    def step_passed(self):
        pass

    def bar_if_outlived(self, rows):
        pass


@pytest.fixture
def clock():
    return FakeClock(monotonic_ns=1000 * MS, wall_ns=1000 * MS)


@pytest.fixture
def session():
    return Session()


@pytest.fixture
def reader(clock, session):
    reader = WindowReader(clock, on_device=True, profiler=session)
    reader.install()
    session.log.clear()
    return reader


def kernel(start, end, launched=None):
    link = None if launched is None else Row("cpu_op", "aten::mm", launched, launched + 1000)
    return Row("kernel", "gemm", start, end, thread=7, link=link)


def timed(start, end, marks):
    phases = {name: sum(b - a for a, b in stretches) for name, stretches in marks.items()}
    return TimedStep(start_ns=start, end_ns=end, phases=phases, marks=marks, micro_batches=1, overhead_ns=0)


def window(reader, clock, session, kernels_from):
    """Take a window over two steps; the device is busy for half of each ms, as far as rows are seen."""
    reader.open()
    reader.observed_from(clock.monotonic_ns())
    begun = clock.monotonic_ns()
    session.rows = [kernel(at, at + MS // 2, launched=at - MS // 10) for at in range(begun, begun + 2 * STEP_NS, MS)][
        kernels_from:
    ]
    measurement = None
    for _ in range(2):
        start = clock.monotonic_ns()
        clock.advance(STEP_NS)
        step = timed(start, clock.monotonic_ns(), {"forward": [(start, start + STEP_NS)]})
        assert measurement is None
        measurement = reader.close(step)
    return measurement


def test_a_window_is_warmed_for_one_step_and_measures_the_next(reader, clock, session):
    measurement = window(reader, clock, session, kernels_from=0)
    assert session.log == ["open", "close"], "closed once, at the end of the second step"
    assert measurement.ledger.wall_ns == STEP_NS
    assert measurement.ledger.compute_ns == STEP_NS // 2


@pytest.mark.parametrize("lost", [1, 5, 9, 10])
def test_kernels_that_are_lost_while_it_warms_cost_nothing(reader, clock, session, lost):
    measurement = window(reader, clock, session, kernels_from=lost)
    if lost < 10:
        assert measurement.ledger.compute_ns == STEP_NS // 2
    else:  # the first that is left begins with the step itself: it may or may not be the first
        assert measurement is not None


@pytest.mark.parametrize("lost", [11, 15, 20])
def test_a_window_that_lost_its_head_is_thrown_away_and_is_not_idle_time(reader, clock, session, lost):
    assert window(reader, clock, session, kernels_from=lost) is None
    assert reader.may_open(), "one more is tried"


def test_a_device_that_is_behind_is_known_by_the_step_that_warmed_the_window(reader, clock, session):
    """Each step launches ten kernels of 0.9 ms within its first ms, and they run in the ten after its end.

    The last step's have not run when the window ends, so they have no rows; those of the step before are all there.
    """
    reader.open()
    begun = clock.monotonic_ns()
    rows = []
    for number in range(2):
        start = begun + number * STEP_NS
        calls = [start + at * MS // 10 for at in range(10)]
        rows += [Row("cuda_runtime", "cudaLaunchKernel", call, call + 1000) for call in calls]
        if number == 0:
            rows += [
                kernel(start + STEP_NS + at * MS, start + STEP_NS + at * MS + 9 * MS // 10, launched=call)
                for at, call in enumerate(calls)
            ]
    rows.append(kernel(begun, begun + MS, launched=begun - MS))
    session.rows = rows
    for _ in range(2):
        start = clock.monotonic_ns()
        clock.advance(STEP_NS)
        measurement = reader.close(timed(start, clock.monotonic_ns(), {"forward": [(start, start + MS)]}))
    forward = measurement.on_device["forward"]
    assert forward.compute_ns == 9 * MS
    assert forward.wall_ns > 9 * MS, "with what the device did before it came to this step"


def test_kernels_before_their_launch_are_a_clock_that_is_off(reader, clock, session, caplog):
    reader.open()
    start = clock.monotonic_ns()
    session.rows = [kernel(start - 3 * MS, start - 2 * MS, launched=start)]
    caplog.set_level(logging.INFO)
    for _ in range(2):
        clock.advance(STEP_NS)
        now = clock.monotonic_ns()
        said = reader.close(timed(now - STEP_NS, now, {}))
    assert said is None
    assert "3.0 ms before their launch" in caplog.text


def test_windows_that_tell_nothing_again_and_again_are_no_longer_paid_for(reader, clock, session, caplog):
    for number in range(BLIND_WINDOWS_MAX):
        assert reader.may_open()
        assert window(reader, clock, session, kernels_from=20 if number % 2 else 15) is None
    assert not reader.may_open()
    assert sum("no more windows" in record.getMessage() for record in caplog.records) == 1


def test_one_good_window_in_between_forgives(reader, clock, session):
    for lost in (20, 20, 0, 20, 20, 0):
        window(reader, clock, session, kernels_from=lost)
    assert reader.may_open()


def test_a_session_cannot_be_ended_on_another_thread_and_is_the_last(caplog):
    profiler = WindowProfiler(on_device=False)
    profiler.install()
    profiler.open()
    raised = []

    def elsewhere():
        try:
            profiler.close()
        except WindowUnavailable as reason:
            raised.append(str(reason))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "changed threads" in raised[0]
    assert not profiler.may_open()
    profiler._open = True
    profiler._thread = threading.get_ident()
    profiler.close()  # here it can be ended, so that the next test finds none
    profiler.uninstall()


def run(aftermath, before, after, *, windows=1, noise=0.0, seed=0):
    rng, charged = random.Random(seed), 0
    for _ in range(windows):
        aftermath.window(before)
        for _ in range(3 * AFTERMATH_STEPS):
            charge = aftermath.step(round(after * (1 + rng.gauss(0, noise))))
            assert charge >= 0, "a counter"
            charged += charge
    return charged


def test_a_slow_down_after_a_window_is_charged_for_as_long_as_it_is_compared():
    assert run(WindowAftermath(), 100 * MS, 115 * MS) == AFTERMATH_STEPS * 15 * MS
    assert run(WindowAftermath(), 100 * MS, 115 * MS, windows=4) == 4 * AFTERMATH_STEPS * 15 * MS


def test_a_job_that_becomes_faster_pays_nothing_back_and_unknown_is_not_compared():
    assert run(WindowAftermath(), 100 * MS, 90 * MS, windows=3) == 0
    assert run(WindowAftermath(), None, 900 * MS, windows=3) == 0


def test_noise_is_hardly_charged_over_many_windows():
    steps = 100 * 3 * AFTERMATH_STEPS
    for seed in range(5):
        charged = run(WindowAftermath(), 100 * MS, 100 * MS, windows=100, noise=0.05, seed=seed)
        assert charged < 0.001 * steps * 100 * MS


def test_a_checkpoint_in_the_aftermath_counts_for_half_a_step():
    aftermath = WindowAftermath()
    aftermath.window(100 * MS)
    steps = [100 * MS] * (AFTERMATH_STEPS - 1) + [9000 * MS]
    assert sum(aftermath.step(own) for own in steps) == 50 * MS


def test_what_lasts_after_the_first_window_is_an_answer():
    aftermath = WindowAftermath()
    run(aftermath, 100 * MS, 112 * MS)
    assert aftermath.lasting_ratio == pytest.approx(0.12)
    for before, after in ((100 * MS, 101 * MS), (100 * MS, 80 * MS), (None, 300 * MS)):
        usual = WindowAftermath()
        run(usual, before, after, windows=3)
        assert usual.lasting_ratio is None
    odd = WindowAftermath()
    odd.window(100 * MS)
    for step in range(AFTERMATH_STEPS):
        odd.step(130 * MS if step % 8 < 5 else 99 * MS)
    assert odd.lasting_ratio is None, "three of eight steps are as fast as before"


class Kineto:
    """What `WindowProfiler.detach` sees of torch."""

    def __init__(self, monkeypatch, cuda="13.0", **environ):
        self.sessions = []
        monkeypatch.setattr("torch.version.cuda", cuda)
        for name in (TEARDOWN_VARIABLE, LAZY_VARIABLE):
            monkeypatch.delenv(name, raising=False)
        for name, value in environ.items():
            monkeypatch.setenv(name, value)
        self.profiler = WindowProfiler(on_device=False)
        self.profiler.install()
        enable = self.profiler._enable
        self.profiler._enable = lambda *args: (self.sessions.append(os.environ.get(TEARDOWN_VARIABLE)), enable(*args))


def test_cupti_is_detached_by_one_more_session_and_no_window_follows(monkeypatch):
    kineto = Kineto(monkeypatch)
    try:
        assert kineto.profiler.detach()
        assert kineto.sessions == ["1"], "a session that ends detaches it, with the variable set"
        assert os.environ[TEARDOWN_VARIABLE] == "1", "the job's own profiler needs it to attach CUPTI anew"
        kineto.profiler.step_passed()
        kineto.profiler.step_passed()
        assert not kineto.profiler.may_open()
    finally:
        kineto.profiler.uninstall()


@pytest.mark.parametrize(
    ("cuda", "environ"),
    [("12.4", {}), (None, {}), ("13.0", {TEARDOWN_VARIABLE: "0"}), ("13.0", {LAZY_VARIABLE: "1"})],
)
def test_cupti_stays_where_the_job_or_an_old_cuda_says_so(monkeypatch, cuda, environ):
    kineto = Kineto(monkeypatch, cuda, **environ)
    try:
        assert not kineto.profiler.detach()
        assert not kineto.sessions
        assert os.environ.get(TEARDOWN_VARIABLE) == environ.get(TEARDOWN_VARIABLE)
        assert not kineto.profiler.may_open()
    finally:
        kineto.profiler.uninstall()


@pytest.mark.parametrize(("on_device", "warmup", "first"), [(False, 1, 1), (True, 1, BASELINE_STEPS), (True, 30, 30)])
def test_the_first_window_of_a_device_job_waits_for_steps_to_compare_with(on_device, warmup, first):
    budget = OverheadBudget(1.0, warmup_steps=warmup, interval_steps=5, on_device=on_device)
    assert next(step for step in range(40) if budget.is_due(step)) == first == budget.next_turn(0)


def test_the_budget_charges_the_aftermath_of_a_device_job_only():
    costs = {}
    for on_device in (False, True):
        budget = OverheadBudget(0.5, warmup_steps=1, interval_steps=100, on_device=on_device)
        for _ in range(20):
            budget.step(100 * MS, 0, profiled=False)
        budget.step(100 * MS, 0, profiled=True)
        budget.window_taken(20, 0)
        for _ in range(AFTERMATH_STEPS + 5):
            budget.step(110 * MS, 0, profiled=False)
        costs[on_device] = budget.cost_ns
    assert costs == {False: 0, True: AFTERMATH_STEPS * 10 * MS}


class OldEvent:
    """A row as torch before 2.13 gives it."""

    def __init__(self, name, start, end, *, device=None, stream=0, own=0, link=0, metadata=""):
        self._name, self._start, self._end = name, start, end
        self._device, self._stream, self._own, self._link, self._metadata = device, stream, own, link, metadata

    def name(self):
        return self._name

    def device_type(self):
        return DeviceType.CPU if self._device is None else DeviceType.CUDA

    def is_user_annotation(self):
        return False

    def start_ns(self):
        return self._start

    def duration_ns(self):
        return self._end - self._start

    def start_thread_id(self):
        return 1

    def device_resource_id(self):
        return self._stream

    def correlation_id(self):
        return self._own

    def linked_correlation_id(self):
        return self._link

    def metadata_json(self):
        return self._metadata


def test_rows_of_an_older_torch_know_their_stream_and_what_launched_them():
    """Without that a device's phases cannot be told, and of a collective neither bytes nor group."""
    events = [
        OldEvent("gemm", 150, 250, device=0, stream=7, own=901, link=11),
        OldEvent("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 260, 400, device=0, stream=20, own=902, link=12),
        OldEvent("aten::mm", 100, 130, own=11),
        OldEvent("cudaLaunchKernel", 110, 120, own=901, link=11),
        OldEvent("record_param_comms", 140, 180, own=12, metadata='"Group size": 2'),
        OldEvent("Memcpy DtoD", 500, 510, device=0, stream=7, own=903),
    ]
    rows = _rows_of(SimpleNamespace(events=lambda: events), on_device=True)
    spans = read_rows(rows, training_thread=None, on_device=True)
    assert spans.launches == [(100, 250, 7), (140, 400, 20)]
    assert [(seen.name, seen.metadata) for seen in spans.collectives] == [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", '"Group size": 2')
    ]
    assert rows[-1].linked_activity() is None


def test_a_job_that_stays_slower_after_its_first_window_has_no_other(caplog, monkeypatch):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(steps):
        for _ in range(steps):
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    settings = {"overhead_budget": 1.0, "window_interval_steps": 3, "crew": False, "socket": "/nonexistent/s.sock"}
    with pacecar.attach(model, optimizer, tune="off", job="slower", **settings) as pacer:
        train(30)
        budget = hook_of(pacer).budget
        taken = budget.windows
        assert taken > 1
        monkeypatch.setattr(OverheadBudget, "lasting_ratio", 0.18)
        train(30)
        assert budget.windows <= taken + 1, "one may have been open"
        assert not hook_of(pacer).windows.is_installed
    (line,) = [record.getMessage() for record in caplog.records if "no more steps are profiled" in record.getMessage()]
    assert "18 % slower" in line
