"""Registers hooks around the steps of one optimizer, or of all, that never end up in an optimizer's pickle or copy.

Torch leaves an optimizer's hooks out of its pickle and copies (`Optimizer.__getstate__`), but a subclass may override
that.  For a subclass with its own pickling or copying, torch's hooks for all optimizers are used: no optimizer stores
them, and they return at once when another one steps.

Torch iterates over its table of hooks for all optimizers while calling them, so adding or removing a hook from inside
one raises in the user's `optimizer.step()`.  So each table gets a single hook of ours, which calls a tuple that may be
replaced at any time.

No hook keeps an optimizer alive: a script that makes a new one must get the old state's memory back.

Steps of such a subclass are not seen when torch.compile compiles them: dynamo traces the hook for all optimizers, so
it disappears unless a hook asks for compiled steps too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..timing.torch_compile import break_graph, constant, is_tracing, keep_out, may_break_while_tracing

__all__ = ["AnyStepHandle", "after_any_step", "after_step", "before_any_step", "before_step", "weakly"]

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

_OF_PICKLE = ("__getstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__")


class _AnyStep:
    """Our hooks before or after the steps of all optimizers; torch calls `entry`."""

    def __init__(self, register: Callable[[StepHook], RemovableHandle], entry: StepHook) -> None:
        self._register = register
        self._entry = entry
        self._entered: RemovableHandle | None = None
        self.hooks: tuple[StepHook, ...] = ()
        self.in_graphs: tuple[StepHook, ...] = ()
        """The hooks that are called for compiled steps too."""
        self.calls = 0
        """The number of running calls of `entry`, during which torch iterates over its table."""

    def add(self, hook: StepHook, *, in_graphs: bool = False) -> AnyStepHandle:
        self.hooks += (hook,)
        if in_graphs:
            self.in_graphs += (hook,)
        keep_out(self._entry)
        if self._entered is None:
            self._entered = self._register(self._entry)
        return AnyStepHandle(self, hook)

    def remove(self, hook: StepHook) -> None:
        self.hooks = tuple(other for other in self.hooks if other is not hook)
        self.in_graphs = tuple(other for other in self.in_graphs if other is not hook)
        if not self.hooks and not self.calls and self._entered is not None:
            self._entered.remove()
            self._entered = None


class AnyStepHandle:
    """One hook around the steps of all optimizers, until `remove`."""

    def __init__(self, table: _AnyStep, hook: StepHook) -> None:
        self._table = table
        self._hook = hook

    def remove(self) -> None:
        """Stop calling the hook.  May be repeated, and called from inside a step."""
        self._table.remove(self._hook)


# The two loops are not a shared function: calling it would be half of their cost.
def _before(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_tracing():
        if _wants_compiled_steps():
            break_graph()
        return
    _befores.calls += 1
    try:
        for hook in _befores.hooks:
            hook(optimizer, args, kwargs)
    finally:
        _befores.calls -= 1


def _after(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_tracing():
        return
    _afters.calls += 1
    try:
        for hook in _afters.hooks:
            hook(optimizer, args, kwargs)
    finally:
        _afters.calls -= 1


_befores = _AnyStep(register_optimizer_step_pre_hook, _before)
_afters = _AnyStep(register_optimizer_step_post_hook, _after)


@constant
def _wants_compiled_steps() -> bool:
    """Return whether to break the graph of a step that dynamo traces, so that its hooks run."""
    return bool(_befores.in_graphs) and may_break_while_tracing()


def before_any_step(hook: StepHook) -> AnyStepHandle:
    """Call `hook(optimizer, args, kwargs)` before each step of any optimizer, compiled or not.

    Steps compiled as a single graph (`fullgraph=True`) are not seen.
    """
    return _befores.add(hook, in_graphs=True)


def after_any_step(hook: StepHook) -> AnyStepHandle:
    """Call `hook(optimizer, args, kwargs)` after each step of any optimizer that is not compiled."""
    return _afters.add(hook)


def before_step(optimizer: Optimizer, hook: StepHook) -> RemovableHandle | AnyStepHandle:
    """Call `hook(optimizer, args, kwargs)` before each step of `optimizer`."""
    if _shows_hooks(optimizer):
        return _befores.add(_only(optimizer, hook))
    return optimizer.register_step_pre_hook(hook)


def after_step(optimizer: Optimizer, hook: StepHook) -> RemovableHandle | AnyStepHandle:
    """Call `hook(optimizer, args, kwargs)` after each step of `optimizer`."""
    if _shows_hooks(optimizer):
        return _afters.add(_only(optimizer, hook))
    return optimizer.register_step_post_hook(hook)


def weakly(optimizer: Optimizer) -> Callable[[], Optimizer | None]:
    """Return a function that returns `optimizer` while the script holds it; forever if it allows no weak reference."""
    try:
        return weakref.ref(optimizer)
    except TypeError:
        return lambda: optimizer


def _shows_hooks(optimizer: Optimizer) -> bool:
    """Return whether torch calls its hooks and its pickle or copy may contain what is registered on it."""
    kind: Any = type(optimizer)
    if not issubclass(kind, Optimizer) or kind.register_step_post_hook is not Optimizer.register_step_post_hook:
        return False
    return any(getattr(kind, name, None) is not getattr(Optimizer, name, None) for name in _OF_PICKLE)


def _only(optimizer: Optimizer, hook: StepHook) -> StepHook:
    known = weakly(optimizer)

    def of_this(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if stepping is known():
            hook(stepping, args, kwargs)

    return of_this
