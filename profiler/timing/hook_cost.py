"""Measures what torch takes to call hooks that do nothing; the hooks' own clocks do not see that time.

It is more than many a hook takes.  A forward with hooks takes another path through `Module.__call__`, a gradient hook
wraps the gradient for python, and a callback of autograd goes through its engine.  The hook's own clocks start after
that and stop before torch has the result, so that the overhead it reported was a tenth or more too low.  So once per
process, at attach, a model of one number takes steps with and without empty hooks, alternately.  Between them the
processor's caches are overwritten, as a job does: in a tight loop the same calls cost a third.

The price is added to the overhead charged per step; it is not time of the ledger.

Left out: who charges it (`step_records`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from pacecar.torch_internals import find

from ..hook.module_calls import observe_calls

__all__ = ["HookCost", "call_price"]

ROUNDS = 5
"""Measured rounds: their median is steady to a fifth, and together they take some 5 ms."""

EVICTED_BYTES = 1 << 20
"""Bytes overwritten between two steps: more than the private caches of one core."""

WARM_ROUNDS = 1
"""Rounds that are dropped: the first steps of any kind cost more than the others."""

PRICE_NS_MAX = 100_000
"""The most that one price can be; anything above was another program, not torch."""


@dataclass(frozen=True, slots=True)
class HookCost:
    """Nanoseconds that torch spends around our hooks, which the hooks do not see themselves."""

    forward_ns: int = 0
    backward_ns: int = 0
    optimizer_ns: int = 0
    passed_ns: int = 0
    """The price of a step that is only counted: one empty hook, on warm caches, as short steps have."""

    def measured_ns(self, micro_batches: int) -> int:
        """Return the price of a step with `micro_batches` forwards and backwards."""
        return self.optimizer_ns + micro_batches * (self.forward_ns + self.backward_ns)


class _Tiny(nn.Module):
    """One parameter, made without a random number: the job's generators must not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Still(torch.optim.Optimizer):
    """An optimizer that changes nothing.

    It is a class of its own because the first optimizer of a class makes torch wrap that class's `step` with the calls
    of hooks.  An SGD made here would do that to SGD, and a user's subclass that calls `super().step()` would run all
    hooks twice.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401  there is no loss
        """Do nothing."""


def _look(*_: object) -> None:
    """Cost what the hook before every optimizer's step does (`step_hooks`), which calls another."""
    _nothing()


def _nothing(*_: object) -> None:
    """Do nothing."""


class _Bench:
    """A step of the tiny model, with and without empty hooks."""

    def __init__(self) -> None:
        self._model = _Tiny()
        self._optimizer = _Still(self._model.parameters())
        self._x = torch.ones(1, device="cpu")
        self._evicted = torch.zeros(EVICTED_BYTES // 8, dtype=torch.int64, device="cpu")
        self._inside_ns = 0
        self._loss = self._x
        self._queue: Callable[[Callable[[], None]], None] = (
            find("torch.autograd.Variable._execution_engine.queue_callback") or _drop
        )

    def hook_end(self) -> list[Any]:
        return [self._optimizer.register_step_post_hook(lambda *_: None), register_optimizer_step_pre_hook(_look)]

    def hook(self) -> list[Any]:
        now, queue = time.perf_counter_ns, self._queue

        def nothing(*_: object) -> None:
            pass

        # The hooks measure their own work, which is subtracted: only the time around them is wanted.
        def first() -> None:
            begun = now()
            queue(nothing)
            self._inside_ns += now() - begun

        def gradient(_: torch.Tensor) -> None:
            begun = now()
            queue(first)
            self._inside_ns += now() - begun

        def after(module: nn.Module, args: object, output: Any) -> None:  # noqa: ANN401  a tensor
            begun = now()
            output.register_hook(gradient)
            self._inside_ns += now() - begun

        observer = observe_calls(self._model, nothing, after)
        return [
            *([] if observer is None else [observer]),
            self._optimizer.register_step_pre_hook(nothing),
            self._optimizer.register_step_post_hook(nothing),
            register_optimizer_step_pre_hook(_look),
        ]

    def _forward(self) -> None:
        self._loss = self._model(self._x)

    def _backward(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]

    def step(self, *, is_cold: bool) -> tuple[int, ...]:
        """Return what forward, backward and the optimizer take, less what the hooks measured themselves."""
        spent = []
        for part in (self._forward, self._backward, self._optimizer.step):
            if is_cold:
                self._evicted.add_(1)
            self._inside_ns, begun = 0, time.perf_counter_ns()
            part()
            spent.append(time.perf_counter_ns() - begun - self._inside_ns)
        self._optimizer.zero_grad(set_to_none=True)
        return tuple(spent)


@functools.cache
def call_price() -> HookCost:
    """Return the price on this machine with this torch; measured at the first call, in some 5 ms."""
    with torch.enable_grad():
        bench = _Bench()
        forward, backward, optimizer = _differences(bench, bench.hook, is_cold=True)
        _, _, passed = _differences(bench, bench.hook_end, is_cold=False)
    return HookCost(forward, backward, optimizer, min(passed, optimizer))


def _differences(bench: _Bench, hook: Callable[[], list[Any]], *, is_cold: bool) -> list[int]:
    """Return what `hook` adds to each part of a step."""
    pairs: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    # A step on warm caches is one that follows a step of the same kind.
    steps = 1 if is_cold else 3
    for _ in range(WARM_ROUNDS + ROUNDS):
        plain = [bench.step(is_cold=is_cold) for _ in range(steps)]
        handles = hook()
        hooked = [bench.step(is_cold=is_cold) for _ in range(steps)]
        pairs.append((plain[-1], hooked[-1]))
        for handle in handles:
            handle.remove()
    kept = pairs[WARM_ROUNDS:]
    prices = [int(median(hooked[part] - plain[part] for plain, hooked in kept)) for part in range(3)]
    return [max(0, min(price, PRICE_NS_MAX)) for price in prices]


def _drop(callback: Callable[[], None]) -> None:
    """Stand in for the engine's queue in a torch without one, where backward has no hooks of ours either."""
