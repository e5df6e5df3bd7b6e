"""What does torch take to call a hook that does nothing?  More than many a hook takes, and no hook sees it from inside.

A forward with hooks goes another way through `Module.__call__`, a gradient that is waited for is wrapped for python, a
callback of autograd is carried through its engine.  The hook's own clocks start after that and stop before torch has
the result, so that what it said of itself was a tenth or more too little.  So once per process, when it attaches, a
model of one number takes steps with and without empty hooks, in turns.  Between them the processor's caches are
overwritten, as a job does: in a loop the same calls cost a third.

The price is added to what is charged per step; it is no time of the ledger.

Left out: who charges it (`books`).
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

from pacecar.torch_internals import find

from ..hook.module_calls import observe_calls

__all__ = ["HookCost", "call_price"]

ROUNDS = 5
"""Their median is steady to a fifth; together they take some 5 ms."""

EVICTED_BYTES = 1 << 20
"""Written between two steps: more than the caches that one core has for itself."""

WARM_ROUNDS = 1
"""The first steps of any kind cost more than the others."""

PRICE_NS_MAX = 100_000
"""Each; what is above was another program, not torch."""


@dataclass(frozen=True, slots=True)
class HookCost:
    """Nanoseconds of torch around our hooks, which they do not see themselves."""

    forward_ns: int = 0
    backward_ns: int = 0
    optimizer_ns: int = 0
    passed_ns: int = 0
    """That of a step that is only counted: one empty hook, on warm caches, as short steps have."""

    def measured_ns(self, micro_batches: int) -> int:
        """Return that of a step with so many forwards and backwards."""
        return self.optimizer_ns + micro_batches * (self.forward_ns + self.backward_ns)


class _Tiny(nn.Module):
    """One parameter, made without a random number: the job's generators must not notice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Still(torch.optim.Optimizer):
    """Moves nothing.

    A class of its own: torch lets the first optimizer of a class put the calls of hooks around that class's `step`.  An
    SGD made here would do that to SGD, and a user's subclass that calls `super().step()` would run all hooks twice.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401  there is no loss
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
        return [self._optimizer.register_step_post_hook(lambda *_: None)]

    def hook(self) -> list[Any]:
        now, queue = time.perf_counter_ns, self._queue

        def nothing(*_: object) -> None:
            pass

        # What the hooks do is seen from inside, and is not what is looked for.
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
        ]

    def _forward(self) -> None:
        self._loss = self._model(self._x)

    def _backward(self) -> None:
        self._loss.backward()  # type: ignore[no-untyped-call]

    def step(self, *, is_cold: bool) -> tuple[int, ...]:
        """Return what forward, backward and the optimizer take, less what the hooks saw."""
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
    # A step on warm caches is one that comes right after its like.
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
