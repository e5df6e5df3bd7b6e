"""Finds the model that an optimizer trains and that the loop calls: by the garbage collector, then by call hooks.

An optimizer knows parameters and no module, and no list holds the modules of a process.  But the garbage collector
knows every object.  It is searched once, in the step that is the slowest anyway (0.1 s a million objects), for roots:
modules that hold a parameter of the optimizer and that no other module holds.

A root need not be what the loop calls: it may be a container, or a script may keep DDP and call what is inside.  So
probes, hooks that only record a call, stay for one iteration; if no root was called, the next iteration probes their
children.  The wrappers that a root holds (DDP, FSDP2) are probed with it, as they are what is tuned.  Nothing inside a
compiled module is probed: another hook there would make it compile again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pacecar.profiler.hook.module_calls import CallObserver, is_compiled_in_place, observe_calls
from pacecar.profiler.ranks.data_parallel import wrappers_in
from pacecar.profiler.timing.torch_compile import keep_out
from pacecar.torch_internals import find

__all__ = ["PROBES_MAX", "ModelProbes", "children_of", "compiled_functions", "inside_of", "roots_of"]

PROBES_MAX = 64
"""Most modules probed at once; a container with more children is not searched."""


def roots_of(parameters: set[int]) -> list[nn.Module]:
    """Return the modules that hold any of `parameters`, directly or not, and that no module holds."""
    # By type(), because isinstance asks an object for its class, which proxies answer by importing what they stand for.
    modules = [thing for thing in gc.get_objects() if issubclass(type(thing), nn.Module)]
    held = {id(child) for module in modules for child in _held(module, "_modules")}
    return [root for root in modules if id(root) not in held and _covers(root, parameters)]


def children_of(modules: Iterable[nn.Module], parameters: set[int]) -> list[nn.Module]:
    """Return the direct children of `modules` that hold any of `parameters`."""
    return [
        c
        for m in modules
        if not _is_compiled(m)
        for c in _held(m, "_modules")
        if c is not None and _covers(c, parameters)
    ]


def compiled_functions(model: nn.Module) -> bool:
    """Return whether torch.compile was used in this process, but on no module that `model` is or holds.

    Then it was used on functions, perhaps on the one that calls the model.  A hook on a module that was compiled as
    part of a function makes it compile again, which may take minutes.
    """
    frames = (find("torch._dynamo.utils.counters") or {}).get("frames", {})
    return bool(frames.get("total")) and not any(_is_compiled(module) for module in model.modules())


def _held(module: nn.Module, table: str) -> Sequence[Any]:
    # A module under construction, or one whose class is lazy about it, may have no table yet.
    return tuple((vars(module).get(table) or {}).values())


def _covers(module: nn.Module, parameters: set[int]) -> int:
    """Return how many of `parameters` are in `module`."""
    seen: set[int] = set()
    found: set[int] = set()
    waiting = [module]
    while waiting:
        present = waiting.pop()
        if id(present) in seen:
            continue
        seen.add(id(present))
        found.update(id(p) for p in _held(present, "_parameters") if id(p) in parameters)
        waiting += [child for child in _held(present, "_modules") if child is not None]
    return len(found)


def _is_compiled(module: nn.Module) -> bool:
    return (
        hasattr(type(module), "_torchdynamo_orig_callable")
        or "_orig_mod" in (vars(module).get("_modules") or {})
        or is_compiled_in_place(module)
    )


def inside_of(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that `module` holds, including those hidden behind a list or another object."""
    yield from module.modules()
    for wrapper in wrappers_in(module):
        yield from wrapper.modules()


class ModelProbes:
    """Records which of `modules` are called to train, until `remove`; used once."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._called: dict[int, nn.Module] = {}
        self._observers: list[CallObserver] = []

    def install(self) -> None:
        """Start to record; a module that was compiled in place is not probed."""
        keep_out(ModelProbes._note)
        if len(self._modules) > PROBES_MAX:
            return
        held = {id(wrapper): wrapper for module in self._modules for wrapper in wrappers_in(module)}
        if len(held) > PROBES_MAX:
            held = {}
        for module in (held | {id(module): module for module in self._modules}).values():
            observer = None if is_compiled_in_place(module) else observe_calls(module, self._note)
            if observer is not None:
                self._observers.append(observer)

    def remove(self) -> None:
        """Stop recording."""
        for observer in self._observers:
            observer.remove()
        self._observers = []

    def called(self, parameters: set[int]) -> list[nn.Module]:
        """Return the outermost modules that were called, those with most of `parameters` first."""
        inner = {id(m) for outer in self._called.values() for m in inside_of(outer) if m is not outer}
        outermost = [module for key, module in self._called.items() if key not in inner]
        return sorted(outermost, key=lambda module: -_covers(module, parameters))

    def saw(self, module: nn.Module) -> bool:
        """Return whether `module` was called to train."""
        return id(module) in self._called

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if module.training and torch.is_grad_enabled():
            self._called.setdefault(id(module), module)
