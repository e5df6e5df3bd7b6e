"""Formats a tuner's report as lines for a terminal.

The order follows the reader's questions: what the tuner does now and why, which knobs are in force, what was tried with
which result, and what the trials cost.  Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from pacecar.formatting.plain_text import clean, clean_values
from pacecar.formatting.quantities import DASH, percent, plural
from pacecar.formatting.tables import TextColumn, table_lines
from pacecar.knobs import setting
from pacecar.records.commands import TunerChange, TunerReport

__all__ = ["WIDTH_MIN", "lines"]

WIDTH_MIN = 64
"""On narrower terminals lines wrap; lines wider than WIDTH_MAX are hard to read."""

WIDTH_MAX = 100

CHANGES_SHOWN_MAX = 8


def lines(job: str, report: TunerReport, *, width: int = 80) -> Iterator[str]:
    """Yield the report; `job` and `report` are untrusted text and are cleaned."""
    job, report = clean(job), clean_values(report)
    width = max(WIDTH_MIN, min(WIDTH_MAX, width))
    yield f"{job}, step {report.step}: {report.state}"
    yield from _wrapped(report.detail, width)
    yield f"  mode {report.mode}, policy {report.policy}"
    if report.knobs:
        yield ""
        yield from _knobs(report, width)
    if report.changes:
        yield ""
        yield from _changes(report.changes[-CHANGES_SHOWN_MAX:], width)
    yield ""
    yield _bill(report)
    for title, sentences in (
        ("Orders", [f"step {o.step}: {o.action} by {_uid(o.uid)}: {o.outcome}: {o.detail}" for o in report.orders]),
        ("Advice", list(report.advice)),
        ("Node of rank 0", list(report.node)),
    ):
        if sentences:
            yield ""
            yield title
            for sentence in sentences:
                yield from _wrapped(sentence, width, bullet="- ")


def _knobs(report: TunerReport, width: int) -> Iterator[str]:
    rows = []
    for knob, value in sorted(report.knobs.items()):
        began = report.began.get(knob)
        domain = report.domains.get(knob)
        possible = "not tuned"
        if domain is not None:
            shown = [setting(knob, other) for other in domain]
            possible = ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} .. {shown[-1]}"
        if knob in report.by_hand:
            possible = "set by hand"
        rows.append((knob, setting(knob, value), DASH if began is None else setting(knob, began), possible))
    columns = (TextColumn("knob", 19), TextColumn("in force", 10, is_number=True),
               TextColumn("began with", 10, is_number=True), TextColumn("possible"))  # fmt: skip
    return table_lines(columns, rows, width)


def _changes(changes: Sequence[TunerChange], width: int) -> Iterator[str]:
    rows = []
    for one in changes:
        what = f"{one.step} {one.knob} {setting(one.knob, one.from_value)} -> {setting(one.knob, one.to_value)}"
        outcome = "advised" if one.kind == "advise" else (one.outcome or "open").replace("_", " ")
        rows.append((what, _saved(one.expected_gain_ratio), _saved(one.measured_gain_ratio), outcome))
    columns = (TextColumn("decision", width - 33), TextColumn("expected", 8, is_number=True),
               TextColumn("measured", 8, is_number=True), TextColumn("outcome"))  # fmt: skip
    return table_lines(columns, rows, width)


def _saved(ratio: float | None) -> str:
    """Return the change of step time: a gain of 0.1 is -10.0 %."""
    return percent(None if ratio is None else -ratio, signed=True)


def _bill(report: TunerReport) -> str:
    trials, allowed = plural(report.trials, "trial"), percent(report.budget_ratio)
    if report.elapsed_ns == 0:
        return f"Exploration: {trials}, nothing measured yet; allowed {allowed} of the run"
    spent = report.exploration_ns / report.elapsed_ns
    return (
        f"Exploration: {trials} lost {report.exploration_ns / 1e9:.2f} s of {report.elapsed_ns / 1e9:.0f} s"
        f" ({percent(spent, digits=2)}, allowed {allowed})"
    )


def _uid(uid: int | None) -> str:
    return "an unknown user" if uid is None else f"uid {uid}"


def _wrapped(text: str, width: int, *, bullet: str = "  ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent="  ", break_on_hyphens=False)
