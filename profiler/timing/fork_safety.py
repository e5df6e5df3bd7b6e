"""What happens in a child that the measured process forks?  It belongs to itself: it measures, sends and votes nothing.

A fork copies the hook but none of its threads, and locks as they happened to be.  So in the child the hook is closed at
once, without a word, the process's slot is free, and an exit does not go through what needs the parent's threads.

Windows add a danger that the user did not ask for.  A process that has ever profiled with torch has a thread of
kineto's (`ConfigLoader`); in a forked child its condition variable has a waiter that is gone, and the library's
destructor waits for it: a child that ends by `exit` and not by `_exit` hangs for ever, with torch.profiler alone too
(torch 2.13; pytorch/kineto pull request 998 mends another part of it).  So a child's `exit` closes C's streams and is
an `_exit` where the C library says the status to its handlers (`on_exit`, glibc).  What is not run are destructors of
static objects, which of a forked child free what the process gives back anyway.  Python's own `atexit` comes before.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

__all__ = ["in_child", "keep_exit_short"]

_is_watching = False
_libc: Any = None


def in_child(forget: Callable[[], None]) -> None:
    """Call `forget` in each child that this process forks from now on; what it raises python prints and passes over."""
    os.register_at_fork(after_in_child=forget)


def keep_exit_short() -> None:
    """See to it that forked children can end, as this process is about to profile.  Harmless when repeated."""
    global _is_watching, _libc  # once a process: a handler cannot be taken back
    if _is_watching:
        return
    _is_watching = True
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit") and hasattr(library, "fcloseall"):
        _libc = library
        os.register_at_fork(after_in_child=_end_shortly)


def _end_shortly() -> None:
    # Run in the opposite order, before all that was registered by the parent.
    for name in ("_exit", "fcloseall"):
        _libc.on_exit(ctypes.cast(getattr(_libc, name), ctypes.c_void_p), None)
