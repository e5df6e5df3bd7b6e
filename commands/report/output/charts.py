"""Draws the report's charts as plain SVG, without a library, script, font or external file.

Each drawing has a title and a description for screen readers, and a table beside it has the figures.  Colours are
classes that the page's style sets for light and dark.  No colour alone carries meaning: headings follow the order of
the legend, verdicts have marks, and expected and measured gains have different shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.page.svg import INNER, LEFT, RIGHT, WIDTH, Bar, length_bars, stacked_bars, ticks
from pacecar.formatting.page.svg import drawing as _svg
from pacecar.formatting.page.svg import line as _line
from pacecar.formatting.page.svg import rect as _rect
from pacecar.formatting.page.svg import text as _text
from pacecar.formatting.quantities import percent
from pacecar.records import LEDGER_HEADINGS, WhatIf

from ..document import Piece, Report, ReportChange, RunSide
from ..figures import Spread
from ..formatting import knob_words, milliseconds, number, rate_word

__all__ = ["gains", "ladder_bars", "ledger_line", "ledger_pair", "rate_line", "spread_pair"]

GAINS_DRAWN_MAX = 40

HOLE_PIECES = 4
"""A gap of more pieces of the time line is a stop of the job; in a shorter one no step was measured."""


def _span_ns(report: Report) -> int:
    last = report.line[-1].at_ns + report.line_width_ns if report.line else 0
    return max(last, 1)


def _x(report: Report, at_ns: float) -> float:
    return LEFT + at_ns / _span_ns(report) * INNER


def _time_axis(report: Report, top: float, bottom: float) -> Iterator[str]:
    span = _span_ns(report) / 1e9
    unit, name = next(
        (u, n) for u, n in ((1, "s"), (60, "min"), (3600, "h"), (86400, "d")) if span / u < 200 or u == 86400
    )
    for tick in ticks(0, span / unit, 9):
        x = LEFT + tick * unit / span * INNER
        yield _line(x, top, x, bottom + 4, "grid")
        if x < WIDTH - RIGHT - 12:
            yield _text(x, bottom + 18, f"{tick:g}" + (f" {name}" if tick == 0 else ""), "axis middle")


def _value_axis(high: float, top: float, bottom: float, unit: str) -> Iterator[str]:
    for tick in ticks(0, high, 4):
        y = bottom - tick / high * (bottom - top)
        yield _line(LEFT, y, WIDTH - RIGHT, y, "grid")
        yield _text(LEFT - 8, y + 4, f"{tick:g}", "axis end")
    yield _text(4, top - 10, unit, "axis")


def rate_line(report: Report) -> str:
    """Draw the job's pace over time, with trials above and the compared stretches behind."""
    top, bottom = 74, 244
    rates = [(piece.at_ns, _rate(report, piece)) for piece in report.line]
    known = [rate for _, rate in rates if rate is not None]
    if not known:
        return ""
    high = max(known) * 1.08
    said = f"From {number(min(known))} to {number(max(known))} {rate_word(report)}."
    for name, side in (("before", report.before), ("after", report.after)):
        if side is not None and side.rate is not None:
            said += f" Median {name}: {number(side.rate.median)}."

    def body() -> Iterator[str]:
        yield from _stretches(report, top, bottom)
        yield from _time_axis(report, top, bottom)
        yield from _value_axis(high, top, bottom, rate_word(report))
        path, joined = [], None
        for at_ns, rate in rates:
            if rate is None:
                continue
            x = _x(report, at_ns + report.line_width_ns / 2)
            y = bottom - rate / high * (bottom - top)
            is_joined = joined is not None and at_ns - joined <= HOLE_PIECES * report.line_width_ns
            path.append(f"{'L' if is_joined else 'M'}{x:.1f} {y:.1f}" + ("" if is_joined else "h0.1"))
            joined = at_ns
        yield f'<path class="curve" d="{"".join(path)}"/>'
        yield from _trials(report, 34)

    return _svg(bottom + 28, "Throughput over time", said, body())


def _rate(report: Report, piece: Piece) -> float | None:
    if report.rate_unit == "samples":
        return piece.rate
    return 1e9 / piece.pace_ns if piece.pace_ns else None


def _stretches(report: Report, top: float, bottom: float) -> Iterator[str]:
    if report.line_start_wall_ns is None or not report.is_tuned:
        return
    for name, side in (("before", report.before), ("after", report.after)):
        if side is None:
            continue
        start = _x(report, max(0, side.began_wall_ns - report.line_start_wall_ns))
        end = _x(report, max(0, side.ended_wall_ns - report.line_start_wall_ns))
        yield _rect(start, top, end - start, bottom - top, "stretch")
        yield _text(start + 4, top + 13, name, "axis")


def _trials(report: Report, y: float) -> Iterator[str]:
    """Yield a lane with each trial from decision to verdict, with its number and outcome."""
    if report.line_start_wall_ns is None or not report.changes:
        return
    yield _text(4, y + 11, "trials", "axis")
    taken = -1.0
    for place, change in enumerate(report.changes, start=1):
        start = _x(report, max(0, change.wall_ns - report.line_start_wall_ns))
        ended = change.verdict_wall_ns
        end = WIDTH - RIGHT if ended is None else _x(report, max(0, ended - report.line_start_wall_ns))
        hint = f"{place}: {change.knob} {_way(change)}: {outcome_words(change)}"
        yield _rect(start, y, max(end - start, 2), 14, f"trial {change.outcome or change.kind}", hint)
        label = f"{place}{_mark(change)}"
        if start - 1 > taken:
            yield _text(start, y - 4, label, "axis strong")
            taken = start + 7.5 * len(label)


def _mark(change: ReportChange) -> str:
    return {"kept": " ✓", "rolled_back": " ✗", "barred": " ✗"}.get(change.outcome or "", "")


def outcome_words(change: ReportChange) -> str:
    """Return the outcome of a change."""
    if change.outcome is None:
        return "advice" if change.kind == "advise" else "still open"
    return change.outcome.replace("_", " ")


def _way(change: ReportChange) -> str:
    return f"{knob_words(change.knob, change.from_value)} → {knob_words(change.knob, change.to_value)}"


def ledger_line(report: Report) -> str:
    """Draw the ledger of a step over time."""
    top, bottom = 24, 224
    heights = [sum(piece.ledger_ns.values()) for piece in report.line]
    if not heights or max(heights) == 0:
        return ""
    # Bars are cut at four times the usual height, so that one checkpoint does not flatten all other steps.
    usual = sorted(heights)[int(len(heights) * 0.9)] if len(heights) > 9 else max(heights)
    high = min(max(heights), 4 * max(usual, 1)) * 1.05 / 1e6
    whole = report.whole or report.before
    said = "A mean step of a mean rank, stacked by the headings of the ledger."
    if whole is not None:
        said += " " + ledger_words(whole)

    def body() -> Iterator[str]:
        yield from _time_axis(report, top, bottom)
        yield from _value_axis(high, top, bottom, "ms a step")
        for piece, next_ns in zip(report.line, [*(piece.at_ns for piece in report.line[1:]), None], strict=True):
            lasts_ns = report.line_width_ns
            if next_ns is not None and next_ns - piece.at_ns <= HOLE_PIECES * lasts_ns:
                lasts_ns = next_ns - piece.at_ns
            width = lasts_ns / _span_ns(report) * INNER
            x, y = _x(report, piece.at_ns), float(bottom)
            for heading in LEDGER_HEADINGS:
                part = piece.ledger_ns.get(heading, 0) / 1e6 / high * (bottom - top)
                part = min(part, y - top)
                if part > 0.02:
                    y -= part
                    yield _rect(x, y, width + 0.15, part, heading)

    return _svg(bottom + 28, "Step ledger over time", said, body())


def ledger_words(side: RunSide) -> str:
    """Return the shares of a mean step by heading."""
    total = sum(side.ledger_ns.values())
    if total == 0:
        return "Nothing was measured."
    parts = [f"{HEADING_WORDS[name]} {percent(ns / total)}" for name, ns in side.ledger_ns.items() if ns]
    return ", ".join(parts) + "."


def ledger_pair(sides: Sequence[tuple[str, RunSide]]) -> str:
    """Draw a mean step of each side as one bar, on one scale."""
    said = " ".join(
        f"{name}: {milliseconds(sum(side.ledger_ns.values()))}: {ledger_words(side)}" for name, side in sides
    )
    bars = [
        Bar(
            name,
            side.ledger_ns,
            milliseconds(sum(side.ledger_ns.values())),
            {part: f"{HEADING_WORDS[part]}: {milliseconds(ns)}" for part, ns in side.ledger_ns.items()},
        )
        for name, side in sides
    ]
    return stacked_bars("A mean step by heading", said, bars)


def gains(changes: Sequence[ReportChange]) -> str:
    """Draw the expected and measured saving of each change, with the interval of its trial."""
    shown = [(place, one) for place, one in enumerate(changes, start=1) if one.measured_gain_ratio is not None]
    shown = shown[-GAINS_DRAWN_MAX:]
    if not shown:
        return ""
    every = [
        value
        for _, one in shown
        for value in (one.expected_gain_ratio, one.measured_gain_ratio, one.gain_low, one.gain_high, 0.0)
        if value is not None
    ]
    low, high = max(-1.0, min(every) - 0.02), min(1.0, max(every) + 0.02)
    left, inner = 250, WIDTH - 250 - 110
    said = " ".join(
        f"{place}, {one.knob} {_way(one)}: saved {percent(one.measured_gain_ratio)}, expected"
        f" {percent(one.expected_gain_ratio)}, {outcome_words(one)}."
        for place, one in shown
    )

    def x(value: float) -> float:
        return left + (min(max(value, low), high) - low) / (high - low) * inner

    def body() -> Iterator[str]:
        bottom = 14 + 26 * len(shown)
        for tick in ticks(low * 100, high * 100, 7):
            yield _line(x(tick / 100), 8, x(tick / 100), bottom + 2, "grid" if abs(tick) > 1e-9 else "zero")
            yield _text(x(tick / 100), bottom + 16, f"{tick:+g} %" if tick else "0", "axis middle")
        for row, (place, one) in enumerate(shown):
            y = 24 + 26 * row
            yield _text(4, y + 4, f"{place}  {one.knob} {_way(one)}"[:40])
            if one.gain_low is not None and one.gain_high is not None:
                yield _line(x(one.gain_low), y, x(one.gain_high), y, "whisker")
            if one.expected_gain_ratio is not None:
                at = x(one.expected_gain_ratio)
                yield f'<path class="expected" d="M{at:.1f} {y - 7}l6 7l-6 7l-6 -7Z"/>'
            assert one.measured_gain_ratio is not None, "only those are shown"
            measured, at = "measured" if one.outcome == "kept" else "measured open", x(one.measured_gain_ratio)
            yield f'<circle class="{measured}" cx="{at:.1f}" cy="{y}" r="5"/>'
            if one.measured_gain_ratio < low:  # off the scale: print the figure
                yield _text(at + 10, y + 4, percent(one.measured_gain_ratio), "axis")
            yield _text(WIDTH - 100, y + 4, outcome_words(one) + _mark(one))

    return _svg(40 + 26 * len(shown), "Expected and measured gain", said, body())


def ladder_bars(ladder: WhatIf) -> str:
    """Draw the length of a step today and without each cost."""
    rows = [("as it is", ladder.pace_ns, 0.0)]
    rows += [
        (SCENARIO_WORDS.get(rung.name, rung.name) if rung.name != "at_most_all"
         else "communication, data, launch gaps gone",
         rung.step_ns, rung.gain_ratio)
        for rung in sorted(ladder.rungs, key=lambda rung: -rung.gain_ratio)
    ]  # fmt: skip
    bars = [
        (name, ns, milliseconds(ns) + (f", saves at most {percent(gain)}" if row else ""))
        for row, (name, ns, gain) in enumerate(rows)
    ]
    said = " ".join(f"{name}: {words}." for name, _, words in bars)
    return length_bars("What-if ladder", said, bars)


def spread_pair(report: Report, sides: Sequence[tuple[str, Spread]]) -> str:
    """Draw the spread of the windows' rates: 5th to 95th percentile, 10th to 90th, median."""
    high = max((spread.p95 for _, spread in sides), default=0) * 1.05
    if high <= 0:
        return ""
    said = " ".join(
        f"{name}: median {number(s.median)}, 10th to 90th percentile {number(s.p10)} to {number(s.p90)}."
        for name, s in sides
    )

    def body() -> Iterator[str]:
        bottom = 8 + 34 * len(sides)
        for tick in ticks(0, high, 8):
            x = LEFT + tick / high * INNER
            yield _line(x, 4, x, bottom, "grid")
            unit = f" {rate_word(report)}" if tick == 0 else ""
            yield _text(x, bottom + 14, f"{tick:g}{unit}", "axis" if unit else "axis middle")
        for row, (name, s) in enumerate(sides):
            y = 10 + row * 34
            yield _text(LEFT - 8, y + 15, name, "end")
            p5, p10, middle, p90, p95 = (LEFT + v / high * INNER for v in (s.p5, s.p10, s.median, s.p90, s.p95))
            yield _line(p5, y + 11, p95, y + 11, "whisker")
            yield _rect(p10, y, p90 - p10, 22, "box")
            yield _line(middle, y - 2, middle, y + 24, "median")

    return _svg(34 + 34 * len(sides), "Spread of throughput", said, body())
