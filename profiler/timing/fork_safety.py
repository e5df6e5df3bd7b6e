"""Keeps a forked child of the measured process silent and able to exit: it does not measure, send or vote.

A fork copies the hook and the state of its locks, but none of its threads.  So in the child the hook is silently closed
at once, another hook may attach, and exit avoids everything that needs the parent's threads.

Profiled windows add another danger.  A process that has ever profiled with torch has a Kineto thread (`ConfigLoader`).
In a forked child the thread's condition variable still has its waiter, which is gone, and the library's destructor
waits for it: a child that ends with `exit` instead of `_exit` hangs forever, with torch.profiler alone too (torch 2.13;
pytorch/kineto pull request 998 fixes another part of it).  So if the C library passes the status to exit handlers
(`on_exit`, glibc), a child's `exit` closes C's streams and then calls `_exit`.  This skips the destructors of static
objects, which would only free memory that the exiting process returns anyway.  Python's `atexit` handlers run before.
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
    """Call `forget` in every child forked from now on; Python prints and ignores its exceptions."""
    os.register_at_fork(after_in_child=forget)


def keep_exit_short() -> None:
    """Ensure that forked children can exit once this process has profiled.  May be called repeatedly."""
    global _is_watching, _libc  # once per process: a handler cannot be unregistered
    if _is_watching:
        return
    _is_watching = True
    library = ctypes.CDLL(None)
    if hasattr(library, "on_exit") and hasattr(library, "fcloseall"):
        _libc = library
        os.register_at_fork(after_in_child=_end_shortly)


def _end_shortly() -> None:
    # Handlers run in reverse order of registration, so these run before all of the parent's.
    for name in ("_exit", "fcloseall"):
        _libc.on_exit(ctypes.cast(getattr(_libc, name), ctypes.c_void_p), None)
