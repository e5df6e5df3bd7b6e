"""A window of a CPU job that saw nothing is thrown away; that of a step without operators is none of those."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from pacecar import torch_internals
from pacecar.config import HookConfig
from pacecar.profiler.windows.window_reader import BLIND_WINDOWS_MAX, WindowReader
from tests.kit.fake_clock import FakeClock
from tests.profiler.test_device_windows import MS, Session, timed
from tests.profiler.test_trace_spans import Row

STEPS = 18
PROFILED = (3, 8, 13)
"""The first turn is after three steps, and one comes every five."""
EVERY_FIVE = HookConfig(overhead_budget=1.0, window_interval_steps=5, count_flops=False)
NOT_LOOKED = "the profiler recorded nothing at all"
NO_OPERATOR = "the profiler recorded no operator of its backward"


class Still(torch.optim.Optimizer):
    """Moves nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        pass


class Paused:
    """Lets this thread's operators be seen by nobody, as a profiler whose state was lost does."""

    def __enter__(self):
        torch._C._autograd._enable_record_function(False)

    def __exit__(self, *_):
        torch._C._autograd._enable_record_function(True)


def thrown_away(caplog):
    said = "an exact window is discarded: "
    texts = [record.getMessage() for record in caplog.records]
    return [text.removeprefix(said) for text in texts if text.startswith(said)]


def exact_of(sink):
    return [record.step for record in sink.steps if record.source == "exact"]


def train(job, blind, *, asks_for_loss=False):
    """Run the steps; of those in `blind` is seen nothing, or only the question for the loss of the step before."""
    for number in range(STEPS):
        x, y = job.batches[number % len(job.batches)]
        with Paused() if number in blind else nullcontext():
            job.optimizer.zero_grad()
            loss = (job.model(x) - y).square().mean()
            loss.backward()
            job.optimizer.step()
        if asks_for_loss:
            loss.item()


@pytest.mark.parametrize(("asks_for_loss", "why"), [(False, NOT_LOOKED), (True, NO_OPERATOR)])
def test_a_window_that_saw_nothing_is_no_idle_step_but_an_estimate_and_the_next_one_is_exact(
    job, attach, sink, caplog, asks_for_loss, why
):
    caplog.set_level(logging.INFO)
    attach(job, config=EVERY_FIVE)
    train(job, PROFILED[1:2], asks_for_loss=asks_for_loss)
    assert thrown_away(caplog) == [why]
    assert exact_of(sink) == [3, 13]
    blind = sink.steps[8]
    assert blind.calibration_age_steps == 5
    assert blind.ledger.compute_ns > 0, "as the window before said"
    assert sink.steps[-1].total_windows == len(PROFILED), "it was paid for"


def test_operators_that_are_lost_while_autograd_ran_are_a_blind_window_whatever_else_has_rows(attach, sink, caplog):
    caplog.set_level(logging.INFO)
    model = nn.Linear(8, 8)
    optimizer = Still(model.parameters())
    attach(SimpleNamespace(model=model, optimizer=optimizer), config=EVERY_FIVE)
    for _ in range(STEPS):
        with Paused():
            model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    assert thrown_away(caplog) == [NO_OPERATOR] * len(PROFILED)
    assert exact_of(sink) == []


def test_a_step_that_runs_no_operator_is_exactly_that(attach, sink, caplog):
    """A stand-in for a model: python alone, and the optimizer's step is all that torch hears of."""

    class Thinking(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x):
            return sum(range(x))

    caplog.set_level(logging.INFO)
    model = Thinking()
    optimizer = Still(model.parameters())
    attach(SimpleNamespace(model=model, optimizer=optimizer), config=EVERY_FIVE)
    for _ in range(STEPS):
        model(10_000)
        optimizer.step()
    assert thrown_away(caplog) == []
    assert exact_of(sink) == list(PROFILED)
    for record in sink.steps:
        if record.source == "exact":
            assert record.ledger.compute_ns == record.ledger.unknown_ns == 0
            assert record.ledger.host_bound_ns > 0


def test_where_no_window_tells_anything_no_more_are_paid_for_and_the_records_say_so(job, attach, sink, caplog):
    caplog.set_level(logging.INFO)
    hook = attach(job, config=EVERY_FIVE)
    train(job, range(STEPS))
    assert thrown_away(caplog) == [NOT_LOOKED] * BLIND_WINDOWS_MAX
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [NOT_LOOKED in record.getMessage() for record in warned] == [True]
    assert not hook.windows.may_open()
    reasons = [record.uncalibrated for record in sink.steps]
    assert reasons[-1] == "unavailable"
    assert "unavailable" not in reasons[: PROFILED[-1]]


@pytest.fixture
def no_windows():
    """Suppose a torch whose profiler has other inner parts."""
    torch_internals.suppose_missing(["torch._C._autograd._enable_profiler"])
    yield
    torch_internals.forget()


def test_a_torch_without_windows_is_not_said_to_be_short_of_budget(no_windows, job, attach, sink):
    attach(job, config=HookConfig(overhead_budget=0.5))
    job.run(STEPS)
    assert {record.uncalibrated for record in sink.steps} == {"unavailable"}


class InterruptedClock(FakeClock):
    """Loses the processor for 1.8 ms amid some readings."""

    interruptions = 0

    def wall_ns(self):
        now = super().wall_ns()
        if self.interruptions:
            self.interruptions -= 1
            self.advance(MS * 9 // 5)
        return now


@pytest.mark.parametrize("interruptions", [0, 1, 4])
def test_a_processor_that_is_taken_amid_a_reading_of_the_clocks_moves_no_rows_out_of_a_short_step(interruptions):
    """An error of 0.9 ms is less than what is thrown away, and all of a step of 1 ms."""
    clock, session = InterruptedClock(monotonic_ns=1000 * MS, wall_ns=5000 * MS), Session()
    reader = WindowReader(clock, on_device=False, profiler=session)
    reader.install()
    clock.interruptions = interruptions
    reader.open()
    start = clock.monotonic_ns()
    session.rows = [Row("cpu_op", "aten::mm", 4000 * MS + start, 4000 * MS + start + MS, threading.get_native_id())]
    clock.advance(MS)
    measured = reader.close(timed(start, start + MS, {"forward": [(start, start + MS)]}))
    assert measured.ledger.compute_ns == MS
