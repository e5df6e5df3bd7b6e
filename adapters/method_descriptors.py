"""Replaces a method of one object by a descriptor in its class, without putting anything on the object.

A method that is set on a trainer is in its `__dict__`, so a copy or a pickle of the trainer contains it, and with it
all of pacecar.  A descriptor in the trainer's class returns the new method for this one object, and for all others what
they had.  What the script sets on the object itself comes first, as usual in python.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

__all__ = ["MethodReplacement", "replace_method"]

_ABSENT = object()


class MethodReplacement:
    """A descriptor in the class of `owner` under `name` that returns `method` for `owner`, until `remove`."""

    def __init__(self, owner: object, name: str, method: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._method = method
        self._kind = type(owner)
        self._replaced = vars(self._kind).get(name, _ABSENT)
        self._is_over = False

    def install(self) -> None:
        """Replace it."""
        type.__setattr__(self._kind, self._name, self)

    def remove(self) -> None:
        """Restore the class's own; if it was replaced again meanwhile, ours stays and passes calls on."""
        self._is_over = True
        if vars(self._kind).get(self._name) is not self:
            return
        beneath = self._replaced
        while isinstance(beneath, MethodReplacement) and beneath._is_over:
            beneath = beneath._replaced
        if beneath is _ABSENT:
            type.__delattr__(self._kind, self._name)
        else:
            type.__setattr__(self._kind, self._name, beneath)

    def __get__(self, thing: object, kind: type | None = None) -> Any:  # noqa: ANN401  a method, or the class's function
        if thing is self._owner and not self._is_over:
            return self._method
        if self._replaced is _ABSENT:
            beyond: Any = super(self._kind, kind if thing is None else thing)
            return getattr(beyond, self._name)
        return self._replaced.__get__(thing, kind) if hasattr(self._replaced, "__get__") else self._replaced

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as what was replaced: a pickler may write a class of the script's by its parts (cloudpickle)."""
        if self._replaced is _ABSENT:
            return getattr, (next(k for k in self._kind.__mro__[1:] if self._name in vars(k)), self._name)
        return copy.copy, (self._replaced,)


def replace_method(owner: object, name: str, method: Callable[..., Any]) -> MethodReplacement | None:
    """Make `owner.name` be `method`; return None if the script has set one on the object, which stays."""
    if name in getattr(owner, "__dict__", {}):
        return None
    replacement = MethodReplacement(owner, name, method)
    replacement.install()
    return replacement
