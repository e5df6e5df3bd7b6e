"""A plain step ends in a few stores, every other one at the full boundary, and no record tells which it was."""

import contextlib
import itertools
import time
from statistics import median

import pytest
import torch

from pacecar.config import HookConfig
from pacecar.profiler.hook.step_boundary import WAITING_MAX, PlainStep
from pacecar.profiler.hook.step_records import FinishedStep
from pacecar.profiler.timing.hook_cost import PRICE_NS_MAX, call_price
from tests.kit.hook_inspection import inspect
from tests.kit.listeners import HeardSteps

QUIET = HookConfig(overhead_budget=1.0, windows=False, count_flops=False, vitals_interval_steps=10_000)


def not_plain(hook):
    """Return the steps without a record that were not plain; the first one has its record at once."""
    return [step.step for step in inspect(hook).waiting if isinstance(step, FinishedStep)]


def test_steps_like_the_last_one_are_plain_and_their_records_are_like_the_others(job, attach, sink):
    hook = attach(job, config=QUIET)
    job.run(40)
    assert not_plain(hook) == [1, 2], (
        "the first ones know nothing of each other yet, and step 2 is the first window's turn"
    )
    assert sum(isinstance(step, tuple) for step in inspect(hook).waiting) == 37
    records = sink.steps
    assert [record.step for record in records] == list(range(40))
    assert {record.samples for record in records} == {16}
    assert records[-1].total_steps == 40
    assert records[-1].total_samples == 40 * 16
    gaps = [
        later.ended_wall_ns - before.ended_wall_ns - later.wall_ns for before, later in itertools.pairwise(records[1:])
    ]
    assert median(map(abs, gaps)) < 5_000_000, "now and then another program has the processor"
    for record in records[2:]:
        assert record.micro_batches == 1
        assert None not in (record.forward_ns, record.backward_ns, record.optimizer_ns)
        assert 0 < record.forward_ns + record.backward_ns + record.optimizer_ns <= record.wall_ns


def test_another_shape_samples_said_and_a_wake_are_not_plain_and_the_next_like_it_is_plain(job, attach, sink):
    hook = attach(job, config=QUIET)
    job.run(8)
    x, y = job.batches[0]
    job.step(x[:8], y[:8])
    job.step(x[:8], y[:8])
    hook.loop.count(samples=5)
    job.step(x[:8], y[:8])
    job.step(x[:8], y[:8])
    hook.wake()
    job.step(x[:8], y[:8])
    assert not_plain(hook) == [1, 2, 8, 10, 12]
    assert [record.samples for record in sink.steps[8:]] == [8, 8, 5, 8, 8]


def test_a_listener_that_wants_no_boundary_is_left_alone_until_it_is_woken(job, attach):
    class Shy(HeardSteps):
        def wants_boundary(self):
            return False

    heard = []
    hook = attach(job, config=QUIET, listener=Shy(heard.append))
    job.run(10)
    before = len(heard)
    job.run(10)
    assert len(heard) == before
    hook.wake()
    job.run(3)
    assert [step.step for step in heard[before:]] == [20]


@pytest.mark.slow
def test_what_waits_is_bounded_when_nobody_settles(job, attach):
    hook = attach(job, config=QUIET)
    for _ in range(WAITING_MAX + 50):
        job.run(1)
        assert len(inspect(hook).waiting) <= WAITING_MAX + 1


def test_an_exception_between_steps_leaves_the_next_ones_whole(job, attach, sink):
    attach(job, config=QUIET)
    job.run(6)
    x, _ = job.batches[0]
    with contextlib.suppress(RuntimeError):
        job.model(x[:, :3])
    job.run(6)
    records = sink.steps
    assert len(records) == 12
    assert all(record.ledger.wall_ns == record.wall_ns for record in records)
    assert records[6].forward_ns is not None
    assert records[7].micro_batches == 1


def test_measuring_the_price_of_calls_leaves_the_jobs_random_numbers_alone_and_is_short():
    call_price.cache_clear()
    call_price()
    call_price.cache_clear()
    state = torch.get_rng_state()
    begun = time.thread_time()
    price = call_price()
    assert time.thread_time() - begun < 0.2
    assert torch.equal(state, torch.get_rng_state())
    # Nothing, where other programs make the loops without hooks the slower ones.
    assert 0 <= price.measured_ns(1) < 3 * PRICE_NS_MAX
    assert price.measured_ns(4) == price.optimizer_ns + 4 * (price.forward_ns + price.backward_ns)
    assert call_price() is price, "once per process"


def test_a_plain_step_is_a_tuple_of_what_its_type_says():
    assert len(PlainStep.__args__) == 9
