"""Keeps torch's profiler from recording what this thread calls, with a count of nested pauses.

torch's switch is per thread and does not count: the first part of pacecar to switch recording back on would do so for
all of them.
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
    """Hide this thread's calls from profilers and other observers of torch's operators from now on.

    Has no effect on a torch without the switch, which has no exact windows either.
    """
    switch = _switch()
    _pauses.depth += 1
    if switch is not None and _pauses.depth == 1:
        switch(False)


def resume() -> None:
    """Undo the last `pause` of this thread."""
    switch = _switch()
    _pauses.depth -= 1
    if switch is not None and _pauses.depth == 0:
        switch(True)


def _switch() -> Callable[[bool], None] | None:
    switch: Callable[[bool], None] | None = find("torch._C._autograd._enable_record_function")
    return switch
