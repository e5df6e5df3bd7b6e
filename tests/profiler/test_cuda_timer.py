"""A simulated device, which does one thing after another and never before the host asked for it, is timed right."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pacecar.config import HookConfig
from pacecar.ledger.intervals import intervals
from pacecar.profiler.timing.cuda_timer import EVENTS_MAX, STEPS_MAX, device_timer
from pacecar.profiler.windows.device_phases import passed_stretches
from pacecar.profiler.windows.estimate import Calibration, estimate_step
from pacecar.records import Ledger
from tests.kit.hook_inspection import inspect
from tests.profiler.cuda_standin import CudaStandIn, Stream
from tests.profiler.device_job import DeviceJob


def timer_of(device):
    """Return a timer as the hook makes one, with the first step begun."""
    timer = device_timer(torch.device("cuda", 0))
    timer.finish()
    return timer


@pytest.fixture
def device(monkeypatch):
    return CudaStandIn().install(monkeypatch)


@pytest.fixture
def timer(device):
    return timer_of(device)


PHASES = ("forward", "rest", "backward", "backward_tail", "rest", "optimizer")


def a_step(device, timer, launch_ns, work_ns, wait_ns=0):
    timer.enter("data_wait")
    device.host(wait_ns)
    timer.enter("rest")
    for phase in PHASES:
        timer.enter(phase)
        device.host(launch_ns)
        device.launch(work_ns)
    return timer.finish()


lengths = st.integers(0, 10_000)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(lengths, lengths, lengths), min_size=3, max_size=25))
def test_phases_sum_to_the_devices_step_and_steps_to_the_devices_time(steps):
    with pytest.MonkeyPatch.context() as monkeypatch:
        device = CudaStandIn().install(monkeypatch)
        timer = timer_of(device)
        begun = max(device.now_ns, device.free_ns)
        made = [a_step(device, timer, *step) for step in steps]
        ended = max(device.now_ns, device.free_ns)
        for _ in range(len(steps)):
            device.host(10**9)
            timer.finish()
    told = [step.phases for step in made if step.phases is not None]
    assert len(told) + timer.untimed_steps == len(steps)
    if not timer.untimed_steps:
        assert sum(sum(phases.values()) for phases in told) == ended - begun
    assert all(step.is_settled for step in made)
    assert device.made <= EVENTS_MAX


def test_a_busy_device_shows_its_work_and_not_the_hosts_launches(device, timer):
    steps = [a_step(device, timer, launch_ns=1, work_ns=1000) for _ in range(3)]
    device.host(10**6)
    timer.finish()
    timer.finish()
    assert steps[2].phases["forward"] == 1000
    assert steps[2].phases["backward_tail"] == 1000
    assert steps[2].phases["rest"] == 2000


def test_a_device_that_waits_for_data_shows_the_wait_less_what_was_still_to_do(device, timer):
    a_step(device, timer, launch_ns=1, work_ns=100)
    behind = device.free_ns - device.now_ns
    step = a_step(device, timer, launch_ns=1, work_ns=100, wait_ns=5000)
    device.host(10**6)
    timer.finish()
    timer.finish()
    assert step.phases["data_wait"] == 5000 - behind


def test_nothing_is_read_before_the_device_is_through(device, timer):
    step = a_step(device, timer, launch_ns=1, work_ns=10**6)
    a_step(device, timer, launch_ns=1, work_ns=10**6)
    assert step.phases is None
    assert not step.is_settled
    device.host(10**9)
    timer.finish()
    assert step.is_settled
    assert sum(step.phases.values()) > 0


def test_a_device_that_never_comes_through_costs_a_bounded_number_of_events(device, timer):
    steps = [a_step(device, timer, launch_ns=1, work_ns=10**12) for _ in range(2 * STEPS_MAX)]
    assert sum(not step.is_settled for step in steps) == STEPS_MAX
    assert timer.untimed_steps == STEPS_MAX
    assert device.made <= (STEPS_MAX + 2) * 10
    assert all(step.phases is None for step in steps)


def test_a_step_of_more_marks_than_the_pool_has_is_counted_and_the_next_one_is_timed_again(device, timer):
    for _ in range(2 * EVENTS_MAX):
        timer.enter("forward")
    assert timer.finish() is None
    assert (device.made, timer.untimed_steps) == (EVENTS_MAX, 1)
    timer.finish()
    step = a_step(device, timer, 1, 10)
    device.host(10**6)
    timer.finish()
    timer.finish()
    assert step.phases is not None


def test_events_are_used_again_and_never_while_a_step_still_needs_them(device, timer):
    for number in range(300):
        step = a_step(device, timer, launch_ns=10, work_ns=100 + number)
        if number % 7 == 0:
            timer.skip()
            timer.finish()
        in_use = [event for waiting in timer._waiting for _, event, _ in waiting.marks] + [
            m.event for m in timer._marks
        ]
        shared = len(in_use) - len(set(map(id, in_use)))
        assert shared <= len(timer._waiting)
        assert not set(map(id, in_use)) & set(map(id, timer._free))
        device.host(1000)
    assert step is not None
    assert device.made <= EVENTS_MAX
    assert len(timer._free) + len({id(e) for e in in_use}) == device.made, "no event is lost"


def test_a_step_that_is_captured_into_a_graph_is_not_marked_and_nothing_is_asked_meanwhile(device, timer):
    a_step(device, timer, 1, 10)
    timer.enter("forward")
    with device.capture():
        timer.enter("backward")
        assert timer.finish() is None
    assert timer.is_alive
    assert not device.violations
    timer.finish()
    assert a_step(device, timer, 1, 10) is not None


def test_marks_that_were_passed_out_of_order_add_nothing_and_take_nothing_away(device, timer):
    timer.enter("forward")
    device.launch(500)
    with device.stream(Stream(device, 0)):  # which has nothing to do
        timer.enter("backward")
    device.launch(500)
    step = timer.finish()
    device.host(10**6)
    timer.finish()
    assert min(step.phases.values()) >= 0
    assert sum(step.phases.values()) == 1000


@pytest.mark.parametrize("calls", range(60))
def test_whatever_the_driver_raises_and_whenever_the_timer_ends_and_the_job_does_not(device, timer, calls, caplog):
    device.fail("*", RuntimeError("CUDA error: an illegal memory access was encountered"), after=calls)
    with caplog.at_level(logging.WARNING, "pacecar.profiler.timing.cuda_timer"):
        for _ in range(12):
            a_step(device, timer, 10, 5)
    assert not timer.is_alive
    assert len(caplog.records) == 1
    assert not timer._waiting
    assert timer.finish() is None


def test_a_window_tells_from_its_rows_what_the_events_of_the_step_measured(device, timer):
    """The two ways to a phase on the device agree, to the nanosecond, on a device that is behind and one that waits."""
    for launch_ns, work_ns in ((1, 1000), (900, 100), (50, 60)):
        marks, start = {}, device.now_ns
        timer.skip()
        timer.finish()
        for phase in ("forward", "backward", "optimizer"):
            timer.enter(phase)
            begun = device.now_ns
            for _ in range(4):
                device.host(launch_ns)
                device.launch(work_ns)
            marks[phase] = intervals([(begun, device.now_ns)])
        end = device.now_ns
        step = timer.finish()
        launches = [(kernel.launched_ns, kernel.end_ns, kernel.stream) for kernel in device.kernels]
        told = passed_stretches(marks, (start, end), launches, len(launches))
        device.host(10**7)
        timer.finish()
        stretches, window = told
        assert {name: int((rows[:, 1] - rows[:, 0]).sum()) for name, rows in stretches.items()} == {
            name: step.phases[name] for name in marks
        }
        assert window[1] - window[0] == sum(step.phases.values())


def test_rows_that_do_not_say_when_they_were_launched_tell_nothing():
    assert passed_stretches({}, (0, 9), [], 0) is None
    assert passed_stretches({}, (0, 9), [(0, 1, 7)] * 8, 10) is None


def test_a_step_whose_rows_are_not_all_there_tells_nothing():
    launches = [(at, at + 1, 7) for at in range(9)]
    assert passed_stretches({}, (0, 20), launches, 9, [*range(10)]) is not None
    assert passed_stretches({}, (0, 20), launches, 9, [*range(11)]) is None
    assert passed_stretches({}, (0, 9), launches, 9, [*range(5), *range(30, 90)]) is not None, "calls of another step"


def test_empty_stretches_stay_empty_and_order_is_kept():
    marks = {"forward": intervals([(0, 10), (30, 40)]), "checkpoint": intervals([])}
    stretches, _ = passed_stretches(marks, (0, 50), [(5, 35, 7), (32, 60, 7), (1, 99, 8)], 3)
    assert stretches["forward"].tolist() == [[0, 35], [35, 60]]
    assert len(stretches["checkpoint"]) == 0
    assert stretches["checkpoint"].dtype == np.int64


def test_an_estimate_lays_the_devices_phases_on_the_hosts_step_and_sums_exactly():
    mixes = {
        "forward": Ledger(wall_ns=10, compute_ns=10),
        "data_wait": Ledger(wall_ns=10, data_wait_ns=10),
    }
    host = {"forward": Ledger(wall_ns=10, host_bound_ns=10)}
    calibration = Calibration(3, host, on_device=Calibration(3, mixes))
    device = {"forward": 3000, "data_wait": 1000}
    ledger = estimate_step(101, {"forward": 2}, device, calibration)
    assert (ledger.wall_ns, ledger.compute_ns, ledger.data_wait_ns) == (101, 76, 25)
    assert estimate_step(100, {"forward": 100}, None, calibration).host_bound_ns == 100, "not read in time"
    assert estimate_step(100, {"forward": 100}, device, Calibration(3, host)).host_bound_ns == 100
    assert estimate_step(100, {"forward": 60, "checkpoint": 40}, device, calibration).checkpoint_ns == 40


def test_work_keeps_its_length_where_a_phase_is_shorter_than_in_the_window_and_waiting_shrinks():
    """The profiler slows the host, so that a device has to wait in the window which otherwise works all the time."""
    mixes = {"forward": Ledger(wall_ns=1000, compute_ns=500, exposed_copy_ns=100, host_bound_ns=300, data_wait_ns=100)}
    calibration = Calibration(3, {}, on_device=Calibration(3, mixes))

    def forward(duration):
        found = estimate_step(duration, {}, {"forward": duration}, calibration)
        assert found.wall_ns == duration
        return found.compute_ns, found.exposed_copy_ns, found.host_bound_ns, found.data_wait_ns

    assert forward(1000) == (500, 100, 300, 100)
    assert forward(800) == (500, 100, 150, 50)
    assert forward(600) == (500, 100, 0, 0)
    assert forward(300) == (250, 50, 0, 0), "less work than in the window"
    assert forward(2000) == (1000, 200, 600, 200), "more of everything"


@pytest.mark.slow
def test_a_record_waits_for_the_device_and_not_for_ever(attach, device):
    job = DeviceJob(device)
    hook = attach(job, config=HookConfig(overhead_budget=1.0, windows=False))
    job.run(3)
    hook.records.flush()
    job.run(STEPS_MAX - 2)
    device.launch(10**15)
    job.run(1)
    hook.records.flush_in_background(0.0)
    assert len(inspect(hook).waiting) > 0, "a step that the device has not passed waits"
    job.run(STEPS_MAX + 2)
    hook.records.flush_in_background(0.0)
    assert len(inspect(hook).waiting) <= STEPS_MAX
