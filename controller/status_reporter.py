"""Reports one rank's tuner: emits its records, and keeps the last of them for a person who asks.

The policy's records pass through unchanged.  A report (`command_handler`) shows what the tuner does now and why, what
it tried, and what that was expected to save and did save.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pacecar.clock import Clock
from pacecar.records import (
    Decision,
    JobHello,
    JobRecord,
    Knobs,
    KnobSwitch,
    TunerChange,
    TunerOrder,
    TunerStatus,
    Verdict,
)
from pacecar.records.commands import REPORTED_CHANGES_MAX, REPORTED_ORDERS_MAX
from pacecar.records.judged_decision import by_number, pair

from .observation import TunerState

__all__ = ["DETAIL_CHARACTERS_MAX", "StatusReporter"]

logger = logging.getLogger(__name__)

DETAIL_CHARACTERS_MAX = 600
"""Longest reason in a report: a frame holds 16 of this length, and a terminal shows few."""


class StatusReporter:
    """Reports for one rank; `emit` takes records without waiting."""

    def __init__(self, hello: JobHello, emit: Callable[[JobRecord], None], clock: Clock) -> None:
        self.rank = hello.rank
        self.clock = clock
        self._hello = hello
        self._emit = emit
        self.status: TunerStatus | None = None
        """The last status, from the policy or from this rank; None before the first."""
        self.advised: dict[str, Decision] = {}
        """Knob -> the last advice on it, in mode advise."""
        self._decisions: deque[Decision] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._verdicts: deque[Verdict] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._orders: deque[TunerOrder] = deque(maxlen=REPORTED_ORDERS_MAX)

    @property
    def state(self) -> TunerState:
        """The state reported last; "off" before the first report."""
        return self.status.state if self.status is not None else "off"

    def emit(self, record: JobRecord) -> None:
        """Keep a record for reports and pass it on."""
        match record:
            case TunerStatus():
                self.status = record
            case Decision():
                self._decisions.append(record)
                if record.kind == "advise":
                    self.advised[record.knob] = record
            case Verdict():
                self._verdicts.append(record)
            case TunerOrder():
                self._orders.append(record)
        self._emit(record)

    def report(self, state: TunerState, detail: str, *, step: int, level: int = logging.DEBUG) -> None:
        """Record and log this rank's own change of state."""
        last = self.status
        status = TunerStatus(
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
            self.emit(status)
        except Exception:
            logger.exception("pacecar: a status could not be emitted")

    def switched(self, decision: int, step: int, knobs: Knobs, duration_ns: int) -> None:
        """Record a switch of this rank's knobs."""
        self.emit(
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

    @property
    def orders(self) -> tuple[TunerOrder, ...]:
        """The last orders of people, oldest first."""
        return tuple(self._orders)

    def changes(self) -> tuple[TunerChange, ...]:
        """Return the last decisions and their outcomes."""
        judged = pair(by_number(self._decisions), by_number(self._verdicts))
        return tuple(
            TunerChange(
                decision=decision.decision,
                kind=decision.kind,
                knob=decision.knob,
                from_value=int(decision.from_value),
                to_value=int(decision.to_value),
                step=decision.step,
                expected_gain_ratio=decision.expected_gain_ratio,
                measured_gain_ratio=one.measured_gain_ratio,
                outcome=one.outcome,
                reason=one.reason[:DETAIL_CHARACTERS_MAX],
            )
            for one in judged.values()
            if (decision := one.decision) is not None
        )
