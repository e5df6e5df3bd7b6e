"""How long a job runs that waits for the tuner's verdicts, and the counted clock that it is judged by.

On a disturbed machine proof takes longer.  A job with a counted clock declares what everything costs, so it is the same
on every machine: pacecar gets this clock instead of the system's.

A job runs `steps` steps, and goes on until rank 0 has received a verdict of each kind in `until` and RESTED more steps
were made, but at most STEPS_MAX.  One with `as_long` runs as many steps as the longest before it in this process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pacecar.clock import SystemClock
from pacecar.job import tuner_wiring, wiring
from pacecar.records import Verdict
from tests.kit.fake_clock import FakeClock

__all__ = ["RunOn", "counted_clock"]

RESTED, STEPS_MAX, ASK_STEPS = 60, 900, 10


def counted_clock(*, is_counted: bool = True) -> FakeClock | None:
    """Make what is attached from now on use the returned clock, which stands still unless it is advanced."""
    clock = FakeClock() if is_counted else None
    for module in (wiring, tuner_wiring):
        module.SystemClock = SystemClock if clock is None else lambda: clock  # type: ignore[attr-defined, assignment]
    return clock


class RunOn:
    """The lengths of this process's jobs; all ranks make one, and ask it after every step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def is_over(self, options: dict[str, Any], steps: int, records: list[Any]) -> bool:
        """Return whether all ranks have seen enough; a collective every ASK_STEPS while something is awaited."""
        is_over = self._is_over(options, steps, records)
        if is_over:
            self.lengths.append(steps)
        return is_over

    def _is_over(self, options: dict[str, Any], steps: int, records: list[Any]) -> bool:
        if options.get("as_long"):
            return steps == max(self.lengths)
        if steps < options["steps"]:
            return False
        if not options.get("until") or steps >= STEPS_MAX:
            return True
        if steps % ASK_STEPS:
            return False
        heard = {r.outcome for r in records if isinstance(r, Verdict) and r.step <= steps - RESTED}
        is_enough = torch.tensor([float(heard >= set(options["until"]))])
        dist.all_reduce(is_enough, dist.ReduceOp.MAX)
        return bool(is_enough)
