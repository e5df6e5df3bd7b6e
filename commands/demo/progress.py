"""Shows what the demo's job is doing now: folds its records into a screen of 80 x 24, or into plain lines for a log.

Only the newest records are kept: a display must not grow with the run.  What is shown is what the records say; the
job's own output goes to job.log and is not parsed.
"""

from __future__ import annotations

import statistics
import textwrap
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rich.console import Console, Group
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import percent
from pacecar.knobs import setting
from pacecar.records import Decision, JobHello, JobRecord, KnobValue, Ledger, StepRecord, TunerStatus, Verdict
from pacecar.records.judged_decision import JudgedDecision

__all__ = ["PLAIN_CELLS_MAX", "DemoSetup", "Progress", "event_line", "plain_line", "screen"]

RECENT_STEPS = 32
"""Steps in the pace and the bar: a second or two of the default job, so a change shows soon and noise little."""

VERDICTS_SHOWN = 4
"""The newest; the report's table has them all."""

EVENTS_MAX = 64
"""Beginnings and ends of trials that wait to be shown."""

PLAIN_CELLS_MAX = 120
"""Cells of a line in a log; a longer one wraps in the reader's terminal, and is then hard to read."""

TUNER_LINES = 2
"""Lines of the screen for the tuner: its status may be long with three knobs, and the report's table has it whole."""


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """What the records do not say; `overhead_budget` is what the hook may take of the wall time (0..1)."""

    run: str
    metrics_url: str
    folder: str
    limit: str
    overhead_budget: float | None = None


class Progress:
    """The state of one job, as far as its records have come."""

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.place = ""
        self.status: TunerStatus | None = None
        self.trial: Decision | None = None
        """The trial under way."""
        self.kept = 0
        """How many changes were kept."""
        self.rate_before: float | None = None
        """Samples a second when the first trial began."""
        self.events: deque[str] = deque(maxlen=EVENTS_MAX)
        """Beginnings and ends of trials, each as a line; a display without a screen prints and removes them."""
        self.verdicts: deque[JudgedDecision] = deque(maxlen=VERDICTS_SHOWN)
        self._decisions: dict[int, Decision] = {}
        self._recent: dict[int, deque[StepRecord]] = {}

    def add(self, records: Iterable[JobRecord]) -> None:
        """Update the state from `records`, of one rank at a time in the order in which it wrote them."""
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
                    if record.kind == "trial":
                        self._began(record)
                case Verdict():
                    self._ended(JudgedDecision(self._decisions.pop(record.decision, None), record))
                case _:
                    pass

    def _began(self, decision: Decision) -> None:
        if self.rate_before is None:
            self.rate_before = self.samples_per_second()
        self.trial = decision
        self.events.append(f"trial: {_change(decision)}")

    def _ended(self, judged: JudgedDecision) -> None:
        self.trial = None
        self.kept += judged.outcome == "kept"
        self.verdicts.append(judged)
        self.events.append(_verdict(judged))

    @property
    def is_watching(self) -> bool:
        """Whether the tuner tries nothing and plans no trial."""
        return self.status is not None and self.status.state == "watching"

    def overhead_ratio(self) -> float | None:
        """Return what pacecar cost so far, on all ranks, over their wall time; None before the first step."""
        last = [steps[-1] for steps in self._recent.values()]
        wall_ns = sum(step.totals.wall_ns for step in last)
        return sum(step.total_overhead_ns for step in last) / wall_ns if wall_ns else None

    @property
    def last(self) -> StepRecord | None:
        """The newest step of the lowest rank that has one."""
        return self._recent[min(self._recent)][-1] if self._recent else None

    @property
    def step(self) -> int:
        """The newest step in any record; where few steps are measured the tuner knows of a newer one."""
        steps = [step.step for step in (self.last, self.status) if step is not None]
        return max(steps, default=0)

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
        total = Ledger(wall_ns=0, data_wait_ns=None)
        for step in steps:
            total = total + step.ledger
        return total


def screen(progress: Progress, around: DemoSetup, elapsed_seconds: float, console: Console) -> Group:
    """Return what the terminal shows, at most 22 lines of at most its width; the elapsed time is that of training."""
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
            _row("step", f"{progress.step}   {_pace(progress)}{_speedup(progress)}"),
            Text.assemble(_label("ledger"), ledger_bar(ledger, width, console)),
            *(Text.assemble(_label(""), line) for line in ledger_legend(ledger, width, console)),
            _row("knobs", f"{_knobs(last.knobs.values)}   (epoch {last.knobs.epoch})"),
        ]
    if progress.status is not None:
        status = progress.status
        is_trial = status.state == "trial"
        said = status.detail if is_trial else f"{status.state}: {status.detail}"
        rows += _folded("trial" if is_trial else "tuner", said, width + 1)
    rows += [
        _row("verdict", _verdict(judged), style="green" if judged.outcome == "kept" else "yellow")
        for judged in progress.verdicts
    ]
    ratio = progress.overhead_ratio()
    if ratio is not None and around.overhead_budget is not None:
        allowed = percent(around.overhead_budget)
        waiting = _waiting(last)
        said = f" of {allowed} allowed; {waiting}" if waiting else f" of the time so far, {allowed} allowed"
        rows.append(_row("overhead", f"{_percent2(ratio)}{said}"))
    rows += [_row("metrics", around.metrics_url), _row("folder", around.folder), _row("", "Ctrl-C stops cleanly")]
    return Group(*rows)


def plain_line(progress: Progress, elapsed_seconds: float) -> str:
    """Return one line for a log, of at most PLAIN_CELLS_MAX: the pace, and what is tried or else where time goes."""
    last, ledger = progress.last, progress.ledger()
    if last is None or ledger is None:
        return f"{_clock(elapsed_seconds)}  starting: python imports torch, the ranks meet, the first step runs"
    line = f"{_clock(elapsed_seconds)}  step {progress.step}"
    if progress.trial is not None and progress.status is not None:
        return _cut(f"{line}  {progress.status.detail}", PLAIN_CELLS_MAX)
    line = f"{line}  {_pace(progress)} "
    for heading, part_ns in sorted(ledger.parts().items(), key=lambda part: -part[1]):
        share = f"  {HEADING_WORDS[heading]} {percent(part_ns / ledger.wall_ns)}" if part_ns else ""
        if heading == "unknown" and (waiting := _waiting(last)):
            share += f" ({waiting})"
        if len(line) + len(share) <= PLAIN_CELLS_MAX:
            line += share
    return line.rstrip()


def event_line(event: str, elapsed_seconds: float) -> str:
    """Return one of `Progress.events` as a line for a log."""
    return _cut(f"{_clock(elapsed_seconds)}  {event}", PLAIN_CELLS_MAX)


def _pace(progress: Progress) -> str:
    pace_ns, samples = progress.pace_ns(), progress.samples_per_second()
    pace = f"{pace_ns / 1e6:.1f} ms/step" if pace_ns is not None else "no pace yet"
    return f"{pace}   {samples:.1f} samples/s" if samples is not None else pace


def _waiting(last: StepRecord | None) -> str:
    """Return why most of the ledger is still unknown, where that is the price of an exact window."""
    if last is None or last.uncalibrated != "price" or last.window_price_ns is None:
        return ""
    return f"a window of {last.window_price_ns / 1e6:.0f} ms is not earned yet"


def _speedup(progress: Progress) -> str:
    """Return the present throughput over that before the first trial."""
    now, before = progress.samples_per_second(), progress.rate_before
    if now is None or not before or not progress.kept:
        return ""
    return f"   {now / before:.2f} x the start"


def _knobs(values: Mapping[str, KnobValue]) -> str:
    return "   ".join(f"{knob} {setting(knob, value)}" for knob, value in sorted(values.items())) or "-"


def _change(decision: Decision) -> str:
    old, new = setting(decision.knob, decision.from_value), setting(decision.knob, decision.to_value)
    return f"{decision.knob} {old} -> {new}"


def _verdict(judged: JudgedDecision) -> str:
    """Return "kept: micro_batch 2 -> 4, step time saved +12.0 % (4.0 .. 20.0 %)"."""
    change = judged.said.knob if judged.decision is None else _change(judged.decision)
    bounds = ""
    if judged.gain_low is not None and judged.gain_high is not None:
        bounds = f" ({judged.gain_low * 100:.1f} .. {judged.gain_high * 100:.1f} %)"
    measured = f"step time saved {percent(judged.measured_gain_ratio, signed=True)}"
    return f"{(judged.outcome or 'open').replace('_', ' ')}: {change}, {measured}{bounds}"


def _row(label: str, text: str, style: str = "") -> Text:
    return Text.assemble(_label(label), (text, style), no_wrap=True, overflow="ellipsis")


def _folded(label: str, text: str, width: int) -> list[Text]:
    """Return `text` in at most TUNER_LINES rows; what has no room is cut."""
    lines = textwrap.wrap(text, width)
    if len(lines) > TUNER_LINES:
        lines = [*lines[: TUNER_LINES - 1], _cut(" ".join(lines[TUNER_LINES - 1 :]), width)]
    return [_row(label if i == 0 else "", line) for i, line in enumerate(lines)]


def _cut(text: str, cells: int) -> str:
    return text if len(text) <= cells else f"{text[: cells - 3].rstrip()}..."


def _percent2(ratio: float) -> str:
    """Return a ratio near a budget of 0.01, where a tenth of a percent is too coarse."""
    return f"{ratio * 100:.2f} %"


def _label(text: str) -> tuple[str, str]:
    return f"{text:<9} ", "dim"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
