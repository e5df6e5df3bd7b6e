"""Draws ledgers as stacked bars, and what-if answers as bars of lengths.

The job's bar is its critical path by cause, which adds up to the job's wall time; a rank's bar is its own ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pacecar.analysis.document.report import CriticalPart, Scenario, StepReport, TraceReport
from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.page.svg import Bar, length_bars, stacked_bars
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import duration, percent, unit_for
from pacecar.records import Ledger

from ..words import path_words

__all__ = ["CAUSE_CLASSES", "job_bar", "rank_bars", "step_bars", "what_if_bars"]

BARS_MAX = 64
"""The most bars in one drawing; the table has the others."""

FILE_CHARACTERS_MAX, FILE_LEFT = 11, 164
"""The characters shown of a file's name in place of a rank, and their room: an M takes 13 units."""

CAUSE_CLASSES = {"link": "exposed_communication"}
"""The style's class of a cause that is not a heading; other causes have their own name's."""


def cause_sums(path: Sequence[CriticalPart]) -> dict[str, int]:
    """Return the path's time by cause, the longest first."""
    sums: dict[str, int] = {}
    for part in path:
        sums[part.cause] = sums.get(part.cause, 0) + part.duration_ns
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def job_bar(path: Sequence[CriticalPart], wall_ns: int) -> str:
    """Draw the job's wall time by the causes on the critical path."""
    sums = cause_sums(path)
    if not sums or wall_ns <= 0:
        return ""
    said = ", ".join(f"{path_words(cause)} {percent(ns / wall_ns)}" for cause, ns in sums.items()) + "."
    parts = {CAUSE_CLASSES.get(cause, cause): ns for cause, ns in sums.items()}
    hints = {CAUSE_CLASSES.get(cause, cause): f"{path_words(cause)}: {duration(ns)}" for cause, ns in sums.items()}
    bar = Bar("job", parts, duration(wall_ns), hints)
    return stacked_bars("The job's wall time by cause", said, [bar])


def rank_bars(reports: Sequence[TraceReport]) -> str:
    """Draw the ledger of each rank on one scale."""
    unit = unit_for([report.span_ns for report in reports])
    bars = [_bar(_name(report), report.ledger, unit.text(report.span_ns)) for report in reports[:BARS_MAX]]
    said = " ".join(f"{bar.name}: {_ledger_words(report.ledger)}" for bar, report in zip(bars, reports, strict=False))
    left = 84 if all(report.rank is not None for report in reports) else FILE_LEFT
    return stacked_bars("Ledger of each rank", said, bars, left=left, every=34 if len(bars) <= 4 else 20)


def step_bars(steps: Sequence[StepReport]) -> str:
    """Draw the ledger of each step on one scale."""
    unit = unit_for([step.ledger.wall_ns for step in steps])
    bars = [_bar(f"step {step.step}", step.ledger, unit.text(step.ledger.wall_ns)) for step in steps[:BARS_MAX]]
    said = " ".join(f"step {step.step}: {_ledger_words(step.ledger)}" for step in steps[:BARS_MAX])
    return stacked_bars("Ledger of each step", said, bars, left=100, every=20)


def _name(report: TraceReport) -> str:
    return f"rank {report.rank}" if report.rank is not None else clean(Path(report.file).name, FILE_CHARACTERS_MAX)


def _bar(name: str, ledger: Ledger, figure: str) -> Bar:
    hints = {part: f"{HEADING_WORDS[part]}: {duration(ns)}" for part, ns in ledger.parts().items() if ns}
    return Bar(name, ledger.parts(), figure, hints)


def _ledger_words(ledger: Ledger) -> str:
    parts = [f"{HEADING_WORDS[name]} {percent(ns / ledger.wall_ns)}" for name, ns in ledger.parts().items() if ns]
    return (", ".join(parts) or "nothing") + "."


def what_if_bars(scenarios: Sequence[Scenario]) -> str:
    """Draw the length of a step without each cost, next to its present length."""
    if not scenarios:
        return ""
    today = scenarios[0].step_ns + scenarios[0].saved_ns
    rows = [("as it is", today, duration(today))]
    rows += [
        (
            SCENARIO_WORDS.get(one.name, clean(one.name)),
            one.step_ns,
            f"{duration(one.step_ns)}, saves {percent(one.saved_ns / today) if today else '-'}",
        )
        for one in sorted(scenarios, key=lambda one: -one.saved_ns)
    ]
    said = " ".join(f"{name}: {figure}." for name, _, figure in rows)
    return length_bars("How long a step would be", said, rows)
