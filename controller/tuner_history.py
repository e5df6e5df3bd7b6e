"""Keeps the last of what a tuner recorded, for whoever asks what it does and did.

A person who asks wants a summary and not the series: what the tuner does now and why, what was tried, what it was
expected to save and what it saved.  All of that passes by as records on its way to the job's sinks, so the last of them
are kept here.

Left out: what a report is made of besides (`command_handler`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from pacecar.records import Decision, JobRecord, TunerChange, TunerOrder, TunerStatus, Verdict
from pacecar.records.commands import REPORTED_CHANGES_MAX, REPORTED_ORDERS_MAX
from pacecar.records.judged_decision import by_number, pair

__all__ = ["DETAIL_CHARACTERS_MAX", "TunerHistory"]

DETAIL_CHARACTERS_MAX = 600
"""Most characters of a reason in a report: the frame has room for 16 such reasons, and a terminal for few."""


class TunerHistory:
    """The records of one rank's tuner: `emit` keeps them and passes them on to the function of that name."""

    def __init__(self, emit: Callable[[JobRecord], None]) -> None:
        self._emit = emit
        self.status: TunerStatus | None = None
        """The last one; None before the first."""
        self.advised: dict[str, Decision] = {}
        """Knob -> what would be turned, where nothing may be."""
        self._decisions: deque[Decision] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._verdicts: deque[Verdict] = deque(maxlen=REPORTED_CHANGES_MAX)
        self._orders: deque[TunerOrder] = deque(maxlen=REPORTED_ORDERS_MAX)

    def emit(self, record: JobRecord) -> None:
        """Pass a record of the tuner on, and keep it for reports."""
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

    @property
    def orders(self) -> tuple[TunerOrder, ...]:
        """The last orders of people, oldest first."""
        return tuple(self._orders)

    def changes(self) -> tuple[TunerChange, ...]:
        """Return the last decisions with what became of them."""
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
