"""Allows one active hook per process: two would measure each other and compete for torch's profiler.

A forked child has no active hook: the inherited one is made inert, and another may attach.
"""

from __future__ import annotations

import threading
import traceback
from typing import Protocol

from ..timing.fork_safety import in_child

__all__ = ["AlreadyAttachedError", "AttachmentOwner", "attached", "claim", "free"]


class AlreadyAttachedError(RuntimeError):
    """Another hook is active in this process; the message says where it was started."""


class AttachmentOwner(Protocol):
    """The hook that measures this process."""

    def forked(self) -> None:
        """Turn inert: this is a forked child."""
        ...


_lock = threading.Lock()
attached: list[tuple[AttachmentOwner, str]] = []
"""The process's one active hook and where it was started; guarded by `_lock`."""


def claim(owner: AttachmentOwner) -> None:
    """Make `owner` this process's hook.

    Raises:
        AlreadyAttachedError: the process already has one.
    """
    with _lock:
        if attached:
            raise AlreadyAttachedError(f"pacecar is already attached in this process, at {attached[0][1]}")
        attached.append((owner, _caller()))


def free(owner: AttachmentOwner) -> None:
    """Let another hook attach; does nothing if `owner` is not the attached one."""
    with _lock:
        attached[:] = [entry for entry in attached if entry[0] is not owner]


def _forked() -> None:
    global _lock  # a thread that does not exist in the forked child may have held it
    _lock = threading.Lock()
    for owner, _ in attached:
        owner.forked()
    attached.clear()


in_child(_forked)


def _caller() -> str:
    """Return file:line of the first frame outside pacecar's hook and attach code."""
    for frame in reversed(traceback.extract_stack(limit=13)[:-3]):
        if not frame.filename.endswith(("profiler/hook/hook.py", "job/wiring.py", "job/attach.py")):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
