"""Who measures this process?  One hook at a time: two would measure each other and fight over torch's profiler.

A forked child has no hook: the parent's is told there that it was forked, and the slot is free.
"""

from __future__ import annotations

import threading
import traceback
from typing import Protocol

from ..timing.fork_safety import in_child

__all__ = ["AlreadyAttachedError", "AttachmentOwner", "attached", "free", "take"]


class AlreadyAttachedError(RuntimeError):
    """Another hook is active in this process; the message says where it was started."""


class AttachmentOwner(Protocol):
    """Whoever measures."""

    def forked(self) -> None:
        """Be inert: this is a forked child."""
        ...


_lock = threading.Lock()
attached: list[tuple[AttachmentOwner, str]] = []
"""The process's one active hook and where it was started; guarded by `_lock`."""


def take(owner: AttachmentOwner) -> None:
    """Make `owner` this process's hook.

    Raises:
        AlreadyAttachedError: there is one.
    """
    with _lock:
        if attached:
            raise AlreadyAttachedError(f"pacecar is already attached in this process, at {attached[0][1]}")
        attached.append((owner, _caller()))


def free(owner: AttachmentOwner) -> None:
    """Let another hook attach; harmless when `owner` is not the one."""
    with _lock:
        attached[:] = [entry for entry in attached if entry[0] is not owner]


def _forked() -> None:
    global _lock  # another thread may have held it, and there are no others here
    _lock = threading.Lock()
    for owner, _ in attached:
        owner.forked()
    attached.clear()


in_child(_forked)


def _caller() -> str:
    """Return file:line of the first frame outside pacecar's own hook and facade."""
    for frame in reversed(traceback.extract_stack(limit=13)[:-3]):
        if not frame.filename.endswith(("profiler/hook/hook.py", "job/wiring.py", "job/attach.py")):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
