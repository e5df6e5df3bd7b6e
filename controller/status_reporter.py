"""Reports one rank's tuner: emits its status and its knob switches as records, and keeps the last status.

Left out: the policy's own records; those pass through unchanged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Literal

from pacecar.clock import Clock
from pacecar.records import JobHello, JobRecord, Knobs, KnobSwitch, TunerStatus

__all__ = ["State", "StatusReporter"]

logger = logging.getLogger(__name__)

State = Literal["off", "advising", "warming", "screening", "trial", "watching", "frozen"]


class StatusReporter:
    """Reports for one rank; `emit` takes records without waiting."""

    def __init__(self, hello: JobHello, emit: Callable[[JobRecord], None], clock: Clock) -> None:
        self.rank = hello.rank
        self.clock = clock
        self._hello = hello
        self._emit = emit
        self.status: TunerStatus | None = None
        """The status reported last, by the policy or by this rank; None before the first."""

    @property
    def state(self) -> State:
        """The state reported last; "off" before the first report."""
        return self.status.state if self.status is not None else "off"

    def pass_on(self, records: Sequence[JobRecord]) -> None:
        """Emit the policy's records, and keep the last status among them."""
        for record in records:
            if isinstance(record, TunerStatus):
                self.status = record
            self._emit(record)

    def report(self, state: State, detail: str, *, step: int, level: int = logging.DEBUG) -> None:
        """Record and log a change of state that is not the policy's; every rank reports its own."""
        last = self.status
        self.status = TunerStatus(
            job=self._hello.job,
            rank=self._hello.rank,
            state=state,
            detail=detail,
            step=step,
            wall_ns=self.clock.wall_ns(),
            exploration_ns=last.exploration_ns if last is not None else 0,
            trials=last.trials if last is not None else 0,
        )
        logger.log(level, "pacecar: tuner %s: %s", state, detail)
        try:
            self._emit(self.status)
        except Exception:
            logger.exception("pacecar: a status could not be emitted")

    def switched(self, decision: int, step: int, knobs: Knobs, duration_ns: int) -> None:
        """Record a switch of this rank's knobs."""
        self._emit(
            KnobSwitch(
                job=self._hello.job,
                rank=self._hello.rank,
                decision=decision,
                epoch=knobs.epoch,
                step=step,
                knobs=knobs,
                duration_ns=duration_ns,
            )
        )
