"""Whose steps are the job's when the script makes another optimizer?  The model's parameters decide."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn

from pacecar.config import HookConfig
from pacecar.profiler.hook.optimizer_succession import OTHER_STEPS, SAME_STEPS, OptimizerSuccession, updates_of
from pacecar.profiler.hook.step_hooks import _afters, _before, _befores
from tests.kit.hook_inspection import inspect
from tests.kit.waiting import until
from tests.profiler.test_step_sampling import Slow

QUIET = HookConfig(overhead_budget=1.0, windows=False, count_flops=False, vitals_interval_steps=10_000)


def adam(*modules):
    return torch.optim.AdamW([p for module in modules for p in module.parameters()], lr=1e-3)


def step(job, *optimizers):
    """Run one forward and backward, then a step of each optimizer."""
    x, y = job.batches[0]
    (job.model(x) - y).square().mean().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def run(job, steps, *optimizers):
    for _ in range(steps):
        step(job, *optimizers)


@pytest.fixture
def hook(job, attach):
    return attach(job, config=QUIET)


@pytest.mark.slow
def test_a_new_optimizer_for_the_same_model_goes_on_with_the_steps_from_its_first_one(job, hook, sink):
    for _ in range(5):
        run(job, 20, job.optimizer)
        job.optimizer = adam(job.model)
    records = sink.steps
    assert [record.step for record in records] == list(range(100))
    assert {record.samples for record in records} == {16}
    assert {record.micro_batches for record in records} == {1}
    assert all(record.optimizer_ns is not None for record in records[1:]), "its step is timed from the first one on"
    assert records[-1].total_steps == 100


@pytest.mark.slow
def test_the_old_optimizer_is_not_kept_alive_not_even_until_the_new_one_steps(job, hook):
    run(job, 5, job.optimizer)
    old = weakref.ref(job.optimizer)
    job.optimizer = adam(job.model)
    gc.collect()
    assert old() is None, "the state of Adam is twice the model's memory"
    run(job, 5, job.optimizer)
    assert hook.step == 10


@pytest.mark.parametrize("rounds", [[(0, 2), (0, 6), (2, 6)], [(0, 6), (4, 6), (0, 6)], [(4, 6), (3, 6), (0, 6)]])
def test_rounds_that_freeze_and_unfreeze_layers_are_all_counted(job, hook, rounds):
    run(job, 5, job.optimizer)
    for first, last in rounds:
        for number, layer in enumerate(job.model):
            layer.requires_grad_(first <= number < last)
        job.optimizer = adam(*job.model[first:last])
        run(job, 10, job.optimizer)
    assert hook.step == 35


@pytest.mark.slow
def test_layers_that_share_nothing_with_those_before_are_followed_at_once_where_these_are_frozen(job, hook):
    head, rest = job.model[6:], job.model[:6]
    job.optimizer = optimizers = [adam(head), adam(rest)]
    run(job, 3, adam(job.model))
    run(job, 3, job.optimizer[0])
    before = hook.step
    for _ in range(2):
        for trained, frozen, optimizer in ((rest, head, optimizers[1]), (head, rest, optimizers[0])):
            frozen.requires_grad_(False)
            trained.requires_grad_(True)
            run(job, 10, optimizer)
    assert hook.step == before + 40


@pytest.mark.slow
def test_optimizers_of_other_models_end_no_step_and_take_nothing_over(job, hook):
    other = nn.Linear(48, 4)
    critic = adam(other)
    for _ in range(30):
        for _ in range(OTHER_STEPS // 8):
            other(job.batches[0][0]).sum().backward()
            critic.step()
        critic = adam(other)  # a new one each round
        step(job, job.optimizer)
    assert hook.step == 30


@pytest.mark.slow
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_optimizers_that_split_a_model_only_the_attached_one_ends_steps(job, attach, order):
    attached, other = adam(job.model[:4]), adam(job.model[4:])
    job.optimizer = attached
    hook = attach(job, config=QUIET)
    pair = [(attached, other)[i] for i in order]
    run(job, 30, *pair)
    assert hook.step == 30
    pair = [adam(job.model[:4]), adam(job.model[4:])]
    run(job, 30, *[pair[i] for i in order])
    assert hook.step == 60, "both were made anew, and one of them ends the steps"


@pytest.mark.slow
def test_a_critic_in_the_same_model_may_make_a_hundred_steps_for_each_of_the_generator(job, attach):
    generator, critic = adam(job.model[:4]), adam(job.model[4:])
    job.optimizer = generator
    hook = attach(job, config=QUIET)
    for _ in range(4):
        run(job, OTHER_STEPS - 1, critic)
        step(job, generator)
    assert hook.step == 4


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False])
def test_two_optimizers_of_the_same_parameters_that_take_turns_are_one_step_an_iteration(job, attach, first):
    other = adam(job.model[:4])
    hook = attach(job, config=QUIET)
    for _ in range(40):
        for optimizer in (job.optimizer, other) if first else (other, job.optimizer):
            step(job, optimizer)
    assert abs(hook.step - 40) <= 2


@pytest.mark.slow
def test_one_that_joins_later_and_takes_turns_is_not_counted_beside_the_first(job, hook):
    run(job, 20, job.optimizer)
    other = adam(job.model)
    for _ in range(20):
        step(job, job.optimizer)
        step(job, other)
    assert abs(hook.step - 40) <= 2


class Wrapper(torch.optim.Optimizer):
    """Steps by another optimizer, as SAM and Lookahead do."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        self.inner.step()


@pytest.mark.slow
@pytest.mark.parametrize("is_inner", [True, False])
def test_a_wrapper_and_what_is_inside_end_one_step_also_when_both_are_made_anew(job, attach, is_inner):
    wrapper = Wrapper(job.optimizer)
    job.optimizer = wrapper.inner if is_inner else wrapper
    hook = attach(job, config=QUIET)
    run(job, 20, wrapper)
    assert hook.step == 20
    run(job, 20, Wrapper(adam(job.model)))
    assert hook.step == 40


def test_an_optimizer_that_was_never_used_gives_way_to_the_one_that_is(job, hook):
    run(job, 10, adam(job.model))
    assert hook.step == 10


def test_a_new_optimizer_each_step_is_followed(job, hook):
    for _ in range(30):
        step(job, adam(job.model))
    assert hook.step >= 30 - SAME_STEPS


def test_lbfgs_calls_the_model_inside_its_step(job, hook):
    run(job, 5, job.optimizer)
    x, y = job.batches[0]
    for _ in range(3):
        optimizer = torch.optim.LBFGS(job.model.parameters(), max_iter=3)

        def closure(optimizer=optimizer):
            optimizer.zero_grad()
            loss = (job.model(x) - y).square().mean()
            loss.backward()
            return loss

        for _ in range(4):
            optimizer.step(closure)
    assert hook.step == 5 + 12


def test_schedulers_loaded_states_and_scalers_change_nothing(job, hook):
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for _ in range(4):
        optimizer = adam(job.model)
        optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        for _ in range(10):
            x, y = job.batches[0]
            scaler.scale((job.model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
        job.optimizer = optimizer
    assert hook.step == 40


def test_parameters_that_were_replaced_in_the_model_are_followed(job, hook):
    run(job, 5, job.optimizer)
    job.model.load_state_dict({k: v.clone() for k, v in job.model.state_dict().items()}, assign=True)
    job.optimizer = adam(job.model)
    run(job, 5, job.optimizer)
    assert hook.step == 10


class Pickled(torch.optim.SGD):
    """Pickles itself in its own way, so that nothing is registered on it."""

    def __reduce_ex__(self, protocol):
        return super().__reduce_ex__(protocol)


def test_an_optimizer_that_pickles_itself_is_followed_by_hooks_that_are_not_on_it(job, hook):
    run(job, 5, job.optimizer)
    for _ in range(3):
        optimizer = Pickled(job.model.parameters(), lr=0.1)
        run(job, 5, optimizer)
        assert not optimizer._optimizer_step_pre_hooks
        assert not optimizer._optimizer_step_post_hooks
    assert hook.step == 20


@pytest.mark.slow
def test_steps_that_are_only_counted_are_followed_too(job, attach, sink):
    hook = attach(job, config=HookConfig(overhead_budget=0.002, windows=False, count_flops=False))
    for _ in range(300):
        run(job, 5, job.optimizer)
        job.optimizer = adam(job.model)
        if not hook.is_alive:
            break
    assert hook.step == 1500 or not hook.is_alive


def test_the_models_calls_are_seen_also_while_steps_are_only_counted_once_somebody_asks(job, attach):
    clock = Slow()
    hook = attach(job, config=HookConfig(overhead_budget=0.01, windows=False, count_flops=False), clock=clock)

    def run_until(is_resting):
        until(lambda: clock.train(job, hook) or inspect(hook).is_resting is is_resting, look_seconds=0.0)

    run_until(True)
    before = hook.trained_ns
    step(job, job.optimizer)
    assert hook.trained_ns == before, "nobody looks"
    hook.watch_calls()
    hook.watch_calls()
    job.model(job.batches[0][0])
    assert hook.trained_ns > before
    with torch.no_grad():
        job.model(job.batches[0][0])
    assert hook.evaluated_ns > hook.trained_ns
    assert inspect(hook).is_watching_calls
    run_until(False)
    assert not inspect(hook).is_watching_calls


def test_closing_leaves_none_of_the_hooks(job, hook):
    run(job, 5, job.optimizer)
    new = adam(job.model)
    run(job, 5, new)
    hook.close()
    assert not new._optimizer_step_pre_hooks
    assert not new._optimizer_step_post_hooks
    assert not job.optimizer._optimizer_step_post_hooks
    assert not _befores.hooks
    assert not _afters.hooks


def test_the_decision_does_not_depend_on_when_the_old_one_is_collected(job):
    taken = []
    for keeps in (True, False):
        first = adam(job.model)
        succession, kept = OptimizerSuccession(job.model, first), []
        steps = []
        for number in range(40):
            if number % 7 == 3:
                kept += [first] if keeps else []
                first = adam(job.model[: 2 + number % 5])
            if succession.present() is not first:
                steps.append((number, succession.takes_over(first, number, is_update=True)))
        taken.append(steps)
    assert taken[0] == taken[1]


def test_a_strangers_step_costs_microseconds(job, hook):
    run(job, 5, job.optimizer)
    stranger = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    prices = []
    for _ in range(300):
        begun = time.perf_counter_ns()
        _before(stranger, (stranger,), {})
        prices.append(time.perf_counter_ns() - begun)
    assert min(prices) < 50_000


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad])
def test_an_optimizer_says_how_often_it_has_updated_even_before_it_was_restored(job, kind):
    first = kind(job.model.parameters())
    run(job, 7, first)
    assert updates_of(first) == 7
    second = kind(job.model.parameters())
    second.load_state_dict(first.state_dict())
    run(job, 2, second)
    assert updates_of(second) == 9


def test_updates_are_unknown_where_the_optimizer_does_not_count_them_or_a_device_does(job):
    sgd = torch.optim.SGD(job.model.parameters(), lr=0.1, momentum=0.9)
    run(job, 2, sgd)
    assert updates_of(sgd) is None
    assert updates_of(object()) is None
    adam_ = adam(job.model)
    run(job, 2, adam_)
    for state in adam_.state.values():
        state["step"] = state["step"].to("meta")
    assert updates_of(adam_) is None
