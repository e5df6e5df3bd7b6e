"""Detects that a rank is failing, and that this is over, by counting steps that take many times the usual time.

One huge step is a checkpoint or a garbage collection.  Several in a row are a rank that hangs in its data, a link that
flaps, or a machine that swaps.  Tuning pauses then; `pace_tracker` judges the pace afterwards.

Pure.
"""

from __future__ import annotations

from pacecar.controller.observation import Observation

__all__ = ["CALM_STEPS", "STALL_RATIO", "STALL_STEPS", "StallDetector"]

STALL_RATIO = 20.0
STALL_STEPS = 8
"""A rank is failing when STALL_STEPS steps in a row take over STALL_RATIO times the typical pace."""

CALM_STEPS = 32
"""Steps in a row without a stall after which tuning goes on."""


class StallDetector:
    """Counts stalled steps; `usual_ns` is the typical pace while nothing is wrong, None before it is known."""

    def __init__(self) -> None:
        self.usual_ns: float | None = None
        self._stalled = 0
        self._calm = 0

    def is_stall(self, step: Observation) -> bool:
        """Return whether the step took too long to measure any setting."""
        return self.usual_ns is not None and step.pace_ns > STALL_RATIO * self.usual_ns

    def count(self, step: Observation) -> str | None:
        """Take a step while tuning; return why a rank seems to be failing, or None."""
        self._stalled = self._stalled + 1 if self.is_stall(step) else 0
        if self._stalled < STALL_STEPS:
            return None
        return f"{STALL_STEPS} steps in a row took over {STALL_RATIO:.0f} times the usual: a rank is failing"

    def is_over(self, step: Observation) -> bool:
        """Take a step while tuning waits; return whether the job has been calm for long enough."""
        self._calm = 0 if self.is_stall(step) else self._calm + 1
        return self._calm >= CALM_STEPS

    def restart(self) -> None:
        """Start counting from zero."""
        self._stalled = self._calm = 0
