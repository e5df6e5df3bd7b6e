"""Make a garbage collection take a given time."""

from __future__ import annotations

import gc
import time

__all__ = ["collect_for"]


def collect_for(seconds: float) -> None:
    """Let a garbage collection take `seconds`: after pacecar has seen it begin."""

    def hold(phase: str, _: object) -> None:
        if phase == "start":
            time.sleep(seconds)

    gc.callbacks.append(hold)
    gc.collect()
    gc.callbacks.remove(hold)
