"""What is the job doing right now?  The records so far, folded into a screen of 80 x 24 or into one plain line.

Only the newest records are kept: a display must not grow with the run.  What is shown is what the records say; the
job's own output goes to job.log and is not parsed.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console, Group
from rich.text import Text

from pacecar.demo.wording import knob_text, knobs_text
from pacecar.ledgerbar import ledger_bar, ledger_legend
from pacecar.records import Decision, JobHello, JobRecord, Ledger, StepRecord, TunerStatus, Verdict
from pacecar.wording import percent

__all__ = ["Progress", "Surroundings", "plain_line", "screen"]

RECENT_STEPS = 32
"""Steps in the pace and the bar: about eight seconds of the default job, so a change shows soon and noise little."""

VERDICTS_SHOWN = 5
"""The newest; the closing table has them all."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the records do not say."""

    run: str
    metrics_url: str
    folder: str
    limit: str


class Progress:
    """The state of one job, as far as its records have come."""

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.place = ""
        self.status: TunerStatus | None = None
        self.verdicts: deque[tuple[Decision | None, Verdict]] = deque(maxlen=VERDICTS_SHOWN)
        self._decisions: dict[int, Decision] = {}
        self._recent: dict[int, deque[StepRecord]] = {}

    def take(self, records: Iterable[JobRecord]) -> None:
        """Learn from `records`, of one rank at a time in the order in which it wrote them."""
        for record in records:
            match record:
                case StepRecord():
                    self._recent.setdefault(record.rank, deque(maxlen=RECENT_STEPS)).append(record)
                case JobHello():
                    self.world_size = record.world_size
                    self.place = f"{record.backend or 'no backend'}, {record.device}"
                case TunerStatus():
                    self.status = record
                case Decision():
                    self._decisions[record.decision] = record
                case Verdict():
                    self.verdicts.append((self._decisions.pop(record.decision, None), record))
                case _:
                    pass

    @property
    def last(self) -> StepRecord | None:
        """The newest step of the lowest rank that has one."""
        return self._recent[min(self._recent)][-1] if self._recent else None

    def pace_ns(self) -> int | None:
        """Return the median step of the slowest rank, over the recent steps that no window slowed down."""
        medians = [
            statistics.median_low(walls)
            for steps in self._recent.values()
            if (walls := [step.wall_ns for step in steps if step.source == "estimate"])
        ]
        return max(medians, default=None)

    def samples_per_second(self) -> float | None:
        """Return the whole job's recent throughput; None when a rank does not count samples."""
        pace_ns = self.pace_ns()
        counts = [steps[-1].samples for steps in self._recent.values()]
        if pace_ns is None or pace_ns == 0 or None in counts:
            return None
        return sum(count for count in counts if count is not None) / (pace_ns / 1e9)

    def ledger(self) -> Ledger | None:
        """Return the recent steps of the lowest rank, added up."""
        if not self._recent:
            return None
        steps = self._recent[min(self._recent)]
        total = Ledger(wall_ns=0)
        for step in steps:
            total = total + step.ledger
        return total


def screen(progress: Progress, around: Surroundings, elapsed_seconds: float, console: Console) -> Group:
    """Return what the terminal shows, at most 22 lines of at most its width."""
    last = progress.last
    width = max(20, console.width - 12)
    where = f"{progress.world_size} ranks, {progress.place}" if progress.world_size is not None else ""
    rows = [
        _row("pacecar", f"demo {around.run}   {where}", style="bold"),
        _row("time", f"{_clock(elapsed_seconds)} of {around.limit}"),
    ]
    ledger = progress.ledger()
    if last is None or ledger is None:
        rows.append(_row("step", "starting: python imports torch, the ranks meet, the first step runs"))
    else:
        rows += [
            _row("step", f"{last.step}   {_pace(progress)}"),
            Text.assemble(_label("ledger"), ledger_bar(ledger, width, console)),
            *(Text.assemble(_label(""), line) for line in ledger_legend(ledger, width, console)),
            _row("knobs", f"{knobs_text(last.knobs.values)}   (epoch {last.knobs.epoch})"),
        ]
    if progress.status is not None:
        rows.append(_row("tuner", f"{progress.status.state}: {progress.status.detail}"))
    rows += [Text.assemble(_label("verdict"), _verdict(*entry)) for entry in progress.verdicts]
    rows += [
        Text(),
        _row("metrics", around.metrics_url),
        _row("folder", f"{around.folder}   (Ctrl-C stops cleanly)"),
    ]
    return Group(*rows)


def plain_line(progress: Progress, elapsed_seconds: float) -> str:
    """Return one line for a log."""
    last, ledger = progress.last, progress.ledger()
    if last is None or ledger is None:
        return f"{_clock(elapsed_seconds)}  starting"
    shares = ", ".join(
        f"{heading} {percent(part_ns / ledger.wall_ns)}" for heading, part_ns in ledger.parts().items() if part_ns > 0
    )
    tuner = f"  [{progress.status.state}: {progress.status.detail}]" if progress.status is not None else ""
    return f"{_clock(elapsed_seconds)}  step {last.step}  {_pace(progress)}  {shares}{tuner}"


def _pace(progress: Progress) -> str:
    pace_ns, samples = progress.pace_ns(), progress.samples_per_second()
    pace = f"{pace_ns / 1e6:.1f} ms/step" if pace_ns is not None else "no pace yet"
    return f"{pace}   {samples:.1f} samples/s" if samples is not None else pace


def _verdict(decision: Decision | None, verdict: Verdict) -> Text:
    change = ""
    if decision is not None:
        old, new = knob_text(decision.knob, decision.from_value), knob_text(decision.knob, decision.to_value)
        change = f" {old} -> {new}"
    style = "green" if verdict.outcome == "kept" else "yellow"
    measured = percent(verdict.measured_gain_ratio, signed=True)
    return Text(f"{verdict.outcome}: {verdict.knob}{change}, step time saved {measured}", style=style)


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble(_label(label), (text, style))


def _label(text: str) -> tuple[str, str]:
    return f"{text:<9} ", "dim"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
