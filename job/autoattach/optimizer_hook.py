"""Reports each optimizer's steps to the loop watcher, through torch's public hook for all optimizers.

The hook stays for the whole run.  Until the first step it is all of pacecar in the process.  The rest is imported in
that step, which is the job's slowest anyway.  The import may fail (a library is missing, pacecar was upgraded
meanwhile), so the code that guards it imports nothing itself.

A process that ends without a step although it is a rank, or computed gradients, prints one line about it: its weights
are updated by hand, inside torch.compile, or somewhere else.  So does one that ends before it was clear what it trains.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.optim import Optimizer

from pacecar.profiler.hook.step_hooks import after_any_step
from pacecar.torch_internals import find

if TYPE_CHECKING:
    from .loop_watcher import LoopWatcher

__all__ = ["register"]

_record_step: Callable[[Optimizer], None] | None = None
_watcher: LoopWatcher | None = None
_helper_of: str | None = None
_pid = 0


def register(helper_of: str | None) -> None:
    """Register the hook, which loads pacecar at the first step; `helper_of` is the rank's process if it is another."""
    global _helper_of, _pid
    _helper_of, _pid = helper_of, os.getpid()
    after_any_step(_stepped)
    atexit.register(_ended)


def _stepped(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    global _record_step, _watcher
    try:
        if _record_step is None:
            _record_step = _ignore  # whatever goes wrong now, it is tried once
            from .loop_watcher import LoopWatcher

            _watcher = LoopWatcher(_helper_of, is_fork=os.getpid() != _pid)
            _record_step = _watcher.record_step
        _record_step(optimizer)
    except Exception as error:  # noqa: BLE001  the job comes first
        _record_step = _ignore
        _print(f"does not attach: {type(error).__name__}: {' '.join(str(error).split())}")


def _ended() -> None:
    """Print that nothing was measured, if a user may have expected it."""
    try:
        if (
            _record_step is None
            and _helper_of is None
            and os.getpid() == _pid
            and ("RANK" in os.environ or _has_gradients())
        ):
            _print("measured nothing: no optimizer of torch made a step in this process, where pacecar would see it")
        if _watcher is not None and (reason := _watcher.unfinished) is not None:
            _print(f"measured nothing: {reason}")
    except Exception:  # noqa: BLE001  the end of the script is its own
        return


def _has_gradients() -> bool:
    """Return whether this thread recorded operators for a backward; False if this torch does not tell."""
    sequence: Callable[[], int] | None = find("torch._C._autograd._get_sequence_nr")
    return sequence is not None and sequence() > 0


def _print(what: str) -> None:
    """Print one line on stderr, on rank 0.

    Uses only what this process has loaded: whatever would have to be imported may be what is missing.
    """
    try:
        rank = str(dist.get_rank()) if dist.is_available() and dist.is_initialized() else os.environ.get("RANK", "0")
        if rank == "0":
            os.write(2, f"pacecar: {what}\n".encode(errors="replace"))
    except Exception:  # noqa: BLE001  a message is not worth a job
        return


def _ignore(optimizer: Optimizer) -> None:
    """Ignore the step."""
