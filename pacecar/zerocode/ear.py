"""When has an optimizer made a step?  Torch's public hook for all optimizers tells; it stays for the whole run.

Until the first step this is all that there is of pacecar in a process.  The rest is imported in that step, which is the
job's slowest anyway.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from pacecar.profiler.compiling import is_tracing, keep_out

__all__ = ["listen"]

_heard: Callable[[Optimizer], None] | None = None
_helper_of: str | None = None
_pid = 0


def listen(helper_of: str | None) -> None:
    """Wake pacecar at the first step; `helper_of` names the rank's own process, where this is not it."""
    global _helper_of, _pid
    _helper_of, _pid = helper_of, os.getpid()
    keep_out(_stepped)
    register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    if is_tracing():
        return
    global _heard
    if _heard is None:
        _heard = _deaf  # whatever goes wrong now, it is tried once
        try:
            from pacecar.zerocode.watch import Watch

            _heard = Watch(_helper_of, is_fork=os.getpid() != _pid).heard
        except Exception as error:  # noqa: BLE001  the job comes first
            from pacecar.zerocode.saying import say

            say(f"does not attach: {type(error).__name__}: {error}")
            return
    _heard(optimizer)


def _deaf(optimizer: Optimizer) -> None:
    """Hear nothing."""
