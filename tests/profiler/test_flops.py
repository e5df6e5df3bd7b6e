"""What one forward costs: to the FLOP what torch's own counter says of forward and backward, or no figure at all."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from pacecar.profiler.utilization.flop_counter import Arithmetic, ForwardCounter, leave, modes_on


def count(model, *inputs):
    counter = ForwardCounter()
    counter.__enter__()
    try:
        model(*inputs)
    finally:
        leave(counter)
    return counter.count(), counter.doubt


def watched(model, *inputs):
    """What FlopCounterMode sees of forward and backward together."""
    with FlopCounterMode(display=False) as flops:
        model(*inputs).float().sum().backward()
    return flops.get_total_flops()


class Attention(nn.Module):
    def __init__(self, fused):
        super().__init__()
        self.into = nn.Linear(32, 96)
        self.out = nn.Linear(32, 32)
        self.fused = fused

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.into(x).view(batch, length, 3, 4, 8).permute(2, 0, 3, 1, 4)
        if self.fused:
            y = functional.scaled_dot_product_attention(q, k, v)
        else:
            y = torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class With(nn.Module):
    """A model whose forward is the function given."""

    def __init__(self, run):
        super().__init__()
        self.inner = mlp()
        self.other = nn.Linear(8, 4)
        self.run = run

    def forward(self, x):
        return self.run(self, x)


def mlp():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def frozen():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
    model[0].requires_grad_(False)
    return model


def under_autocast(self, x):
    with torch.autocast("cpu", torch.bfloat16):
        return self.inner(x)


def beside_a_teacher(self, x):
    with torch.no_grad():
        target = self.other(x)
    return self.inner(x) - target


CASES = {
    "a perceptron": (mlp, (5, 8)),
    "one with a third dimension": (mlp, (2, 5, 8)),
    "a frozen layer": (frozen, (5, 8)),
    "autocast": (lambda: With(under_autocast), (5, 8)),
    "a teacher without gradient": (lambda: With(beside_a_teacher), (5, 8)),
    "attention": (lambda: Attention(fused=False), (2, 16, 32)),
    "a transformer's layer": (lambda: nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), (2, 16, 32)),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=2), nn.BatchNorm2d(8),
            nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Flatten(), nn.Linear(576, 10),
        ),
        (2, 3, 16, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_forward_counted_and_backward_stated_are_what_torchs_counter_watches(case):
    make, shape = CASES[case]
    model, x = make(), torch.randn(shape)
    found, doubt = count(model, x)
    assert doubt is None
    assert found.total == watched(model, x)
    assert found.forward > 0
    assert found.backward > 0


def test_an_input_that_wants_its_gradient_costs_one_product_more():
    x = torch.randn(5, 8, requires_grad=True)
    found, _ = count(mlp(), x)
    assert found.total == watched(mlp(), x)
    assert found.total - count(mlp(), x.detach())[0].total == 2 * 5 * 8 * 16


def test_fused_attention_is_worth_what_the_same_mathematics_is_worth_written_out():
    """Torch's counter adds the scores that the fused kernel computes again, which are no FLOPs of the model."""
    x = torch.randn(2, 16, 32)
    assert count(Attention(fused=True), x)[0].total == count(Attention(fused=False), x)[0].total


def test_what_checkpointing_computes_again_is_not_the_models():
    x = torch.randn(5, 8)
    plain, _ = count(With(lambda self, x: self.inner(x)), x)
    again, doubt = count(With(lambda self, x: checkpoint(self.inner, x, use_reentrant=False)), x)
    assert doubt is None
    assert again.total == plain.total
    assert watched(With(lambda self, x: checkpoint(self.inner, x, use_reentrant=False)), x) > again.total


def test_the_arithmetic_is_that_of_the_products_and_not_of_the_parameters():
    x = torch.randn(5, 8)
    assert count(mlp(), x)[0].arithmetic == Arithmetic(torch.float32)
    assert count(With(under_autocast), x)[0].arithmetic == Arithmetic(torch.bfloat16)
    convolution = nn.Conv1d(4, 4, 3)
    assert count(convolution, torch.randn(2, 4, 9))[0].arithmetic == Arithmetic(torch.float32, is_convolution=True)


class Doubled(torch.autograd.Function):
    """A product whose backward is its author's."""

    @staticmethod
    def forward(ctx, x, weight):
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        return None, None


UNCOUNTABLE = {
    "an operator without a formula": (lambda: nn.LSTM(8, 8), "mkldnn_rnn_layer has no formula"),
    "a custom operator": (
        lambda: With(lambda self, x: self.inner(torch.ops.pacecar_test.twice(x))),
        "pacecar_test::twice has no formula",
    ),
    "reentrant checkpointing": (
        lambda: With(lambda self, x: checkpoint(self.inner, x.requires_grad_(), use_reentrant=True)),
        "use_reentrant=True",
    ),
    "somebody's own backward": (
        lambda: With(lambda self, x: Doubled.apply(x, self.other.weight.t())),
        "backward is its own",
    ),
    "no products": (nn.ReLU, "no operator with a formula"),
}


@pytest.fixture(scope="module", autouse=True)
def custom_operator():
    library = torch.library.Library("pacecar_test", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    yield
    library._destroy()


@pytest.mark.parametrize("case", UNCOUNTABLE)
def test_what_cannot_be_counted_is_absent_and_says_why(case):
    make, reason = UNCOUNTABLE[case]
    found, doubt = count(make(), torch.randn(3, 5, 8))
    assert found is None
    assert reason in doubt


def test_leaving_takes_off_this_counter_only_wherever_forward_left_it():
    class Other(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    below, counter, above = Other(), ForwardCounter(), Other()
    for mode in (below, counter, above):
        mode.__enter__()
    leave(counter)
    assert modes_on() == 2
    leave(counter)
    assert modes_on() == 2
    for mode in (above, below):
        mode.__exit__(None, None, None)
    assert modes_on() == 0


def test_a_mode_entered_in_a_gradient_hook_is_gone_after_that_node():
    """Why backward is stated and not watched; should torch change this, it could be watched."""
    model, counter, seen = mlp(), ForwardCounter(), []
    out = model(torch.randn(5, 8))
    out.register_hook(lambda gradient: counter.__enter__() and None)
    out.register_hook(
        lambda gradient: torch.autograd.Variable._execution_engine.queue_callback(lambda: seen.append(modes_on()))
    )
    out.sum().backward()
    assert seen == [0]
    assert modes_on() == 0
