"""Registers hooks around the steps of one optimizer, so that neither its pickle nor its copies contain them.

Torch leaves the hooks of an optimizer out of its pickle and its copies (`Optimizer.__getstate__`).  A subclass may
pickle all that it has.  For one that pickles or copies itself in its own way torch's hooks for all optimizers are used,
which are stored on none; they return at once where another optimizer steps.

Left out: the steps of such an optimizer that torch.compile compiles.  Dynamo traces that hook, too, but for every
optimizer, so it must leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from ..timing.torch_compile import is_tracing, keep_out

__all__ = ["after_step", "before_step"]

StepHook = Callable[[Optimizer, tuple[Any, ...], dict[str, Any]], None]

_OF_PICKLE = ("__getstate__", "__reduce__", "__reduce_ex__", "__copy__", "__deepcopy__")


def before_step(optimizer: Optimizer, hook: StepHook) -> RemovableHandle:
    """Call `hook(optimizer, args, kwargs)` before each step of `optimizer`."""
    if _shows_hooks(optimizer):
        return register_optimizer_step_pre_hook(_only(optimizer, hook))
    return optimizer.register_step_pre_hook(hook)


def after_step(optimizer: Optimizer, hook: StepHook) -> RemovableHandle:
    """Call `hook(optimizer, args, kwargs)` after each step of `optimizer`."""
    if _shows_hooks(optimizer):
        return register_optimizer_step_post_hook(_only(optimizer, hook))
    return optimizer.register_step_post_hook(hook)


def _shows_hooks(optimizer: Optimizer) -> bool:
    """Return whether its pickle or copy may contain what is registered on it, and torch itself calls its hooks."""
    kind: Any = type(optimizer)
    if not issubclass(kind, Optimizer) or kind.register_step_post_hook is not Optimizer.register_step_post_hook:
        return False
    return any(getattr(kind, name, None) is not getattr(Optimizer, name, None) for name in _OF_PICKLE)


def _only(optimizer: Optimizer, hook: StepHook) -> StepHook:
    def of_this(stepping: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not is_tracing() and stepping is optimizer:
            hook(stepping, args, kwargs)

    keep_out(of_this)
    return of_this
