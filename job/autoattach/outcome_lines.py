"""Prints the outcome of a run under `pacecar run`: at its end, and earlier if there is nothing to tune.

Receives the records as a user's logger does (`attach(loggers=...)`): states of the tuner, decisions and verdicts, and
the goodbye with its totals.  Prints on rank 0 only.  The numbers of single steps are in the run folder.
"""

from __future__ import annotations

import shlex

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import duration, percent, plural
from pacecar.knobs import setting
from pacecar.records import Decision, Goodbye, JobRecord, Ledger, TunerStatus, Verdict

from .stderr_line import write_line

__all__ = ["OutcomeLines"]

SHARES_MAX = 3
SHARE_MIN = 0.01
"""Headings of the ledger that the line names: the largest, of a hundredth of the time or more."""

NOT_KEPT = "nothing more is kept: pacecar run --run-dir FOLDER keeps it for pacecar report"
"""For a run without a run folder, which leaves nothing but this line."""

TURNING = ("warming", "screening", "trial", "watching")
"""States of a tuner that may turn a knob."""


class OutcomeLines:
    """A `RecordSink` that prints the lines; `run_dir` is the folder that the last one points to."""

    dropped = 0

    def __init__(self, run_dir: str | None) -> None:
        self._run_dir = run_dir
        self._is_tuned = False
        self._decided: dict[int, Decision] = {}
        self._kept: dict[str, tuple[int | str, int | str]] = {}
        self._goodbye: Goodbye | None = None

    def put(self, record: JobRecord) -> None:
        """Take what the lines need from a record; most contain nothing."""
        if isinstance(record, Decision):
            self._decided[record.decision] = record
        elif isinstance(record, Verdict):
            decision = self._decided.pop(record.decision, None)
            if decision is not None and record.outcome == "kept":
                first, _ = self._kept.get(decision.knob, (decision.from_value, None))
                self._kept[decision.knob] = (first, decision.to_value)
        elif isinstance(record, TunerStatus):
            if record.state == "off" and self._is_tuned and record.rank == 0:
                write_line(f"tunes nothing: {_first_reason(record.detail)}")
            self._is_tuned = record.state != "off" and (self._is_tuned or record.state in TURNING)
        elif isinstance(record, Goodbye):
            self._goodbye = record

    def close(self, timeout_seconds: float) -> None:
        """Print the line, once."""
        goodbye, self._goodbye = self._goodbye, None
        if goodbye is None or goodbye.rank != 0:
            return
        if goodbye.totals is None or not goodbye.total_steps:
            line = "measured no step: none ended after the one in which pacecar attached"
        else:
            line = self._line(goodbye, goodbye.totals, goodbye.total_steps)
        more = NOT_KEPT if self._run_dir is None else f"more: pacecar report {shlex.quote(self._run_dir)}"
        write_line(f"{line}; {more}")

    def _line(self, goodbye: Goodbye, totals: Ledger, steps: int) -> str:
        wall_ns = max(1, totals.wall_ns)
        line = f"{plural(steps, 'step')} of {duration(wall_ns / steps)}: {_shares(totals)}"
        if goodbye.total_overhead_ns is not None:
            ratio = percent(goodbye.total_overhead_ns / wall_ns, digits=2)
            line += f"; pacecar's own time {duration(goodbye.total_overhead_ns)} ({ratio})"
        if self._is_tuned:
            changes = [
                f"{knob} {setting(knob, first)} -> {setting(knob, last)}"
                for knob, (first, last) in self._kept.items()
                if first != last
            ]
            line += f"; kept {', '.join(changes) or 'no change'}"
        return line


def _first_reason(detail: str) -> str:
    """Return why the first knob cannot be turned: DDP's come first, and a script here has no others."""
    return detail.removeprefix("nothing to tune: ").removeprefix("not tuning: ").split("; ")[0]


def _shares(ledger: Ledger) -> str:
    parts = {heading: part_ns / max(1, ledger.wall_ns) for heading, part_ns in ledger.parts().items()}
    largest = sorted((heading for heading in parts if parts[heading] >= SHARE_MIN), key=lambda each: -parts[each])
    return ", ".join(f"{percent(parts[heading])} {HEADING_WORDS[heading]}" for heading in largest[:SHARES_MAX])
