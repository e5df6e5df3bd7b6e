"""Shows what the demo's job is doing now: a screen of 80 x 24, or plain lines for a log.

`Progress` keeps only the newest records, so that its memory does not grow with the run.  `RestDetector` decides from
it when the demo may end.  The job's own output goes to job.log and is not parsed.
"""

from __future__ import annotations

import math
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
from pacecar.records import (
    Decision,
    JobHello,
    JobRecord,
    KnobSwitch,
    KnobValue,
    Ledger,
    StepRecord,
    TunerStatus,
    Verdict,
)
from pacecar.records.judged_decision import JudgedDecision
from pacecar.run_statistics import SETTLE_STEPS

__all__ = [
    "PLAIN_CELLS_MAX",
    "REST_SECONDS",
    "DemoSetup",
    "Progress",
    "RestDetector",
    "event_line",
    "plain_line",
    "screen",
]

RECENT_STEPS = 32
"""Steps in the pace and the bar: a second or two of the default job, so that changes show soon and noise does not."""

VERDICTS_SHOWN = 4
"""The newest; the report's table has them all."""

EVENTS_MAX = 64
"""Trial events that wait to be printed."""

REST_SECONDS = 20.0
"""Time at the settings that were found: some hundred steps for the report to compare."""

SETTLED_NS_MIN = 3_000_000_000
"""A shorter stretch shows the cost of one profiled window rather than the lasting overhead."""

PLAIN_CELLS_MAX = 120
"""Cells of a line in a log; longer lines wrap in most terminals."""

TUNER_LINES = 2
"""Lines of the screen for the tuner's status, which is long with three knobs; the report's table has all of it."""


@dataclass(frozen=True, slots=True)
class DemoSetup:
    """What the screen shows beside the records; `overhead_budget` is the hook's share of wall time (0..1)."""

    run: str
    metrics_url: str
    folder: str
    limit: str
    overhead_budget: float | None = None


class Progress:
    """The state of one job, from the records read so far."""

    def __init__(self) -> None:
        self.world_size: int | None = None
        self.place = ""
        self.status: TunerStatus | None = None
        self.trial: Decision | None = None
        """The trial in progress."""
        self.kept = 0
        """Number of changes that were kept."""
        self.rate_before: float | None = None
        """Samples per second when the first trial began."""
        self.events: deque[str] = deque(maxlen=EVENTS_MAX)
        """A line for each start and end of a trial; without a screen they are printed and removed."""
        self.verdicts: deque[JudgedDecision] = deque(maxlen=VERDICTS_SHOWN)
        self._decisions: dict[int, Decision] = {}
        self._recent: dict[int, deque[StepRecord]] = {}
        self._settles_at: dict[int, int] = {}
        self._settled: dict[int, StepRecord] = {}
        """By rank: the first step after the last switch has settled."""

    def add(self, records: Iterable[JobRecord]) -> None:
        """Update the state from `records` of one rank, in the order in which it wrote them."""
        for record in records:
            match record:
                case StepRecord():
                    self._recent.setdefault(record.rank, deque(maxlen=RECENT_STEPS)).append(record)
                    if record.step >= self._settles_at.get(record.rank, math.inf):
                        self._settled.setdefault(record.rank, record)
                case KnobSwitch():
                    self._settles_at[record.rank] = record.step + SETTLE_STEPS
                    self._settled.pop(record.rank, None)
                case JobHello():
                    self.world_size = record.world_size
                    self.place = f"{record.backend or 'no backend'}, {record.device}"
                case TunerStatus():
                    self.status = record
                case Decision():
                    self._decisions[record.decision] = record
                    if record.kind == "trial":
                        self._start_trial(record)
                case Verdict():
                    self._end_trial(JudgedDecision(self._decisions.pop(record.decision, None), record))
                case _:
                    pass

    def _start_trial(self, decision: Decision) -> None:
        if self.rate_before is None:
            self.rate_before = self.samples_per_second()
        self.trial = decision
        self.events.append(f"trial: {_change(decision)}")

    def _end_trial(self, judged: JudgedDecision) -> None:
        self.trial = None
        self.kept += judged.outcome == "kept"
        self.verdicts.append(judged)
        self.events.append(_verdict(judged))

    @property
    def is_watching(self) -> bool:
        """Whether the tuner neither runs nor plans a trial."""
        return self.status is not None and self.status.state == "watching"

    def overhead_ratio(self) -> float | None:
        """Return pacecar's share of the wall time of all ranks so far; None before the first step."""
        last = [steps[-1] for steps in self._recent.values()]
        wall_ns = sum(step.totals.wall_ns for step in last)
        return sum(step.total_overhead_ns for step in last) / wall_ns if wall_ns else None

    def settled_overhead_ratio(self) -> float | None:
        """Return pacecar's share since the last switch settled; None without a switch, or for under SETTLED_NS_MIN."""
        pairs = [(first, self._recent[rank][-1]) for rank, first in self._settled.items()]
        wall_ns = sum(last.totals.wall_ns - first.totals.wall_ns for first, last in pairs)
        if not pairs or wall_ns < SETTLED_NS_MIN * len(pairs):
            return None
        return sum(last.total_overhead_ns - first.total_overhead_ns for first, last in pairs) / wall_ns

    @property
    def last(self) -> StepRecord | None:
        """The newest step of the lowest rank that recorded one."""
        return self._recent[min(self._recent)][-1] if self._recent else None

    @property
    def step(self) -> int:
        """The newest step in any record; the tuner's status may be ahead when few steps are measured."""
        steps = [step.step for step in (self.last, self.status) if step is not None]
        return max(steps, default=0)

    def pace_ns(self) -> int | None:
        """Return the slowest rank's median step time, over recent steps without a profiled window."""
        medians = [
            statistics.median_low(walls)
            for steps in self._recent.values()
            if (walls := [step.wall_ns for step in steps if step.source == "estimate"])
        ]
        return max(medians, default=None)

    def samples_per_second(self) -> float | None:
        """Return the recent throughput of the whole job; None if a rank does not count samples."""
        pace_ns = self.pace_ns()
        counts = [steps[-1].samples for steps in self._recent.values()]
        if pace_ns is None or pace_ns == 0 or None in counts:
            return None
        return sum(count for count in counts if count is not None) / (pace_ns / 1e9)

    def ledger(self) -> Ledger | None:
        """Return the sum of the recent steps of the lowest rank; None before the first step."""
        if not self._recent:
            return None
        steps = self._recent[min(self._recent)]
        total = Ledger(wall_ns=0, data_wait_ns=None)
        for step in steps:
            total = total + step.ledger
        return total


class RestDetector:
    """Decides when the demo may end: a change was kept, nothing is being tried, and the overhead is within its budget.

    A fixed length would waste time on a quiet machine and cut off a trial on a busy one.  A tuner that found nothing
    tries again after a while, so the demo continues up to its time limit.
    """

    def __init__(self, overhead_budget: float) -> None:
        self._overhead_budget = overhead_budget
        self._since_seconds: float | None = None

    def is_over(self, progress: Progress, now_seconds: float) -> bool:
        """Return whether the job may end now; call it repeatedly, as it measures how long the tuner has rested."""
        if not progress.kept or progress.trial is not None or not progress.is_watching:
            self._since_seconds = None
            return False
        if self._since_seconds is None:
            self._since_seconds = now_seconds
        ratio = progress.overhead_ratio()
        is_within_budget = ratio is not None and ratio <= self._overhead_budget
        return is_within_budget and now_seconds - self._since_seconds >= REST_SECONDS


def screen(progress: Progress, setup: DemoSetup, elapsed_seconds: float, console: Console) -> Group:
    """Return the terminal's content, at most 22 lines as wide as the terminal; `elapsed_seconds` of training."""
    last = progress.last
    width = max(20, console.width - 12)
    where = f"{progress.world_size} ranks, {progress.place}" if progress.world_size is not None else ""
    rows = [
        _row("pacecar", f"demo {setup.run}   {where}", style="bold"),
        _row("time", f"{_clock(elapsed_seconds)} of {setup.limit}"),
    ]
    ledger = progress.ledger()
    if last is None or ledger is None:
        rows.append(_row("step", "starting: Python imports torch, the ranks meet, the first step runs"))
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
    if ratio is not None and setup.overhead_budget is not None:
        allowed = percent(setup.overhead_budget)
        waiting = _waiting(last)
        said = f" of {allowed} allowed; {waiting}" if waiting else f" of the time so far, {allowed} allowed"
        rows.append(_row("overhead", f"{_percent2(ratio)}{said}"))
    rows += [_row("metrics", setup.metrics_url), _row("folder", setup.folder), _row("", "Ctrl-C stops cleanly")]
    return Group(*rows)


def plain_line(progress: Progress, elapsed_seconds: float) -> str:
    """Return one line for a log, at most PLAIN_CELLS_MAX long: the pace, and the trial or else where time goes."""
    last, ledger = progress.last, progress.ledger()
    if last is None or ledger is None:
        return f"starting, {_clock(elapsed_seconds)} so far: Python imports torch, the ranks meet, the first step runs"
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
    """Return why most of the ledger is still unknown, if the cost of a profiled window is the reason."""
    if last is None or last.uncalibrated != "price" or last.window_price_ns is None:
        return ""
    return f"a window of {last.window_price_ns / 1e6:.0f} ms is not earned yet"


def _speedup(progress: Progress) -> str:
    """Return the current throughput relative to that before the first trial."""
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
    """Return `text` in at most TUNER_LINES rows; the rest is cut."""
    lines = textwrap.wrap(text, width)
    if len(lines) > TUNER_LINES:
        lines = [*lines[: TUNER_LINES - 1], _cut(" ".join(lines[TUNER_LINES - 1 :]), width)]
    return [_row(label if i == 0 else "", line) for i, line in enumerate(lines)]


def _cut(text: str, cells: int) -> str:
    return text if len(text) <= cells else f"{text[: cells - 3].rstrip()}..."


def _percent2(ratio: float) -> str:
    """Return a ratio with two decimals of a percent: a tenth is too coarse next to a budget of 1 %."""
    return f"{ratio * 100:.2f} %"


def _label(text: str) -> tuple[str, str]:
    return f"{text:<9} ", "dim"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
