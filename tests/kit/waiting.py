"""How do tests wait for others?  Until it is so; the limit is there to fail, not to measure."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["until"]

LOOK_SECONDS = 0.005


def until(
    claim: Callable[[], object],
    what: str = "it never happened",
    seconds: float = 60.0,
    look_seconds: float = LOOK_SECONDS,
) -> None:
    """Wait until `claim()` holds; fails with `what` after `seconds`.  Where looking is dear, look less often."""
    limit = time.monotonic() + seconds
    while not claim():
        assert time.monotonic() < limit, what
        time.sleep(look_seconds)
