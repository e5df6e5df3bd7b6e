"""Who measures this process?  One hook at a time: two would measure each other and fight over torch's profiler."""

from __future__ import annotations

import threading
import traceback

__all__ = ["AlreadyAttachedError", "attached", "free", "take"]


class AlreadyAttachedError(RuntimeError):
    """Another hook is active in this process; the message says where it was started."""


_lock = threading.Lock()
attached: list[tuple[object, str]] = []
"""The process's one active hook and where it was started; guarded by `_lock`."""


def take(owner: object) -> None:
    """Make `owner` this process's hook.

    Raises:
        AlreadyAttachedError: there is one.
    """
    with _lock:
        if attached:
            raise AlreadyAttachedError(f"pacecar is already attached in this process, at {attached[0][1]}")
        attached.append((owner, _caller()))


def free(owner: object) -> None:
    """Let another hook attach; harmless when `owner` is not the one."""
    with _lock:
        attached[:] = [entry for entry in attached if entry[0] is not owner]


def _caller() -> str:
    """Return file:line of the first frame outside pacecar's own hook and facade."""
    for frame in reversed(traceback.extract_stack(limit=13)[:-3]):
        if not frame.filename.endswith(("profiler/hook.py", "pacecar/pacer.py")):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
