"""The FLOPs of steps in a running job: once per shape, never a wrong figure, and nothing of the job's is changed."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from pacecar.config import HookConfig
from pacecar.profiler.hook.module_calls import observe_calls
from pacecar.profiler.utilization.flop_counter import modes_on
from pacecar.profiler.utilization.step_flops import ATTEMPTS_MAX, SIGNATURES_MAX, StepFlops, signature
from pacecar.records import Vitals
from tests.kit.hook_inspection import inspect

EAGER = HookConfig(overhead_budget=1.0, windows=False, vitals_interval_steps=1)


class Loop:
    """A training loop with the counter's own seams, without the rest of the hook."""

    def __init__(self, model):
        self.model = model
        self.flops = StepFlops(model)
        self.step = 0
        observe_calls(model, lambda module, args, kwargs: self.flops.forward_begins(args, kwargs))

    def run(self, *batches, backward=True):
        """One step of these micro-batches; return its FLOPs."""
        for batch in batches:
            loss = self.model(batch).sum()
            if backward:
                loss.backward()
        flops = self.flops.drain()
        self.step += 1
        self.flops.arm(self.step)
        return flops


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def cost(samples):
    return samples * (2 * 2 * (8 * 16 + 16 * 4) + 2 * 16 * 4)


def counted_loop():
    loop = Loop(mlp())
    found = [loop.run(torch.randn(5, 8)) for _ in range(4)]
    assert found == [None, None, cost(5), cost(5)]
    return loop


def test_a_shape_is_counted_once_after_the_warm_up_and_then_looked_up():
    loop = counted_loop()
    assert not loop.flops.wants_count
    assert "forward" not in loop.model.__dict__


def test_a_step_is_the_sum_of_its_micro_batches_and_absent_while_one_of_them_is_unknown():
    loop = counted_loop()
    assert loop.run(torch.randn(5, 8), torch.randn(5, 8)) == 2 * cost(5)
    assert loop.run(torch.randn(5, 8), torch.randn(3, 8)) is None
    assert loop.run(torch.randn(5, 8), torch.randn(3, 8)) == cost(8)
    assert loop.flops.drain() is None, "a step without a forward has no FLOPs, not zero"


def test_other_trained_parameters_are_another_count():
    loop = counted_loop()
    loop.flops.check_parameters()
    loop.model[2].requires_grad_(False)
    loop.flops.check_parameters()
    assert loop.run(torch.randn(5, 8)) is None
    assert loop.run(torch.randn(5, 8)) < cost(5)


@pytest.mark.slow
def test_shapes_that_are_remembered_are_bounded():
    loop = counted_loop()
    for samples in range(6, 2 * SIGNATURES_MAX):
        loop.run(torch.randn(samples, 8), backward=False)
        loop.run(torch.randn(samples, 8), backward=False)
    assert len(loop.flops._known) == SIGNATURES_MAX


class Sudden(nn.Module):
    """Raises in the middle of forward when told to."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.error = None

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt(), SystemExit(3)], ids=type)
def test_an_exception_inside_the_counted_forward_is_the_users_and_leaves_no_mode_on(error):
    loop = Loop(Sudden())
    for _ in range(2):
        loop.run(torch.randn(5, 8))
    loop.model.error = error
    with pytest.raises(type(error)) as caught:
        loop.run(torch.randn(5, 8))
    assert caught.value is error
    assert modes_on() == 0
    loop.model.error = None
    assert loop.run(torch.randn(5, 8)) is None, "two forwards, one of them never ended"
    assert loop.run(torch.randn(5, 8)) == cost(5)


def test_an_exception_inside_backward_of_the_counted_step_leaves_no_mode_on():
    loop = Loop(mlp())
    for _ in range(2):
        loop.run(torch.randn(5, 8))
    out = loop.model(torch.randn(5, 8))

    def fail(gradient):
        raise ValueError("mine")

    out.register_hook(fail)
    with pytest.raises(ValueError, match="mine"):
        out.sum().backward()
    assert modes_on() == 0
    assert loop.flops.drain() == cost(5)


def test_the_users_own_flop_counter_keeps_its_figures():
    loop, figures = Loop(mlp()), []
    for _ in range(5):
        with FlopCounterMode(display=False) as counter:
            loop.run(torch.randn(5, 8))
        figures.append(counter.get_total_flops())
    assert figures == [cost(5)] * 5
    assert loop.run(torch.randn(5, 8)) == cost(5), "counted as soon as the user's mode is off"


class Watching(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_under_a_mode_that_is_always_on_it_is_given_up_and_the_mode_sees_the_same():
    loop, seen = Loop(mlp()), []
    with Watching() as mode:
        for _ in range(ATTEMPTS_MAX + 4):
            before = mode.seen
            assert loop.run(torch.randn(5, 8)) is None
            seen.append(mode.seen - before)
        assert modes_on() == 1
    assert len(set(seen[1:])) == 1, "the first step makes the gradients"
    assert "another dispatch mode" in loop.flops.reason


@pytest.mark.slow
def test_a_compiled_model_is_never_counted():
    for compiled in (torch.compile(mlp(), backend="eager"), mlp()):
        if not hasattr(compiled, "_orig_mod"):
            compiled.compile(backend="eager")
        loop = Loop(compiled)
        try:
            assert [loop.run(torch.randn(5, 8)) for _ in range(4)] == [None] * 4
        finally:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
        assert loop.flops.reason == "torch.compile is in use"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")  # dynamo looks at .grad of what is not a leaf
def test_a_compiled_function_inside_is_seen_and_compiled_as_ever():
    inner = torch.compile(lambda x: x @ x.t(), backend="eager")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = mlp()
            self.late = False

        def forward(self, x):
            x = self.first(x)
            return inner(x) if self.late else x @ x.t()

    loop = Loop(Model())
    for _ in range(2):
        loop.run(torch.randn(5, 8))
    loop.model.late = True  # compiles for the first time in the very forward that is counted
    try:
        assert loop.run(torch.randn(5, 8)) is None
        assert "torch.compile" in loop.flops.reason
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_and_data_parallel_are_not_counted():
    for part, reason in ((torch.jit.script(nn.Linear(8, 4)), "TorchScript"), (nn.DataParallel(mlp()), "DataParallel")):
        loop = Loop(nn.Sequential(part))
        for _ in range(3):
            assert loop.run(torch.randn(5, 8)) is None
        assert reason in loop.flops.reason


def test_copies_and_pickles_made_in_the_counted_step_are_whole_and_free_of_us(job, attach):
    hook = attach(job, config=EAGER)
    job.run(2)
    assert inspect(hook).is_counting_flops
    assert "forward" not in job.model.__dict__
    twin = copy.deepcopy(job.model)
    stream = io.BytesIO()
    torch.save(job.model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    x, _ = job.batches[0]
    expected = job.model(x)
    with torch.no_grad():
        for parameter in job.model.parameters():
            parameter.zero_()
    for other in (twin, loaded):
        assert torch.equal(other(x), expected)
        other(x).sum().backward()


def test_a_forward_that_somebody_put_on_the_instance_is_counted_and_stays(job, attach, sink):
    own = job.model.forward
    job.model.forward = lambda *args: own(*args)
    patched = job.model.__dict__["forward"]
    attach(job, config=EAGER)
    job.run(4)
    assert job.model.__dict__["forward"] is patched


def test_closing_in_the_counted_step_leaves_the_model_as_it_was(job, attach):
    hook = attach(job, config=EAGER)
    job.run(2)
    assert inspect(hook).is_counting_flops
    hook.close()
    assert not inspect(hook).is_counting_flops
    assert job.model._compiled_call_impl is None


@pytest.mark.parametrize(
    "value", [object(), (torch.ones(2).to_sparse().to_dense(), {1}), [[[[[[torch.ones(1)]]]]]], list(range(1000))]
)
def test_inputs_that_do_not_tell_their_shape_have_no_signature(value):
    with pytest.raises(ValueError, match="input"):
        signature(value)


def test_a_signature_is_of_shapes_and_plain_values():
    one = signature(((torch.ones(2, 3),), {"mask": torch.ones(3), "scale": 0.5, "cache": True, "mode": None}))
    same = signature(((torch.zeros(2, 3),), {"mask": torch.zeros(3), "scale": 0.7, "cache": True, "mode": None}))
    other = signature(((torch.ones(3, 2),), {"mask": torch.ones(3), "scale": 0.5, "cache": True, "mode": None}))
    assert one == same
    assert one != other
    assert signature(torch.ones(2)) != signature(torch.ones(2, requires_grad=True))


class Convolutional(nn.Module):
    """What might round differently if counting changed how anything runs: convolutions, attention, dropout, norms."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv1d(1, 8, 3, padding=1)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8 * 48, 4)

    def forward(self, x):
        x = self.norm(self.first(x.unsqueeze(1)))
        x = self.layer(x.transpose(1, 2))
        return self.last(x.flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["perceptron", "convolutional"])
def test_losses_and_parameters_are_the_same_to_the_last_bit_with_counting(job, attach, sink, kind):
    results = []
    for is_counted in (True, False):
        torch.manual_seed(5)
        other = type(job)()
        if kind == "convolutional":
            other.model = Convolutional()
            other.optimizer = torch.optim.AdamW(other.model.parameters(), lr=1e-3)
        hook = attach(other, config=HookConfig(overhead_budget=1.0, windows=False, count_flops=is_counted))
        torch.manual_seed(7)
        losses = other.run(30)
        hook.close()
        results.append((losses, [p.detach().clone() for p in other.model.parameters()]))
    (losses, parameters), (plain_losses, plain_parameters) = results
    assert losses == plain_losses
    assert all(torch.equal(a, b) for a, b in zip(parameters, plain_parameters, strict=True))
    assert any(isinstance(r, Vitals) and r.flops for r in sink.records)


def test_the_counted_step_is_disturbed_and_its_slowness_is_charged(job, attach, sink):
    attach(job, config=EAGER)
    job.run(8)
    steps = sink.steps
    assert [r.step for r in steps if r.disturbed] == [2]
    usual = sorted(r.overhead_ns for r in steps)[len(steps) // 2]
    assert steps[2].overhead_ns > usual


def test_without_a_budget_nothing_is_counted_and_with_a_small_one_new_shapes_wait(job, attach, sink):
    hook = attach(job, config=HookConfig(overhead_budget=0.0, windows=False))
    job.run(6)
    hook.close()
    assert all(r.flops is None for r in sink.records if isinstance(r, Vitals))
    sink.records.clear()
    hook = attach(job, config=HookConfig(overhead_budget=1e-6, windows=False, vitals_interval_steps=1))
    job.run(6)
    hook.close()
    assert not any(r.disturbed for r in sink.steps), "no training pays that back"
    sink.records.clear()
    hook = attach(job, config=HookConfig(overhead_budget=0.5, windows=False, vitals_interval_steps=1))
    job.run(6)
    hook.budget.charge(10**9)
    x, y = job.batches[0]
    for _ in range(6):
        job.step(x[:3], y[:3])
    steps = sink.steps
    assert [r.step for r in steps if r.disturbed] == [2], "the first count is on credit, the second must be earned"
