"""Takes gradient compression back, on all ranks, when loss or gradient norm diverge.

A policy keeps what is faster, even if it breaks the training.  So this guard has the last word about the knob
"compression", when `divergence_detector` raises the alarm.

Each signal names the compression of its step, so steps that were not measured are watched too.  Compression stays off
for the rest of the run: a second divergence would cost more than compression saves.

Pure but for `signals`, which must not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..knobs.ddp.compression import NONE, choice_of
from .divergence_detector import DivergenceDetector, DivergenceSignals
from .knob_rollback import Alarm, KnobRollback

__all__ = ["CompressionRollback"]


class CompressionRollback(KnobRollback):
    """Takes compression back when `signals` leave their band."""

    knob = "compression"
    home = NONE

    def __init__(self, signals: Callable[[], Sequence[DivergenceSignals]]) -> None:
        super().__init__()
        self._signals = signals
        self._divergence = DivergenceDetector()

    def is_calm(self) -> bool:
        """Return False while compression is in force: a diverging step costs more than a vote."""
        return not self._is_in_force

    def _watch(self) -> None:
        """Judge the losses and gradient norms since the last call."""
        for signals in self._signals():
            self._is_in_force = signals.choice != choice_of(NONE)
            if self._alarm is None and (alarm := self._divergence.observe(signals)) is not None:
                self._alarm = Alarm(alarm.step, alarm.reason)
