"""Formats a tuner's report for a terminal, as lines of at most so many columns.

What a person wants first stands first: what the tuner does now and why, then what is in force, then what was tried and
what became of it, then what the trials cost.  Pure.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from pacecar.formatting.plain_text import clean, clean_values
from pacecar.knobs import setting
from pacecar.records.commands import TunerChange, TunerReport

__all__ = ["WIDTH_MIN", "lines"]

WIDTH_MIN = 64
"""Narrower terminals wrap the lines; lines wider than WIDTH_MAX are hard to read."""

WIDTH_MAX = 100

CHANGES_SHOWN_MAX = 8


def lines(job: str, report: TunerReport, *, width: int = 80) -> Iterator[str]:
    """Yield the report; `job` and `report` are foreign text and are cleaned."""
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
        yield f"{'decision':<{width - 33}}{'expected':>10}{'measured':>10}  outcome"
        for change in report.changes[-CHANGES_SHOWN_MAX:]:
            yield _change(change, width)
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
    yield f"{'knob':<19}{'in force':>12}{'began with':>12}  possible"
    for knob, value in sorted(report.knobs.items()):
        began = report.began.get(knob)
        domain = report.domains.get(knob)
        possible = "not tuned"
        if domain is not None:
            shown = [setting(knob, other) for other in domain]
            possible = ", ".join(shown) if len(shown) <= 3 else f"{shown[0]} .. {shown[-1]}"
        if knob in report.by_hand:
            possible = "set by hand"
        cells = f"{setting(knob, value):>12}{'-' if began is None else setting(knob, began):>12}"
        yield f"{knob:<19}{cells}  {possible}"[:width]


def _change(change: TunerChange, width: int) -> str:
    what = f"{change.step} {change.knob} {setting(change.knob, change.from_value)}"
    what += f" -> {setting(change.knob, change.to_value)}"
    outcome = "advised" if change.kind == "advise" else (change.outcome or "open").replace("_", " ")
    room = width - 33
    what = what if len(what) < room else what[: room - 2] + "…"
    return f"{what:<{room}}{_gain(change.expected_gain_ratio):>10}{_gain(change.measured_gain_ratio):>10}  {outcome}"


def _gain(ratio: float | None) -> str:
    """Return the change of step time: a gain of 0.1 is -10.0 %."""
    return "-" if ratio is None else f"{-ratio * 100:+.1f} %"


def _bill(report: TunerReport) -> str:
    trials = f"{report.trials} trial" + ("" if report.trials == 1 else "s")
    if report.elapsed_ns == 0:
        return f"Exploration: {trials}, nothing measured yet; allowed {report.budget_ratio:.1%} of the run"
    spent = report.exploration_ns / report.elapsed_ns
    return (
        f"Exploration: {trials} lost {report.exploration_ns / 1e9:.2f} s of {report.elapsed_ns / 1e9:.0f} s"
        f" ({spent:.2%}, allowed {report.budget_ratio:.1%})"
    )


def _uid(uid: int | None) -> str:
    return "an unknown user" if uid is None else f"uid {uid}"


def _wrapped(text: str, width: int, *, bullet: str = "  ") -> list[str]:
    return textwrap.wrap(text, width, initial_indent=bullet, subsequent_indent="  ", break_on_hyphens=False)
