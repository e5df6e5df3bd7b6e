"""Short steps are measured more seldom, so that the budget holds; counts stay whole; and at the end the hook is off."""

import subprocess
import threading
import time
from contextlib import contextmanager
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pacecar.config import HookConfig
from pacecar.profiler.hook.step_boundary import CountedStep, StepBoundary
from pacecar.profiler.timing.process_stops import Stop, StopDetector
from pacecar.profiler.timing.step_sampling import BURST, EVERY_MAX, REVIEW_STEPS, StepSampling, burst_end, next_measured
from pacecar.records import Goodbye, Ledger, ProcessStop
from pacecar.records.final_totals import completed
from tests.kit.forking_python import forking_python

US = 1000


def review(cadence, wall, cost, *, passing=2 * US, rounds=1, is_strained=False):
    for _ in range(rounds * REVIEW_STEPS):
        passed = (cadence.every or 1) - 1
        cadence.measured(wall, cost, passed=passed, passed_cost_ns=passed * passing, is_strained=is_strained)
    return cadence.every


def test_a_long_step_is_always_measured_and_a_short_one_as_often_as_half_the_budget_allows():
    assert review(StepSampling(0.01), 100_000 * US, 80 * US, rounds=3) == 1
    assert review(StepSampling(0.01), 16_000 * US, 80 * US, rounds=3) == 1
    assert review(StepSampling(0.01), 2_000 * US, 60 * US, rounds=3) == 8
    every = review(StepSampling(0.01), 1_000 * US, 60 * US, passing=1 * US, rounds=3)
    assert (60 + (every - 1)) / every <= 5
    assert 16 <= every <= 32


def test_it_grows_at_once_and_shrinks_when_there_is_room():
    cadence = StepSampling(0.01)
    assert review(cadence, 2_000 * US, 60 * US) == 8
    assert review(cadence, 2_100 * US, 55 * US, rounds=4) == 8, "a little better is not enough"
    assert review(cadence, 100_000 * US, 60 * US, rounds=2) == 1


def test_where_even_counting_is_too_much_it_is_none():
    assert review(StepSampling(0.001), 1_000 * US, 60 * US, passing=3 * US, rounds=2) is None
    cadence = StepSampling(0.01)
    assert review(cadence, 300 * US, 60 * US, passing=1 * US, rounds=4) <= EVERY_MAX


def test_a_few_steps_beside_other_programs_do_not_turn_it_off_for_the_rest_of_the_run():
    """In steps of 4 ms, two of the first four of which lost the processor for 10 ms inside our code, it was off."""
    cadence = StepSampling(0.01)
    for cost in (10_000 * US, 10_000 * US, 80 * US, 80 * US):
        cadence.measured(4_000 * US, cost)
    assert cadence.every == EVERY_MAX, "reviewed at once"
    assert review(cadence, 4_000 * US, 80 * US, rounds=2) == 8
    for _ in range(8):  # and later one step in 33 is like that
        cadence.measured(4_000 * US, 10_000 * US, passed=cadence.every - 1)
        assert review(cadence, 4_000 * US, 80 * US) == 8


def test_under_a_strained_budget_fewer_steps_are_measured_until_the_debt_is_paid():
    cadence = StepSampling(0.01)
    assert review(cadence, 8_000 * US, 50 * US) == 2
    assert review(cadence, 8_000 * US, 50 * US, is_strained=True) == 8
    assert review(cadence, 8_000 * US, 50 * US, rounds=2) == 2


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_no_limit_and_no_windows_measure_every_step(ratio):
    assert review(StepSampling(ratio), 100 * US, 90 * US, rounds=3) == 1


def test_somebody_elses_program_on_the_processor_is_no_cost_of_ours():
    cadence = StepSampling(0.01)
    for number in range(REVIEW_STEPS):
        cadence.measured(20_000 * US, 5_000 * US if number % 16 == 0 else 50 * US)
    assert cadence.every == 1


def test_what_threads_spend_on_records_counts_and_is_averaged_as_it_comes_in_lumps():
    cadence = StepSampling(0.01)
    assert review(cadence, 20_000 * US, 60 * US, rounds=4) == 1
    cadence.charged(REVIEW_STEPS * 150 * US)
    assert review(cadence, 20_000 * US, 60 * US) == 1, "four reviews without and one with it"
    for _ in range(4):
        cadence.charged(REVIEW_STEPS * 150 * US)
        review(cadence, 20_000 * US, 60 * US)
    assert cadence.every > 1


@pytest.mark.slow
@given(st.integers(0, 10_000), st.sampled_from([2, 4, 8, 16, 32, 64]))
def test_steps_are_measured_in_bursts_one_in_k_and_ranks_of_another_k_share_them(step, every):
    first = next_measured(step, every)
    assert step <= first < step + BURST * every
    assert next_measured(first, every // 2) == first
    end = burst_end(first, every)
    assert all(next_measured(each, every) == each for each in range(first, end))
    assert next_measured(end, every) == end - BURST + BURST * every
    assert sum(next_measured(each, every) == each for each in range(step, step + BURST * every)) == BURST


# --- in the hook --------------------------------------------------------------------------------


class Slow:
    """A clock that tells the hook it is expensive: each reading moves it on, and steps last what the test says."""

    def __init__(self):
        self.now = 0

    def monotonic_ns(self):
        self.now += 2 * US
        return self.now

    def wall_ns(self):
        return self.now

    def train(self, job, hook, step_us=1_000):
        self.now += step_us * US
        job.run(1)
        hook.records.flush()


@pytest.mark.slow
def test_totals_and_wall_time_stay_right_when_steps_are_only_counted(job, attach, sink):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False, count_flops=False), clock=clock)
    begun = 0
    for step in range(400):
        clock.train(job, hook)
        if step == 0:
            begun = clock.now
    records = sink.steps
    assert hook.is_alive
    assert records[0].measured_every == 1
    every = records[-1].measured_every
    assert every > 1
    tail = records[-10:]
    assert all(next_measured(record.step, every) == record.step for record in tail if record.measured_every == every)
    assert {after.step - before.step for before, after in pairwise(tail)} == {1, BURST * (every - 1) + 1}
    last = records[-1]
    assert last.total_steps == last.step + 1
    assert last.total_samples == 16 * last.total_steps
    assert last.totals.wall_ns == pytest.approx(last.ended_wall_ns - begun, rel=0.02)
    assert all(sum(r.ledger.parts().values()) == r.wall_ns for r in records)
    measured = sum((r.ledger for r in records), Ledger(wall_ns=0))
    assert measured.wall_ns < last.totals.wall_ns / 2, "most were only counted"
    assert hook.budget.ratio <= 0.01


@pytest.mark.slow
def test_steps_that_no_measured_one_follows_are_in_the_goodbye(job, attach, sink):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False, count_flops=False), clock=clock)
    begun, last = 0, None
    while last is None or last.total_steps < 300 or hook.step != last.total_steps + 7:
        clock.train(job, hook)
        begun, last = begun or clock.now, sink.steps[-1]
    ended = clock.now
    hook.close()
    bye = sink.records[-1]
    assert isinstance(bye, Goodbye)
    assert bye.total_steps == hook.step == last.total_steps + 7
    assert bye.total_samples == 16 * bye.total_steps
    assert bye.totals.wall_ns == pytest.approx(ended - begun, rel=0.01)
    rest_ns = bye.totals.wall_ns - last.totals.wall_ns
    assert rest_ns == pytest.approx(7 * 1_000 * US, rel=0.1)
    assert bye.totals.unknown_ns - last.totals.unknown_ns < 1.1 * rest_ns * last.ledger.unknown_ns / last.wall_ns + US
    assert bye.total_overhead_ns > last.total_overhead_ns
    assert completed(last, bye).total_steps == bye.total_steps


def test_a_job_without_a_step_has_no_totals_and_one_whose_steps_all_have_records_those_of_the_last(job, attach, sink):
    hook = attach(job, config=HookConfig(windows=False))
    hook.close()
    assert (sink.records[-1].totals, sink.records[-1].total_steps, sink.records[-1].total_overhead_ns) == (None,) * 3
    hook = attach(job, config=HookConfig(windows=False, overhead_budget=1.0))
    job.run(3)
    hook.close()
    last, bye = sink.steps[-1], sink.records[-1]
    assert (bye.totals, bye.total_steps, bye.total_samples) == (last.totals, 3, last.total_samples)


@pytest.mark.slow
def test_a_hook_that_cannot_afford_even_counting_turns_itself_off_with_one_line(job, attach, sink, caplog):
    heard = []
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.001, windows=False), clock=clock, on_boundary=heard.append)
    for _ in range(700):
        clock.train(job, hook, 500)
    assert not hook.is_alive
    assert [r.getMessage() for r in caplog.records if "measures no more" in r.getMessage()] != []
    assert sum("measures no more" in r.getMessage() for r in caplog.records) == 1
    assert sink.steps[-1].measured_every is None
    assert len(heard) == 700, "who listens is still told of every boundary"
    hook.close()
    assert len(job.model._forward_hooks) == 0


@pytest.mark.slow
def test_a_listener_gets_the_pace_of_the_steps_that_are_only_counted(job, attach):
    heard = []
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False), clock=clock, on_boundary=heard.append)
    for wait in range(1, 200):
        clock.train(job, hook, 1_000 + wait)
    assert [step.step for step in heard] == list(range(199)), "every step, in order"
    counted = [step for step in heard if isinstance(step, CountedStep)]
    measured = [step for step in heard if not isinstance(step, CountedStep)]
    assert len(counted) > 100
    assert len(measured) > 20
    for step in counted:  # the job's own time, and what few looks at the clock counting takes
        assert 0 <= step.wall_ns - (1_000 + step.step + 1) * US <= 20 * US
    late = [step for step in measured if step.step > 100 and isinstance(heard[step.step - 1], type(step))]
    assert late
    for step in late:
        assert step.wall_ns - step.pace_ns == step.raw.overhead_ns - step.last_listener_ns > 0, "what measuring it took"


@pytest.mark.slow
def test_a_failure_at_a_counted_step_is_logged_by_its_own_name(job, attach, caplog, monkeypatch):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False), clock=clock)
    for _ in range(100):
        clock.train(job, hook)

    def fail(pulse, now_ns):
        raise ValueError("planted")

    monkeypatch.setattr(StepBoundary, "count_step", fail)
    for _ in range(40):
        clock.now += 1_000 * US
        job.run(1)
        hook.wake()
    assert any("pacecar failed in Hook._counted" in record.getMessage() for record in caplog.records)


@pytest.mark.slow
def test_the_ratio_is_kept_with_windows_whose_cost_is_earned_back(job, attach, sink):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=True, count_flops=False), clock=clock)
    for number in range(20_000):  # beside other programs a window is dear, and comes later
        clock.train(job, hook)
        if number >= 2000 and number % 500 == 0 and sink.steps[-1].total_windows:
            break
    records = sink.steps
    assert hook.is_alive
    assert records[-1].total_windows > 0
    assert records[-1].measured_every > 1
    assert hook.budget.ratio <= 0.0105
    assert records[-1].total_steps == records[-1].step + 1


@contextmanager
def looked_at(hook):
    """Let a thread settle the steps, as that of a real sink does: unsettled steps are no part of the ratio."""
    is_over = threading.Event()

    def look():
        while not is_over.wait(0.25):
            hook.records.flush_in_background()

    looks = threading.Thread(target=look)
    looks.start()
    try:
        yield
    finally:
        is_over.set()
        looks.join()


@pytest.mark.full
@pytest.mark.alone
def test_the_ratio_is_kept_on_a_job_of_one_millisecond_steps(job, attach, sink):
    config = HookConfig(overhead_budget=0.01, windows=True, count_flops=False)
    hook = attach(job, config=config)
    begun = time.monotonic()
    with looked_at(hook):
        while (lasted := time.monotonic() - begun) < 16.0 or (hook.budget.ratio > 0.01 and lasted < 60.0):
            job.run(50)
    hook.records.flush()
    records = sink.steps
    assert hook.is_alive
    assert records[-1].total_windows > 0
    assert records[-1].measured_every > 1
    assert hook.budget.ratio <= 0.0105, "the attach and what windows cost beyond their price were earned back"
    assert records[-1].total_steps == records[-1].step + 1


OFF = """
import hashlib, sys, time, torch
from torch import nn
import pacecar
torch.set_num_threads(1)
torch.manual_seed(3)
model, x = nn.Linear(8, 4), torch.randn(16, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
pacer = None
if sys.argv[1] == "hooked":
    pacer = pacecar.attach(model, optimizer, tune="off", overhead_budget=0.001, socket="/nowhere/pacecar.sock")
    assert pacer.is_active, pacer.inert_because
losses, begun = [], time.process_time()
for step in range(3000):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    losses.append(float(loss))
print((time.process_time() - begun) / 3000 * 1e6)
print(pacer.is_active if pacer else None)
print(hashlib.sha256(repr(losses).encode()).hexdigest())
if pacer:
    pacer.close()
"""


@pytest.mark.slow
def test_steps_of_100_us_with_a_budget_of_a_thousandth_turn_the_hook_off_with_one_word_and_the_loss_is_the_same():
    plain, hooked = (
        subprocess.run([forking_python(), "-c", OFF, kind], capture_output=True, text=True, timeout=120, check=True)
        for kind in ("plain", "hooked")
    )
    step_us, is_active, losses = hooked.stdout.split()
    assert float(step_us) < 3000
    assert is_active == "False"
    assert hooked.stderr.count("pacecar measures no more") == 1
    assert losses == plain.stdout.split()[2]


@pytest.mark.slow
def test_a_stop_in_steps_that_no_measured_one_follows_has_its_record(job, attach, sink, monkeypatch):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False, count_flops=False), clock=clock)
    last = None
    while last is None or last.total_steps < 300 or hook.step != last.total_steps + 7:
        clock.train(job, hook)
        last = sink.steps[-1]
    begun = clock.now + 100 * US
    clock.now += 300_000 * US
    job.run(1)
    assert [record for record in sink.records if isinstance(record, ProcessStop)] == []
    monkeypatch.setattr(StopDetector, "stops", lambda *_: [Stop(begun, begun + 290_000 * US, "frozen")])
    hook.close()
    (stop,) = [record for record in sink.records if isinstance(record, ProcessStop)]
    assert (stop.step, stop.phase, stop.stopped_ns) == (hook.step - 1, "outside", 290_000 * US)
    assert sink.records[-1].totals.stopped_ns == 290_000 * US
