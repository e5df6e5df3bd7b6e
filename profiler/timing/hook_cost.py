"""Measures the time torch takes to call empty hooks, which the hooks' own clocks do not see.

Calling a hook often costs more than the hook itself.  A forward with hooks takes another path through
`Module.__call__`, a gradient hook wraps the gradient for Python, and an autograd callback goes through the engine.  The
hook's own clocks start after that and stop before torch has the result, so overhead measured by them alone is at least
a tenth too low.  So once per process, at attach, a model of one number takes alternate steps with and without empty
hooks.  In between, the processor's caches are overwritten, as a job would do: in a tight loop the same calls cost a
third.

`step_records` adds this price to the overhead of each step; it is not part of the ledger.
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
"""Measured rounds: their median is stable to a fifth, and together they take about 5 ms."""

EVICTED_BYTES = 1 << 20
"""Bytes overwritten between two steps: more than the private caches of one core."""

WARM_ROUNDS = 1
"""Rounds that are dropped: the first steps of any kind cost more than later ones."""

PRICE_NS_MAX = 100_000
"""The largest plausible price; anything above it was another program, not torch."""


@dataclass(frozen=True, slots=True)
class HookCost:
    """Nanoseconds that torch spends around our hooks, unseen by the hooks themselves."""

    forward_ns: int = 0
    backward_ns: int = 0
    optimizer_ns: int = 0
    passed_ns: int = 0
    """The price of a counted step: one empty hook, with the warm caches that short steps have."""

    def measured_ns(self, micro_batches: int) -> int:
        """Return the price of a step with `micro_batches` forwards and backwards."""
        return self.optimizer_ns + micro_batches * (self.forward_ns + self.backward_ns)


class _Tiny(nn.Module):
    """One parameter, initialized without drawing from the job's random generators."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class _Still(torch.optim.Optimizer):
    """An optimizer that changes nothing.

    It needs its own class because torch wraps a class's `step` with hook calls when the first instance is made.  An SGD
    made here would wrap SGD, and a user's subclass that calls `super().step()` would run all hooks twice.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ANN401  there is no loss
        """Do nothing."""


def _look(*_: object) -> None:
    """Cost as much as the hook before every optimizer's step (`step_hooks`), which calls another."""
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

        # The hooks measure their own work, which is subtracted to leave the time around them.
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
        """Return the times of forward, backward and optimizer, less what the hooks measured themselves."""
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
    """Return the price on this machine with this torch; the first call measures it in about 5 ms."""
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
    """Replace the engine's queue in a torch without one, where backward has no hooks of ours either."""
