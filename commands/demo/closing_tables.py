"""Draws the end of a demo: the report's tables, the losses, and when pacecar's overhead falls within its budget.

A demo is short, so start-up and trials weigh more in its overhead than they would in a real run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..report.document import Report, ReportLosses
from ..report.output.terminal import terminal_report

__all__ = ["closing", "within_budget_after_seconds"]


def within_budget_after_seconds(report: Report, settled_ratio: float | None) -> float | None:
    """Return how many more seconds of training bring pacecar's overhead within its budget; 0 where it is.

    `settled_ratio` is the overhead since the last switch, which is assumed to go on.  None: never, or unknown.
    """
    overhead, budget = report.overhead.ratio, report.overhead.budget_ratio
    if overhead is None:
        return None
    if overhead <= budget:
        return 0.0
    if settled_ratio is None or settled_ratio >= budget:
        return None
    trained_ns = max(rank.steps * (rank.step_mean_ns or 0) for rank in report.ranks)
    return (overhead - budget) * trained_ns / 1e9 / (budget - settled_ratio)


def closing(report: Report, settled_ratio: float | None, places: Mapping[str, str], console: Console) -> Group:
    """Return what is printed at the end; `places` names the files left behind, in this order."""
    losses = report.losses or ReportLosses()
    lines = [
        ("loss", f"{_number(losses.first)} -> {_number(losses.last)} nats"),
        ("held out", f"{_number(losses.validation_first)} -> {_number(losses.validation_last)} bits per byte"),
    ]
    overspent = _overspent(report, settled_ratio)
    if overspent is not None:
        lines.append(("overhead", overspent))
    return Group(*terminal_report(report, console), Text(), *_rows(lines), *_rows(places.items()))


def _overspent(report: Report, settled_ratio: float | None) -> str | None:
    """Return when the overhead falls within its budget; None where it is already."""
    more = within_budget_after_seconds(report, settled_ratio)
    if more == 0 or report.overhead.ratio is None:
        return None
    if more is not None:
        return f"within its budget after {more:.{1 if more < 10 else 0}f} s more of training"
    if settled_ratio is not None:
        return f"still above its budget: {settled_ratio * 100:.2f} % since the last switch"
    return "above its budget, and too early to say for how long"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _rows(rows: Iterable[tuple[str, str]]) -> Iterator[RenderableType]:
    for name, text in rows:
        # A wrapped path cannot be copied.
        yield Text.assemble((f"{name:<9} ", "dim"), text, no_wrap=True, overflow="ignore")
