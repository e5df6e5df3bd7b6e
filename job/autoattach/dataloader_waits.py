"""Times how long a loop waits for torch's DataLoader, and counts samples, without wrapping the loader.

All its iterators share one `__next__`, which is timed where it is defined: the loader, the iterator and their types
stay the script's own.  Evaluation is timed too, in the step in which it happens.  Draws by other threads and worker
processes are not this loop's waiting.  How a batch's samples are known: `profiler.hook.loading`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from pacecar.profiler.hook.hook import Hook
from pacecar.torch_internals import lacking, need

__all__ = ["forget_waits", "time_waits"]

_ITERATORS = "torch.utils.data.dataloader._BaseDataLoaderIter"

_original: Callable[[Any], Any] | None = None


def time_waits(hook: Hook) -> None:
    """Report every wait of this thread to `hook` from now on."""
    global _original
    if _original is not None or lacking("run_waits") is not None:
        return
    iterators: Any = need(_ITERATORS)
    if "__next__" not in vars(iterators):
        return
    original = _original = vars(iterators)["__next__"]
    thread, loop, is_waiting = threading.get_ident(), hook.loop, [False]
    loop.watch_loaders()

    def __next__(self: object) -> Any:  # noqa: ANN401, N807  whatever the loader makes
        if is_waiting[0] or threading.get_ident() != thread or not hook.is_alive:
            return original(self)
        loop.waits()
        begun = time.monotonic_ns()
        is_waiting[0] = True
        try:
            batch = original(self)
        except StopIteration:
            loop.exhausted(self)
            raise
        finally:
            is_waiting[0] = False
            loop.waited(begun, time.monotonic_ns())
        loop.drew(self)
        return batch

    iterators.__next__ = __next__


def forget_waits() -> None:
    """Restore torch's own `__next__`."""
    global _original
    if _original is not None:
        iterators: Any = need(_ITERATORS)
        iterators.__next__, _original = _original, None
