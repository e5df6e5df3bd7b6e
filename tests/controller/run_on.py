"""How long a job runs that waits for what the tuner says, and whose clock it is judged by.

On a disturbed machine proof takes its time.  A job with a counted clock says itself what each thing that it does costs,
so it is the same on every machine: pacecar is given this clock in place of the system's.

A job runs `steps` steps, and on until rank 0 has heard a verdict of each kind in `until` and RESTED more were made, but
no more than STEPS_MAX.  One with `as_long` runs as many as the longest before it in this process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from pacecar.clock import FakeClock, SystemClock
from pacecar.job import tuner_wiring, wiring
from pacecar.records import Verdict

__all__ = ["Ear", "RunOn", "counted_clock"]

RESTED, STEPS_MAX, ASK_STEPS = 60, 900, 10


def counted_clock(*, is_counted: bool = True) -> FakeClock | None:
    """Let what is attached from now on tell the time by the returned clock, which stands still unless it is moved."""
    clock = FakeClock() if is_counted else None
    for module in (wiring, tuner_wiring):
        module.SystemClock = SystemClock if clock is None else lambda: clock  # type: ignore[attr-defined, assignment]
    return clock


class Ear:
    """What the tuner says: every sink gets all of it, so one is listened to."""

    def __init__(self, pacer: Any) -> None:
        self.records: list[Any] = []
        sink = pacer._run.sinks[0]
        put = sink.put
        sink.put = lambda record: (self.records.append(record), put(record))[1]


class RunOn:
    """The lengths of the jobs of this process; all ranks make one, and ask it after every step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def is_over(self, options: dict[str, Any], steps: int, ear: Ear) -> bool:
        """Return whether all ranks have seen enough; a collective every ASK_STEPS where something is waited for."""
        is_over = self._is_over(options, steps, ear)
        if is_over:
            self.lengths.append(steps)
        return is_over

    def _is_over(self, options: dict[str, Any], steps: int, ear: Ear) -> bool:
        if options.get("as_long"):
            return steps == max(self.lengths)
        if steps < options["steps"]:
            return False
        if not options.get("until") or steps >= STEPS_MAX:
            return True
        if steps % ASK_STEPS:
            return False
        heard = {r.outcome for r in ear.records if isinstance(r, Verdict) and r.step <= steps - RESTED}
        is_enough = torch.tensor([float(heard >= set(options["until"]))])
        dist.all_reduce(is_enough, dist.ReduceOp.MAX)
        return bool(is_enough)
