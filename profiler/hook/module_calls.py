"""Observes the calls of one module through a descriptor in its class, without registering hooks on the module.

A module stores its hooks in its `__dict__`, so `torch.save(model)` would write them into the file, `copy.deepcopy`
would copy them, and `torch.jit.script` would compile them.  Torch's global hooks run for every submodule (1 us each)
and make `torch.compile` warn.  A subclass of our own for the module, or a `__call__` in its class, is visible to
`type(model)`, `torch.export` and dynamo.

    model(x)  ->  Module.__call__  ->  model._compiled_call_impl, where it is not None  ->  model._call_impl
                                       ^ looked up in the class: a descriptor that knows the observed modules

To support `Module.compile`, torch first reads each module's `_compiled_call_impl`, whose default is a class attribute.
Pickle, deepcopy, TorchScript, fx, export and dynamo do not read it.  So the class of an observed module gets a
descriptor under that name, which returns None for all other modules and is removed with the last observed one.

While torch captures what a module computes (dynamo, export, fx, `torch.jit.trace`) no observer is called.

Like hooks, observers miss direct calls of `module.forward` and classes whose `__call__` does not call torch's.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

import torch
from torch import nn

from pacecar.torch_internals import FEATURES, lacking

from ..timing.torch_compile import is_captured, is_tracing, keep_out, skip_frame

__all__ = ["Around", "CallObserver", "guess_samples", "hold_class", "is_compiled_in_place", "observe_calls"]

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], object], None]
Around = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

_log = logging.getLogger(__name__)

DEPTH_MAX = 4
"""A call's inputs and a loader's batches are tuples or dicts of tensors; the step path searches no deeper nesting."""

_NAME = "_compiled_call_impl"
_ABSENT = object()


def is_compiled_in_place(module: nn.Module) -> bool:
    """Return whether the user called `module.compile()`."""
    return vars(module).get(_NAME) is not None


class CallObserver:
    """One observer of one module, until `remove`; exceptions of its functions reach the caller of the module."""

    __slots__ = ("_calls", "after", "before")

    def __init__(self, calls: _Calls, before: Before | None, after: After | None) -> None:
        self._calls: _Calls | None = calls
        self.before = before
        self.after = after

    def remove(self) -> None:
        """Stop observing.  May be repeated, and called from inside a call of the module."""
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.forget(self)

    def set_around(self, around: Around | None) -> None:
        """Wrap each call in `around(call, args, kwargs)`, which returns the module's output; None: call directly."""
        if self._calls is not None:
            self._calls.around = around


def observe_calls(
    module: nn.Module, before: Before | None = None, after: After | None = None, *, is_first: bool = False
) -> CallObserver | None:
    """Call `before(module, args, kwargs)` and, unless it raises, `after(module, args, output)` at calls of `module`.

    Both see the caller's view: `before` runs before all hooks, `after` after them.  With `is_first`, this observer runs
    before the existing ones.  Return None if this version of torch cannot be observed, which is logged once.
    """
    if lacking("module_calls", {"module": module}) is not None or not _is_asked_for():
        return None
    return _observe(module, before, after, is_first=is_first)


def _observe(module: nn.Module, before: Before | None, after: After | None, *, is_first: bool = False) -> CallObserver:
    calls = _observed.get(id(module))
    if calls is None:
        calls = _observed[id(module)] = _Calls(module)
        _put_into(calls.kind)
    observer = CallObserver(calls, before, after)
    calls.observers.insert(0 if is_first else len(calls.observers), observer)
    calls.arrange()
    return observer


def hold_class(module: nn.Module) -> Callable[[], None] | None:
    """Keep the descriptor in the class of `module` until the returned function is called; None: nothing to keep.

    For a caller that removes its observer temporarily: if the user has hooks on the module, dynamo guards its class and
    would recompile each time.
    """
    kind = type(module)
    if "torch._dynamo" not in sys.modules or not isinstance(vars(kind).get(_NAME), _CallImpl):
        return None
    _put_into(kind)
    return functools.partial(_take_from, kind)


@functools.cache
def _is_asked_for() -> bool:
    """Return whether this torch reads the call from the class and calls it; tried on a module of our own."""
    seen: list[object] = []
    try:
        tried = _Tried()
        observer = _observe(tried, None, lambda module, args, output: seen.append(output))
        tried(1)
        observer.remove()
        tried(2)
    except Exception:  # noqa: BLE001  private API: whatever it raises, modules are not observed
        seen.clear()
    if seen != [1]:
        _log.warning("pacecar: torch %s calls modules in another way: %s", torch.__version__, FEATURES["module_calls"])
    return seen == [1]


class _Tried(nn.Module):
    def forward(self, x: object) -> object:
        return x


class _Calls:
    """Makes the calls of one observed module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.kind = type(module)
        self.observers: list[CallObserver] = []
        self.around: Around | None = None
        self._befores: tuple[Before, ...] = ()
        self._afters: tuple[After, ...] = ()
        self.entry = self.call  # bound once, not on every call

    def arrange(self) -> None:
        self._befores = tuple(observer.before for observer in self.observers if observer.before is not None)
        self._afters = tuple(observer.after for observer in self.observers if observer.after is not None)

    def forget(self, observer: CallObserver) -> None:
        self.observers.remove(observer)
        self.arrange()
        if not self.observers:
            self.around = None
            if _observed.get(id(self.module)) is self:
                del _observed[id(self.module)]
                _take_from(self.kind)

    def call(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401  whatever the module's forward is
        module = self.module
        call = module.__dict__.get(_NAME) or module._call_impl
        if is_captured(args, kwargs):
            return call(*args, **kwargs)
        for before in self._befores:
            before(module, args, kwargs)
        try:
            output = call(*args, **kwargs) if self.around is None else self.around(call, args, kwargs)
        except BaseException as error:  # the traceback of the user's exception shows no frame of ours
            error.__traceback__ = _theirs(error.__traceback__)
            raise
        for after in self._afters:
            after(module, args, output)
        return output


def _theirs(trace: TracebackType | None) -> TracebackType | None:
    """Return `trace` from the first frame that is not ours."""
    while trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith("pacecar."):
        trace = trace.tb_next
    return trace


class _CallImpl:
    """The descriptor installed as `_compiled_call_impl` in an observed module's class.

    A copy of the class made by a pickler (cloudpickle, of a class in `__main__`) gets torch's default.
    """

    def __init__(self, replaced: object) -> None:
        self.replaced = replaced
        self.modules = 0

    def __get__(self, module: nn.Module | None, kind: type | None = None) -> Callable[..., Any] | None:
        if module is None:
            return None
        if not is_tracing():
            calls = _observed.get(id(module))
            if calls is not None and calls.module is module:
                return calls.entry
        return module.__dict__.get(_NAME)

    def __set__(self, module: nn.Module, value: Callable[..., Any] | None) -> None:
        module.__dict__[_NAME] = value

    def __delete__(self, module: nn.Module) -> None:
        if _NAME not in module.__dict__:
            raise AttributeError(_NAME)
        del module.__dict__[_NAME]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


_observed: dict[int, _Calls] = {}
"""By the module's id; each value holds its module, so the id is not reused."""


def _put_into(kind: type[nn.Module]) -> None:
    there = vars(kind).get(_NAME, _ABSENT)
    if not isinstance(there, _CallImpl):
        there = _CallImpl(there)
        type.__setattr__(kind, _NAME, there)
        skip_frame(_Calls.call)
        keep_out(_CallImpl.__get__)
    there.modules += 1


def _take_from(kind: type[nn.Module]) -> None:
    there = vars(kind).get(_NAME)
    if not isinstance(there, _CallImpl):
        return  # replaced by another one since
    there.modules -= 1
    if there.modules:
        return
    if there.replaced is _ABSENT:
        type.__delattr__(kind, _NAME)
    else:
        type.__setattr__(kind, _NAME, there.replaced)


def first_tensor(batch: object, depth: int = DEPTH_MAX) -> torch.Tensor | None:
    """Return the first tensor that has a dimension in nested tuples, lists and mappings; None if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    if depth == 0 or isinstance(batch, str | bytes):
        return None
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    for part in parts:
        found = first_tensor(part, depth - 1)
        if found is not None:
            return found
    return None


def guess_samples(batch: object) -> int | None:
    """Return the first dimension of the batch's first tensor; None if there is none."""
    tensor = first_tensor(batch)
    return int(tensor.shape[0]) if tensor is not None else None
