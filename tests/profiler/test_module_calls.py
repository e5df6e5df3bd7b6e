"""Calls of one module are observed, of it alone, and nothing of that is on the module or stays in its class."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import cloudpickle
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from pacecar.profiler.hook import module_calls
from pacecar.profiler.hook.module_calls import CallObserver, hold_class, is_compiled_in_place, observe_calls
from tests.kit.ours import OURS

NAME = "_compiled_call_impl"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weight = nn.Parameter(torch.ones(4))
        self.error: BaseException | None = None

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        out: torch.Tensor = self.inner(x) * scale
        return out


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    assert NAME not in vars(Net)
    assert not [calls for calls in module_calls._observed.values() if isinstance(calls.module, Net)]


def observed(module: nn.Module, seen: list[Any], word: str = "", **options: Any) -> CallObserver:
    observer = observe_calls(
        module,
        lambda module, args, kwargs: seen.append((word + "before", len(args), sorted(kwargs))),
        lambda module, args, output: seen.append((word + "after", type(output).__name__)),
        **options,
    )
    assert observer is not None
    return observer


def test_before_and_after_are_told_of_the_calls_of_that_module_alone_around_all_hooks() -> None:
    net, other, seen = Net(), Net(), list[Any]()
    net.register_forward_pre_hook(lambda *_: seen.append("pre-hook"))
    net.register_forward_hook(lambda module, args, output: (output,))
    observer = observed(net, seen)
    other(torch.ones(4))
    assert seen == []
    net(torch.ones(4), scale=2.0)
    assert seen == [("before", 1, ["scale"]), "pre-hook", ("after", "tuple")]
    observer.remove()
    observer.remove()
    net(torch.ones(4))
    assert seen[3:] == ["pre-hook"]


def test_observers_are_told_in_order_and_one_may_go_in_the_middle_of_a_call() -> None:
    net, seen = Net(), list[Any]()
    second = observed(net, seen, "second ")
    first = observed(net, seen, "first ", is_first=True)
    net(torch.ones(4))
    assert [one[0] for one in seen] == ["first before", "second before", "first after", "second after"]
    first.before = None
    going = observe_calls(net, lambda *_: second.remove())
    assert going is not None
    net(torch.ones(4))
    going.remove()
    first.remove()


def test_the_class_is_as_it_was_with_the_last_observer_whatever_the_order() -> None:
    before = dict(vars(Net))
    nets = [Net(), Net(), Net()]
    observers = [observed(net, []) for net in nets]
    for observer in (observers[1], observers[0], observers[2]):
        assert NAME in vars(Net)
        observer.remove()
    assert dict(vars(Net)) == before


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=type)
def test_what_forward_raises_reaches_the_caller_and_nobody_is_told_of_an_output(error: BaseException) -> None:
    net, seen = Net(), list[Any]()
    observer = observed(net, seen)
    net.error = error
    observer.set_around(lambda call, args, kwargs: call(*args, **kwargs))
    with pytest.raises(type(error)) as caught:
        net(torch.ones(4))
    assert [one[0] for one in seen] == ["before"]
    assert module_calls.__file__ not in [str(entry.path) for entry in caught.traceback]
    observer.remove()


def test_calls_can_be_made_by_another_until_they_are_given_back() -> None:
    net, seen = Net(), list[Any]()
    observer = observed(net, seen)
    observer.set_around(lambda call, args, kwargs: ("around", call(*args, **kwargs)))
    assert net(torch.ones(4))[0] == "around"
    observer.set_around(None)
    assert isinstance(net(torch.ones(4)), torch.Tensor)
    observer.set_around(lambda call, args, kwargs: None)
    observer.remove()
    assert isinstance(net(torch.ones(4)), torch.Tensor)


def test_a_copy_and_a_pickle_of_an_observed_module_are_not_observed() -> None:
    net, seen = Net(), list[Any]()
    before = {name: repr(value) for name, value in vars(net).items()}
    observer = observed(net, seen)
    assert {name: repr(value) for name, value in vars(net).items()} == before
    for twin in (copy.deepcopy(net), copy.copy(net), pickle.loads(pickle.dumps(net))):
        twin(torch.ones(4))
    assert seen == []
    observer.remove()


def test_a_class_that_is_pickled_by_its_parts_has_torchs_own_there() -> None:
    """Cloudpickle writes a class of `__main__` so; what is loaded must not need pacecar."""
    kind = type("OfMain", (Net,), {"__module__": "__main__"})
    net = kind()
    observer = observed(net, [])
    data = cloudpickle.dumps(net)
    observer.remove()
    assert not OURS.search(data)
    twin = cloudpickle.loads(data)
    assert isinstance(twin(torch.ones(4)), torch.Tensor)
    assert type(twin)._compiled_call_impl is None


def test_a_parametrization_that_comes_and_goes_changes_the_class_and_not_what_is_observed() -> None:
    net, seen = Net(), list[Any]()
    observer = observed(net, seen)
    parametrize.register_parametrization(net, "weight", nn.Identity())
    assert type(net) is not Net
    net(torch.ones(4))
    parametrize.remove_parametrizations(net, "weight")
    assert type(net) is Net
    net(torch.ones(4))
    assert len(seen) == 4
    observer.remove()


def test_what_the_user_compiles_in_place_is_called_and_stays_when_the_observer_goes() -> None:
    net, seen = Net(), list[Any]()
    observer = observed(net, seen)
    assert not is_compiled_in_place(net)
    called: list[str] = []
    net._compiled_call_impl = lambda *args, **kwargs: called.append("compiled") or torch.zeros(1)  # as compile() does
    assert is_compiled_in_place(net)
    net(torch.ones(4))
    observer.remove()
    net(torch.ones(4))
    assert (called, len(seen)) == (["compiled"] * 2, 2)


def test_a_class_that_somebody_changed_meanwhile_is_left_as_he_made_it() -> None:
    net, seen = Net(), list[Any]()
    observer = observed(net, seen)
    mine = staticmethod(lambda *args: torch.zeros(1))
    type.__setattr__(Net, NAME, mine)
    observer.remove()
    assert vars(Net)[NAME] is mine
    type.__delattr__(Net, NAME)


def graphs_of(net: nn.Module, calls: int = 3) -> int:
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: net(x), backend="eager", fullgraph=True)
    for _ in range(calls):
        compiled(torch.ones(4))
        observer = observed(net, [])
        compiled(torch.ones(4))
        let_go = hold_class(net)
        observer.remove()
        compiled(torch.ones(4))
        observer = observed(net, [])
        compiled(torch.ones(4))
        observer.remove()
        assert let_go is not None
        held.append(let_go)
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


held: list[Any] = []


@pytest.mark.slow
def test_an_observer_that_comes_and_goes_compiles_nothing_anew() -> None:
    try:
        assert graphs_of(Net()) == 1
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        while held:
            held.pop()()


@pytest.mark.slow
def test_where_dynamo_guards_the_class_who_rests_keeps_it() -> None:
    """A module with a hook of the user's: dynamo inlines torch's whole call."""
    net, seen = Net(), list[Any]()
    net.register_forward_hook(lambda *_: None)
    observer = observed(net, seen)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x: net(x), backend="eager")
    try:
        compiled(torch.ones(4))
        let_go = hold_class(net)
        assert let_go is not None
        for _ in range(4):
            observer.remove()
            compiled(torch.ones(4))
            observer = observed(net, seen)
            compiled(torch.ones(4))
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        observer.remove()
        let_go()
    finally:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
