"""Keeps torch from recording what this thread calls, while several parts of pacecar may want that at once.

The switch is the thread's own and has no count: the first to switch it on again would do so for all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from pacecar.torch_internals import find

__all__ = ["pause", "resume"]


class _Pauses(threading.local):
    depth = 0


_pauses = _Pauses()


def pause() -> None:
    """Let no profiler or other observer of torch's operators see what this thread calls from now on.

    Without effect on a torch that has not the switch: there are no exact windows there, either.
    """
    switch = _switch()
    _pauses.depth += 1
    if switch is not None and _pauses.depth == 1:
        switch(False)


def resume() -> None:
    """Take the last `pause` of this thread back."""
    switch = _switch()
    _pauses.depth -= 1
    if switch is not None and _pauses.depth == 0:
        switch(True)


def _switch() -> Callable[[bool], None] | None:
    switch: Callable[[bool], None] | None = find("torch._C._autograd._enable_record_function")
    return switch
