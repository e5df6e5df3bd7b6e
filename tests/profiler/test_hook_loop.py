"""The hook on a real CPU training loop: every step has a record whose ledger sums, and the counts are right."""

import contextlib
import logging
import time

import pytest
import torch

from pacecar.config import HookConfig
from pacecar.profiler.hook.hook import AlreadyAttachedError, Hook, make_hello
from pacecar.profiler.timing.step_timer import EVENTS_MAX
from pacecar.records import Goodbye, Knobs, Ledger
from tests.kit.hook_inspection import inspect


def check(records):
    """What holds for every run of records."""
    total = Ledger(wall_ns=0, data_wait_ns=None)
    for number, record in enumerate(records):
        assert record.step == number
        assert record.ledger.wall_ns == record.wall_ns == sum(record.ledger.parts().values())
        phases = (record.data_wait_ns, record.forward_ns, record.backward_ns, record.optimizer_ns)
        assert sum(p for p in phases if p is not None) <= record.wall_ns
        assert 0 <= record.overhead_ns <= record.wall_ns
        total += record.ledger
        assert record.totals == total
        assert record.total_steps == number + 1


@pytest.mark.slow
def test_every_step_is_accounted_for_and_exact_windows_appear(job, attach, sink, caplog):
    caplog.set_level(logging.INFO)
    hook = attach(job)
    job.run(30, hook.loop.data(job.batches))
    hook.close("finished")
    records = sink.steps
    check(records)
    assert len(records) == 30
    exact = [r for r in records if r.source == "exact"]
    blind = sum("an exact window is discarded" in record.getMessage() for record in caplog.records)
    assert len(exact) + blind >= 4
    assert records[-1].total_windows == len(exact) + blind
    for record in exact:
        assert record.calibration_age_steps == 0
        assert record.ledger.compute_ns > 0
        assert record.ledger.communication_ns == 0
        assert record.ledger.unknown_ns == 0
        assert record.forward_ns > 0
        assert record.backward_ns > 0
        assert record.optimizer_ns > 0
    assert isinstance(sink.records[-1], Goodbye)
    assert sink.records[-1].reason == "finished"


def test_estimates_say_how_old_their_calibration_is(job, attach, sink):
    attach(job)
    job.run(20)
    ages = [r.calibration_age_steps for r in sink.steps]
    assert ages[:3] == [None, None, None]
    assert ages[3:13] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4]
    for record in sink.steps[:3]:
        assert record.ledger.compute_ns == 0, "never calibrated, nothing claimed"
    for record in sink.steps[4:8]:
        assert record.ledger.compute_ns > 0


def test_without_windows_there_are_only_uncalibrated_estimates(job, attach, sink):
    attach(job, config=HookConfig(windows=False))
    job.run(10)
    assert {(r.source, r.calibration_age_steps, r.total_windows) for r in sink.steps} == {("estimate", None, 0)}


def test_accumulation_sums_the_micro_batches_of_a_step(job, attach, sink):
    attach(job)
    for step in range(8):
        job.optimizer.zero_grad()
        for x, y in job.batches[: 1 + step % 3]:
            (job.model(x) - y).square().mean().backward()
        job.optimizer.step()
    records = sink.steps
    check(records)
    assert [r.micro_batches for r in records] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert [r.samples for r in records] == [16, 32, 48, 16, 32, 48, 16, 32]


def test_evaluation_is_no_micro_batch(job, attach, sink):
    attach(job)
    job.run(2)
    job.model.eval()
    with torch.no_grad():
        job.model(job.batches[0][0])
    job.model.train()
    job.run(1)
    assert [r.micro_batches for r in sink.steps] == [1, 1, 1]


@pytest.mark.slow
def test_data_wait_is_measured_and_charged(job, attach, sink):
    def slow():
        for batch in job.batches:
            time.sleep(0.01)
            yield batch

    hook = attach(job)
    for x, y in hook.loop.data(slow()):
        job.step(x, y)
    records = sink.steps
    check(records)
    for record in records:
        assert record.data_wait_ns >= 9_000_000
        assert record.ledger.data_wait_ns >= 9_000_000
        assert record.samples == 16


@pytest.mark.slow
def test_a_dataloaders_own_operators_are_data_wait_and_not_compute(job, attach, sink):
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 128

        def __getitem__(self, index):
            return torch.randn(300, 48).sum(0), torch.zeros(4)

    hook = attach(job)
    loader = hook.loop.data(torch.utils.data.DataLoader(Slow(), batch_size=16))
    assert len(loader) == 8
    assert loader.batch_size == 16, "attributes pass through"
    for epoch in range(2):
        assert sum(1 for x, y in loader if job.step(x, y) is not None) == 8, epoch
    exact = [r for r in sink.steps if r.source == "exact" and r.data_wait_ns]
    assert exact
    for record in exact:
        assert record.ledger.data_wait_ns >= record.data_wait_ns


def test_counts_of_the_user_override_guesses_and_unknown_is_none(job, attach, sink):
    hook = attach(job, batch_samples=lambda batch: None, batch_tokens=lambda batch: batch[0].numel())
    job.run(1, hook.loop.data(job.batches))
    hook.loop.count(samples=3, tokens=0)
    hook.loop.count(samples=4)
    job.run(1, hook.loop.data(job.batches))
    first, second = sink.steps
    assert (first.samples, first.tokens) == (16, 16 * 48), "no count of the batch: forward's input stands in"
    assert (second.samples, second.tokens) == (7, 0), "zero is a measurement"
    assert (second.total_samples, second.total_tokens) == (23, 16 * 48)


def test_knobs_of_the_tuner_go_into_the_steps_that_follow(job, attach, sink):
    hook = None

    def boundary(record):
        if record.step == 1:
            hook.knobs = Knobs(1, {"bucket_bytes": 7})

    hook = attach(job, on_boundary=boundary)
    job.run(4)
    assert [r.knobs.epoch for r in sink.steps] == [0, 0, 1, 1]


def test_a_requested_window_comes_before_its_interval(job, attach, sink):
    hook = attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=10))
    job.run(5)
    hook.request_window()
    job.run(5)
    assert [r.step for r in sink.steps if r.source == "exact"] == [3, 6]


def test_the_profiled_step_and_the_one_that_pays_for_reading_are_disturbed(job, attach, sink):
    attach(job, config=HookConfig(overhead_budget=1.0, window_interval_steps=5, count_flops=False))
    job.run(12)
    assert [r.step for r in sink.steps if r.source == "exact"] == [3, 8]
    assert [r.step for r in sink.steps if r.disturbed] == [3, 4, 8, 9]


@pytest.mark.slow
def test_a_loop_that_never_ends_a_step_keeps_a_bounded_number_of_events(job, attach, sink):
    hook = attach(job)
    for _ in range(EVENTS_MAX):
        job.model(job.batches[0][0]).sum().backward()
        assert inspect(hook).events <= EVENTS_MAX + 3
        assert inspect(hook).inputs <= EVENTS_MAX + 1
    job.optimizer.step()
    (record,) = sink.steps
    assert record.micro_batches == EVENTS_MAX


def test_a_hook_of_the_users_on_the_models_output_runs_beside_ours(job, attach, sink):
    attach(job)
    heard = []
    for x, _ in job.batches:
        output = job.model(x)
        handle = output.register_hook(lambda gradient: heard.append(gradient.shape))
        output.sum().backward()
        handle.remove()
        job.optimizer.step()
    assert len(heard) == len(job.batches)
    assert all(r.backward_ns for r in sink.steps)


def test_checkpoint_time_is_charged_to_checkpoint(job, attach, sink):
    hook = attach(job)
    for _ in range(6):
        with hook.loop.checkpoint():
            time.sleep(0.004)
        job.run(1)
    for record in sink.steps[1:]:  # the first step begins with the first forward
        assert record.ledger.checkpoint_ns >= 4_000_000


def test_a_closure_inside_the_optimizer_is_forward_and_backward(attach, sink, job):
    job.optimizer = torch.optim.LBFGS(job.model.parameters(), max_iter=3)
    attach(job)
    x, y = job.batches[0]

    def closure():
        job.optimizer.zero_grad()
        loss = (job.model(x) - y).square().mean()
        loss.backward()
        return loss

    for _ in range(6):
        job.optimizer.step(closure)
    check(sink.steps)
    assert sink.steps[-1].micro_batches >= 1


def test_outputs_may_be_nested_and_a_forward_without_gradient_is_no_error(attach, sink, job):
    class Wrapped(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return {"meta": (None, 3), "logits": [self.inner(x)]}

    plain = job.model
    job.model = Wrapped(plain)
    attach(job)
    for x, _ in job.batches:
        out = job.model(x)["logits"][0]
        job.optimizer.zero_grad()
        out.mean().backward()
        job.optimizer.step()
    check(sink.steps)
    assert all(r.backward_ns for r in sink.steps)
    job.model(job.batches[0][0])  # a forward whose backward never comes
    job.optimizer.step()
    assert sink.steps[-1].backward_ns is None


def test_a_second_hook_is_refused_with_the_place_of_the_first(job, attach):
    first = attach(job)
    with pytest.raises(AlreadyAttachedError, match=r"conftest\.py:\d+"):
        attach(job)
    assert first.is_alive
    first.close()
    assert attach(job).is_alive, "close frees the slot"


def test_an_optimizer_without_step_hooks_is_refused_by_name(job):
    class Mine:
        pass

    with pytest.raises(TypeError, match=r"Mine has no register_step_pre_hook: pass the torch\.optim\.Optimizer"):
        Hook(job.model, Mine(), hello=make_hello(job.model))


def test_overhead_is_reported_and_the_budget_keeps_windows_rare(job, attach, sink):
    hook = attach(job, config=HookConfig(overhead_budget=0.0))
    job.run(40)
    records = sink.steps
    assert all(r.overhead_ns > 0 for r in records[1:])
    assert records[-1].total_windows == 0
    assert hook.budget.ratio > 0


def test_a_step_with_a_checkpoint_or_an_evaluation_inside_was_paused_and_no_other(job, attach):
    paused, hook = [], None

    def on_boundary(step):
        paused.append(step is not None and hook.loop.was_paused(step.raw.start_ns))

    hook = attach(job, on_boundary=on_boundary)
    job.run(4)
    with hook.loop.checkpoint():
        pass
    job.run(3)
    job.model.eval()
    with torch.no_grad():
        job.model(job.batches[0][0])
    job.model.train()
    job.run(3)
    assert paused == [False] * 4 + [True, False, False] + [True, False, False]


def test_steps_are_numbered_over_all_starts_by_the_optimizers_state(job, attach, sink):
    job.optimizer = torch.optim.Adam(job.model.parameters())
    job.run(5)
    hook = attach(job)
    job.run(3)
    hook.close()
    assert [one.global_step for one in sink.steps] == [6, 7, 8]


def test_the_script_says_where_it_resumes_if_the_optimizer_does_not(job, attach, sink):
    job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.01)
    hook = attach(job)
    job.run(1)
    hook.resume(101)
    job.run(2)
    hook.close()
    assert [one.global_step for one in sink.steps] == [None, 102, 103]


def test_a_checkpoint_holds_the_steps_before_it_unless_it_failed(job, attach, sink):
    hook = attach(job)
    job.run(2)
    with hook.loop.checkpoint(), hook.loop.checkpoint():
        pass
    job.run(1)
    with contextlib.suppress(OSError), hook.loop.checkpoint():
        raise OSError("disk full")
    job.run(1)
    hook.close()
    assert sink.steps[0].saved_steps is None
    assert sink.steps[-1].saved_steps == 2


@pytest.mark.slow
def test_evaluation_lasts_to_the_next_step_without_the_checkpoint_in_it(job, attach, sink):
    hook = attach(job)
    job.run(2)
    with torch.no_grad():
        job.model(job.batches[0][0])
    time.sleep(0.05)
    with hook.loop.checkpoint():
        time.sleep(0.1)
    job.run(1)
    hook.close()
    assert sink.steps[0].total_evaluation_ns == 0
    last = sink.steps[-1]
    assert 50_000_000 <= last.total_evaluation_ns <= last.wall_ns - last.ledger.checkpoint_ns
