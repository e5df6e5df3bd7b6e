"""Turns one rank's records into log entries of an experiment: means every few seconds, and one event per decision.

A record comes with every step, perhaps a thousand times a second, and loggers keep what they get forever, one file
entry or one request each.  The mean over an interval is as informative.  It is taken from the *totals* in the records,
so that it includes steps whose records were dropped.

    pacecar/step_seconds               mean wall time of the interval's steps
    pacecar/share/<heading>            the ledger's headings, as shares of it (0..1; they sum to one)
    pacecar/samples_per_second         of this rank; absent if samples are not counted
    pacecar/samples_guessed            1 if they are a guess: the first dimension of a tensor; else absent
    pacecar/knob/<knob>                the value in force
    events                             decisions, verdicts, orders, stragglers, hangs: one line of text each

Pure: records in, entries out.  `loggers` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass

from pacecar.knobs import setting
from pacecar.records import Decision, HangSuspicion, HangVerdict, JobRecord, StepRecord, Straggler, TunerOrder, Verdict

__all__ = ["MetricEntry", "MetricLog", "event_of"]

PERIOD_SECONDS = 5.0
"""Between two entries: 720 an hour, which every logger's page can still draw."""


@dataclass(frozen=True, slots=True)
class MetricEntry:
    """Numbers at a step, or one event with its text."""

    step: int
    wall_seconds: float
    scalars: dict[str, float]
    event: str | None = None


class MetricLog:
    """Makes entries from one rank's records, in the order in which they come."""

    def __init__(self, period_seconds: float = PERIOD_SECONDS) -> None:
        self._period_ns = int(period_seconds * 1e9)
        self._last: StepRecord | None = None

    def entry_for(self, record: JobRecord) -> MetricEntry | None:
        """Return what `record` adds to the log, if anything."""
        if not isinstance(record, StepRecord):
            return event_of(record)
        last = self._last
        if last is None:
            self._last = record
            return None
        steps = record.total_steps - last.total_steps
        if record.ended_wall_ns - last.ended_wall_ns < self._period_ns or steps <= 0:
            return None
        self._last = record
        return MetricEntry(record.step, record.ended_wall_ns / 1e9, _scalars(last, record, steps))


def _scalars(last: StepRecord, record: StepRecord, steps: int) -> dict[str, float]:
    before, after = last.totals.parts(), record.totals.parts()
    wall_ns = record.totals.wall_ns - last.totals.wall_ns
    scalars = {"pacecar/step_seconds": wall_ns / steps / 1e9}
    if wall_ns > 0:
        for heading, total_ns in after.items():
            scalars[f"pacecar/share/{heading}"] = (total_ns - before.get(heading, 0)) / wall_ns
        if record.total_samples is not None and last.total_samples is not None:
            scalars["pacecar/samples_per_second"] = (record.total_samples - last.total_samples) / wall_ns * 1e9
            if record.samples_guessed:
                scalars["pacecar/samples_guessed"] = 1.0
    for knob, value in record.knobs.values.items():
        if isinstance(value, int):
            scalars[f"pacecar/knob/{knob}"] = float(value)
    return scalars


def event_of(record: JobRecord) -> MetricEntry | None:
    """Return the line that describes `record`; None if it is not an event."""
    text: str | None = None
    if isinstance(record, Decision):
        change = f"{record.knob} {setting(record.knob, record.from_value)} -> {setting(record.knob, record.to_value)}"
        expected = record.expected_gain_ratio
        hope = "" if expected is None else f", {expected:.1%} of step time expected"
        text = f"{record.kind} {record.decision}: {change}{hope} ({record.reason})"
    elif isinstance(record, Verdict):
        gain = record.measured_gain_ratio
        measured = "not measured" if gain is None else f"{gain:.1%} of step time measured"
        text = f"verdict on {record.decision}: {record.knob} {record.outcome}, {measured} ({record.reason})"
    elif isinstance(record, TunerOrder):
        text = f"order {record.action}: {record.outcome} ({record.detail})"
    elif isinstance(record, Straggler):
        who = "the job" if record.late_rank is None else f"rank {record.late_rank}"
        text = f"{who} {'is no longer' if record.ended else 'is'} held up by {record.cause} ({record.evidence})"
    elif isinstance(record, HangSuspicion):
        state = "goes on" if record.ended else f"is silent for {record.silent_ns / 1e9:.0f} s"
        text = f"rank {record.rank} {state} in {record.phase}"
    elif isinstance(record, HangVerdict):
        text = "the job goes on after a hang" if record.ended else record.summary
    if text is None:
        return None
    step, wall_ns = record.step, record.wall_ns  # type: ignore[union-attr]  # every record with a text has both
    return MetricEntry(step or 0, wall_ns / 1e9, {}, text)
