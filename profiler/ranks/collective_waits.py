"""Samples which part of the time the training thread waits in collectives on a CPU job, and in which phase.

Under FSDP2, tensor parallelism and pipelines a rank waits for others inside its forward and backward, or between them.
Timers cannot tell those waits from work, windows are rare, and c10d has hooks for collectives only from torch 2.14 on.
But a thread that waits for gloo stands in one of few functions of torch.  So the rank monitor looks at its stack some
five times a second, which costs nothing while that thread waits.

    ratio of a phase = samples in it that wait / all samples of the last SECONDS

Where torch's own Python is not on top of the stack (compiled code, waits of the script's own), waits count as work, on
all ranks alike.  On a device the host does not wait, so there are no samples.

`CollectiveWaits` belongs to one thread, which must not be the training thread.
"""

from __future__ import annotations

import random
import sys
from collections import Counter, deque
from collections.abc import Callable
from types import FrameType

from pacecar.clock import NS_PER_SECOND

from .exchange.phase_sums_message import SAMPLED_PHASES

__all__ = ["SAMPLES_MIN", "SAMPLE_SECONDS", "SECONDS", "CollectiveWaits", "is_in_collective"]

SAMPLE_SECONDS = 0.2
"""Mean time between two samples; it varies by half, because steps are periodic too.

A sample takes 0.2 ms from a thread that wants the GIL (`bench/bench_stack_samples.py`): 0.1 % of its time.
"""

SECONDS = 12.0
"""Ratios are of the samples of so many seconds: 60, which show a share of 0.3 to within 0.06."""

SAMPLES_MIN = 40

_COLLECTIVE_FILES = ("torch/distributed/distributed_c10d.py", "torch/distributed/_functional_collectives.py")
_COLLECTIVE_FUNCTIONS = frozenset({
    "foreach_all_gather_copy_out", "foreach_all_gather", "foreach_reduce", "wait_for_unshard", "_wait_batch_p2p",
})  # fmt: skip
"""Of FSDP2 and of pipeline schedules, which wait for works themselves."""

_PASSED_THROUGH = ("torch/_ops.py", "torch/distributed/c10d_logger.py")
"""Files whose frames lie between a collective's function and the wait."""

FRAMES_MAX = 4

_NAMES = {"forward": "forward", "backward": "backward", "outside": "rest"}
"""The hook's phases with their column; in the others either nobody waits or the timers show it."""


class CollectiveWaits:
    """The samples of one training thread; `phase` returns its phase."""

    def __init__(self, thread: int, phase: Callable[[], str], now_ns: Callable[[], int]) -> None:
        self._thread = thread
        self._phase = phase
        self._now_ns = now_ns
        self._samples: deque[tuple[int, str | None]] = deque()

    @staticmethod
    def pause_seconds() -> float:
        """Return the time until the next sample."""
        return SAMPLE_SECONDS * random.uniform(0.5, 1.5)

    def sample(self) -> None:
        """Take a sample now."""
        phase = _NAMES.get(self._phase())
        is_waiting = phase is not None and is_in_collective(sys._current_frames().get(self._thread))
        now = self._now_ns()
        self._samples.append((now, phase if is_waiting else None))
        while self._samples[0][0] < now - SECONDS * NS_PER_SECOND:
            self._samples.popleft()

    def ratios(self) -> dict[str, float] | None:
        """Return the ratio of each of SAMPLED_PHASES; None with fewer than SAMPLES_MIN samples."""
        if len(self._samples) < SAMPLES_MIN:
            return None
        counts = Counter(phase for _, phase in self._samples)
        return {phase: counts[phase] / len(self._samples) for phase in SAMPLED_PHASES}


def is_in_collective(frame: FrameType | None) -> bool:
    """Return whether a thread whose innermost frame is `frame` waits in a collective of torch's."""
    for _ in range(FRAMES_MAX):
        if frame is None:
            return False
        file = frame.f_code.co_filename
        if file.endswith(_COLLECTIVE_FILES):
            return True
        if "torch/distributed/" in file and frame.f_code.co_name in _COLLECTIVE_FUNCTIONS:
            return True
        if not file.endswith(_PASSED_THROUGH):
            return False
        frame = frame.f_back
    return False
