"""Writes the report as one HTML page that needs nothing else: no script, no request, no font.

It is sent by mail, kept with a paper and opened in ten years.  So style and drawings stand in it, its own content
security policy forbids it to load anything, and all figures are text and tables that a keyboard and a screen reader
reach.  The markup is in `page.html.jinja`, which escapes whatever it prints: what comes from records (names, reasons)
is never markup.  Only drawings (`charts`), and parts that the template itself has made, are handed to it as markup.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from pacecar import __version__
from pacecar.formatting.dates import second_text
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import percent, plural
from pacecar.records import LEDGER_HEADINGS

from . import charts, tables, utilization_tables
from .comparison_tables import comparison_tables, letter
from .document import Report, RunComparison
from .figures import Interval, Spread
from .formatting import bounds, change_words, elapsed, money, number, rate_word
from .notices import Notice
from .tables import Table

__all__ = ["comparison_page", "report_page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is fetched; style stands in the page itself."""

Section = tuple[str, str, list[Markup]]
"""Anchor, title, pieces of the page."""

NOTHING = Markup()


def report_page(report: Report) -> str:
    """Return the page of one run."""
    sections = [section for section in _sections(report) if any(section[2])]
    top = [
        _part("paragraph", _when(report), "soft"),
        _part("paragraph", _unbroken(tables.headline(report)), "lead"),
        *_notices(report.notices),
        _part("tiles", list(_tiles(report))),
        _part("definitions", "facts", tables.facts(report)),
    ]
    return _page(f"Run {report.run}", top, sections)


def comparison_page(comparison: RunComparison) -> str:
    """Return the page of several runs."""
    found = comparison_tables(comparison)
    sections: list[Section] = [(f"s{place}", table.name, [_table(table)]) for place, table in enumerate(found)]
    drawn = []
    for place, report in enumerate(comparison.runs):
        name = f"{letter(place)}  {report.run}"
        pair = [(letter(place), report.whole)] if report.whole is not None else []
        # A drawing's name is unique on the page.
        drawn.append(_figure(name, charts.ledger_pair(pair).replace("ameanstepbyheading", f"step{place}")))
    sections.append(("ledgers", "A mean step of each, all of the run after warm-up", drawn))
    top = [_part("paragraph", line, "lead") for line in _verdicts(comparison)]
    if comparison.warnings:
        top.append(_part("box", "info", "", comparison.warnings))
    return _page(f"{plural(len(comparison.runs), 'run')} compared", top, sections)


def _verdicts(comparison: RunComparison) -> Iterator[str]:
    for place, row in enumerate(comparison.rows):
        if row.stretch == "settled" and row.change is not None:
            said = f"{letter(place // 2)} against A: {row.verdict}, {change_words(row.change)}"
            yield f"{said}: {row.why}."


def _sections(report: Report) -> Iterator[Section]:
    yield (
        "pace",
        "Throughput over time",
        [
            _figure("The job's pace; above it the tuner's trials", charts.rate_line(report)),
            _table(tables.stability_table(report)),
            _figure(
                "Spread of the windows: line 5th to 95th percentile, box 10th to 90th, stroke the median",
                charts.spread_pair(report, _spreads(report)),
            ),
        ],
    )
    yield (
        "ledger",
        "Where the time went",
        [
            _figure("A mean step, by what it went to, over time", charts.ledger_line(report)),
            _legend(report),
            _figure(
                "A mean step, before and after" if report.is_tuned else "A mean step",
                charts.ledger_pair(tables.sides_of(report)),
            ),
            _table(tables.ledger_table(report)),
            _folded("The time line in figures", tables.line_table(report)),
        ],
    )
    changes = tables.changes_table(report)
    gains = _figure(
        "Share of step time saved: diamond expected, dot measured (filled: kept), line its interval",
        charts.gains(report.changes),
    )
    orders = [_part("paragraph", text) for text in report.orders[-tables.ROWS_MAX :]]
    yield "changes", "What changed and what it brought", [gains, _table(changes), _reasons(report), *orders]
    ladder = report.ladder
    drawn = NOTHING if ladder is None else _figure("How long a step would be at least", charts.ladder_bars(ladder))
    yield "ladder", "What would help most", [drawn, _table(tables.ladder_table(report))]
    yield "usage", "Utilization", [_table(utilization_tables.usage_table(report))]
    yield "energy", "Energy", [_table(utilization_tables.energy_table(report))]
    yield "cost", "Cost", [_table(utilization_tables.cost_table(report))]
    yield (
        "incidents",
        "Stragglers and hangs",
        [_table(utilization_tables.incidents(report)) or _part("paragraph", "None was reported.")],
    )
    yield "ranks", "Ranks", [_table(utilization_tables.ranks_table(report))]
    yield "trust", "How far to trust this", [_table(utilization_tables.trust_table(report))]


def _reasons(report: Report) -> Markup:
    found = tables.reasons(report)
    return _part("reasons", found) if found else NOTHING


def _spreads(report: Report) -> list[tuple[str, Spread]]:
    return [(name, side.rate) for name, side in tables.sides_of(report) if side.rate is not None]


def _when(report: Report) -> str:
    if report.began_wall_ns is None:
        return f"pacecar report, {plural(report.ranks_seen, 'rank')}"
    return (
        f"began {second_text(report.began_wall_ns)}, {elapsed(report.duration_ns)}, {plural(report.ranks_seen, 'rank')}"
    )


def _notices(notices: tuple[Notice, ...]) -> Iterator[Markup]:
    for is_damage, classes, title in (
        (True, "alarm", "Parts of the run are lost or could not be read"),
        (False, "info", ""),
    ):
        found = [_notice_text(notice) for notice in notices if notice.is_damage is is_damage]
        if found:
            yield _part("box", classes, title, found)


def _notice_text(notice: Notice) -> str:
    more = f" ({notice.count} such)" if notice.count > 1 else ""
    return f"{notice.place}: {notice.text}{more}"


def _tiles(report: Report) -> Iterator[tuple[str, str, str]]:
    """Yield what the reader looks for first: name, figure, and what it is of."""
    side, before = report.after or report.before, report.before
    if side is not None and side.rate is not None:
        was = "" if side is before or before is None or before.rate is None else f"{number(before.rate.median)} before"
        yield "median pace", f"{number(side.rate.median)} {rate_word(report)}", was
        if report.change is not None:
            yield "after against before", *_change_tile(report, report.change)
        if report.proven_gain_ratio is not None:
            yield "proven by trials", *_proven_tile(report.proven_gain_ratio, report.proven_gain_low)
        yield f"stable within {tables.STABLE_WORD}", tables.stable_word(side.rate), "of pace, window by window"
        total = sum(side.ledger_ns.values())
        if total:
            yield "exposed communication", percent(side.ledger_ns["exposed_communication"] / total), "of a mean step"
    energy = report.energy_after or report.energy_before
    if energy is not None and energy.joules_per_sample is not None:
        yield "energy", f"{number(energy.joules_per_sample)} J", "a sample"
    if report.cost is not None and report.cost.run is not None:
        of_what = plural(report.cost.gpus, "rank" if report.device == "cpu" else "GPU")
        yield "cost of the run", money(report.cost.run), f"{of_what}, {elapsed(report.duration_ns)}"
    over = report.overhead
    if over.ratio is not None:
        allowed = f"allowed by the {'job' if over.is_jobs_budget else 'configuration here'}"
        yield (
            "pacecar's overhead",
            f"{over.ratio * 100:.2f} %",
            _unbroken(f"{allowed}: {over.budget_ratio * 100:.2f} %"),
        )


def _unbroken(text: str) -> str:
    """Return text whose lines do not end between a figure and its per cent."""
    return text.replace(" %", "\N{NO-BREAK SPACE}%")


def _change_tile(report: Report, change: Interval) -> tuple[str, str]:
    more = bounds(change.low, change.high)
    if report.change_verdict not in ("faster", "slower"):
        more = f"{report.change_verdict}; {'no interval' if more == '-' else more}"
    return percent(change.change_ratio, signed=True), _unbroken(more)


def _proven_tile(gain: float, low: float | None) -> tuple[str, str]:
    if low is None:
        return percent(gain), "of step time saved, with no bound"
    return f"≥ {percent(low)}", _unbroken(f"of step time saved; {percent(gain)} measured")


def _legend(report: Report) -> Markup:
    used = [name for name in LEDGER_HEADINGS if any(piece.ledger_ns.get(name) for piece in report.line)]
    return _part("legend", [(name, HEADING_WORDS[name]) for name in used]) if used else NOTHING


def _figure(caption: str, drawing: str) -> Markup:
    return _part("figure", caption, Markup(drawing)) if drawing else NOTHING


def _folded(title: str, table: Table | None) -> Markup:
    return NOTHING if table is None else _part("folded", title, _table(table))


def _table(table: Table | None) -> Markup:
    return NOTHING if table is None else _part("table", table)


def _page(title: str, top: Sequence[Markup], sections: Sequence[Section]) -> str:
    style = Markup(_file("style.css"))
    return str(_part("page", title, POLICY, style, top, sections, __version__))


def _part(name: str, *values: Any) -> Markup:  # noqa: ANN401  a macro takes what it prints
    """Return the part of the page that the macro `name` makes of `values`, all of which it escapes."""
    return Markup(getattr(_template(), name)(*values))


@cache
def _template() -> Any:  # noqa: ANN401  its macros are attributes that only the template knows
    environment = Environment(loader=FunctionLoader(_file), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").module


def _file(name: str) -> str:
    return (resources.files("pacecar.commands.report") / name).read_text(encoding="utf-8")
