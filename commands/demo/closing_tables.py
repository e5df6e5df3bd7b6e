"""Draws what closes a demo: the tables of its report, and what the report does not have.

That is the loss on held-out text, and where pacecar cost more than its budget by when that is paid back: a demo is
short, so the start weighs much.
"""

from __future__ import annotations

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..report.document import Report
from ..report.output.terminal import terminal_report
from .result import Result

__all__ = ["closing"]


def closing(result: Result, report: Report, places: dict[str, str], console: Console) -> Group:
    """Return what is printed at the end; `places` says where to look, in order."""
    return Group(*terminal_report(report, console), *_facts(result), _places(places))


def _facts(result: Result) -> list[RenderableType]:
    losses = result.losses
    lines = [
        ("loss", f"{_number(losses.first)} -> {_number(losses.last)} nats"),
        ("held out", f"{_number(losses.validation_first)} -> {_number(losses.validation_last)} bits per byte"),
    ]
    debt = _debt(result)
    if debt is not None:
        lines.append(("overhead", debt))
    return [Text(), *(Text.assemble((f"{name:<9} ", "dim"), text) for name, text in lines)]


def _debt(result: Result) -> str | None:
    """Return by when pacecar's cost is within its budget; None where it is, or no budget is known."""
    overhead, budget = result.overhead, result.overhead_budget
    if overhead is None or budget is None or overhead.ratio <= budget:
        return None
    paid = overhead.paid_by_seconds(budget)
    if paid is not None:
        more = paid - overhead.wall_seconds
        return f"start and trials are paid back after {more:.{1 if more < 10 else 0}f} s more of training"
    if overhead.late_ratio is not None:
        return f"it goes on over its budget, with {overhead.late_ratio * 100:.2f} % of late"
    return "it is too early to say by when it is within its budget"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _places(places: dict[str, str]) -> RenderableType:
    # A path that is wrapped cannot be copied.
    return Group(
        *(
            Text.assemble((f"{name:<9} ", "dim"), place, no_wrap=True, overflow="ignore")
            for name, place in places.items()
        )
    )
