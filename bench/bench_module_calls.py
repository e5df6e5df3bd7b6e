"""Compares ways to observe the calls of one module: its hooks, torch's global hooks, and `observe_calls`.

    .venv/bin/python bench/bench_module_calls.py

Prints the shortest of many runs, in ns per call.  The callbacks do nothing.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from pacecar.profiler.hook.module_calls import observe_calls

SUBMODULES = 100

REPEATS = 2000
"""Many short runs, so that some are not interrupted on a busy machine."""


class Same(nn.Module):
    """Returns its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Deep(nn.Module):
    """Calls many submodules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Same() for _ in range(SUBMODULES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def nothing(*_: Any) -> None:
    """Stand in for a hook."""


def show(what: str, call: Callable[[], object], number: int) -> None:
    shortest = min(timeit.repeat(call, number=number, repeat=REPEATS)) / number * 1e9
    sys.stdout.write(f"{what:<52}{shortest:10.0f} ns\n")


def measure(module: nn.Module, number: int) -> None:
    """Print a call of `module` with nothing, with each kind of hook, and after all are gone."""
    x = torch.ones(1)
    name = type(module).__name__
    show(f"{name}: nothing", lambda: module(x), number)
    handles = [
        module.register_forward_pre_hook(nothing, with_kwargs=True),
        module.register_forward_hook(nothing),
    ]
    show(f"{name}: hooks on it", lambda: module(x), number)
    for handle in handles:
        handle.remove()
    handles = [register_module_forward_pre_hook(nothing), register_module_forward_hook(nothing)]
    show(f"{name}: torch's global hooks", lambda: module(x), number)
    for handle in handles:
        handle.remove()
    observer = observe_calls(module, nothing, nothing)
    assert observer is not None
    show(f"{name}: observed", lambda: module(x), number)
    other = type(module)()
    show(f"{name}: another of its class", lambda: other(x), number)
    observer.remove()
    show(f"{name}: after", lambda: module(x), number)


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure(Same(), 50)
    measure(Deep(), 2)
