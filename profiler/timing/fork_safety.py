"""Keeps a forked child of the measured process silent and able to exit: it measures, sends and votes nothing.

A fork copies the hook but none of its threads, and locks as they happened to be.  So in the child the hook is closed at
once and silently, the process's single-instance slot is freed, and exit avoids what needs the parent's threads.

Profiled windows add a danger that the user did not ask for.  A process that has ever profiled with torch has a thread
of kineto's (`ConfigLoader`).  In a forked child its condition variable has a waiter that is gone, and the library's
destructor waits for it: a child that ends by `exit` and not by `_exit` hangs for ever, with torch.profiler alone too
(torch 2.13; pytorch/kineto pull request 998 fixes another part of it).  So a child's `exit` closes C's streams and then
calls `_exit`, where the C library passes the status to its handlers (`on_exit`, glibc).  This skips the destructors of
static objects, which in a forked child only free what the process gives back anyway.  Python's own `atexit` handlers
run before.
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
    """Call `forget` in each child that this process forks from now on; python prints and ignores what it raises."""
    os.register_at_fork(after_in_child=forget)


def keep_exit_short() -> None:
    """Ensure that forked children can exit once this process has profiled.  Harmless when repeated."""
    global _is_watching, _libc  # once a process: a handler cannot be unregistered
    if _is_watching:
        return
    _is_watching = True
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit") and hasattr(library, "fcloseall"):
        _libc = library
        os.register_at_fork(after_in_child=_end_shortly)


def _end_shortly() -> None:
    # Handlers run in reverse order of registration, so these run before all that the parent registered.
    for name in ("_exit", "fcloseall"):
        _libc.on_exit(ctypes.cast(getattr(_libc, name), ctypes.c_void_p), None)
