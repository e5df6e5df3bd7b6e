"""Renders the report as one self-contained HTML page: no script, no request, no font.

The sections and their order are decided here; `pacecar.formatting.page` has the parts of a page.
"""

from __future__ import annotations

from collections.abc import Iterator

from markupsafe import Markup

from pacecar.formatting.communicators_table import communicators_table
from pacecar.formatting.dates import second_text
from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.page.document import (
    Section,
    Tile,
    box,
    definitions,
    figure,
    folded,
    legend,
    numbered,
    paragraph,
    subheading,
    table_html,
    tiles,
    unbroken,
    whole_page,
)  # fmt: skip
from pacecar.formatting.quantities import percent, plural
from pacecar.records import LEDGER_HEADINGS

from ..document import Report, RunComparison
from ..figures import Interval, Spread
from ..formatting import bounds, change_words, elapsed, money, number, part_of, rate_word
from ..reading.notices import Notice
from . import charts, life_tables, tables, utilization_tables
from .comparison_tables import comparison_tables, letter

__all__ = ["comparison_page", "report_page"]


def report_page(report: Report) -> str:
    """Return the page of one run."""
    sections = [section for section in _sections(report) if any(section[2])]
    top = [
        paragraph(_when(report), "soft"),
        paragraph(unbroken(tables.headline(report)), "lead"),
        *_notices(report.notices),
        tiles(list(_tiles(report))),
        definitions("facts", tables.facts(report)),
    ]
    return whole_page(f"Run {report.run}", top, sections)


def comparison_page(comparison: RunComparison) -> str:
    """Return the page of several runs."""
    found = comparison_tables(comparison)
    sections: list[Section] = [(f"s{place}", table.name, [table_html(table)]) for place, table in enumerate(found)]
    drawn = []
    for place, report in enumerate(comparison.runs):
        name = f"{letter(place)}  {report.run}"
        pair = [(letter(place), report.whole)] if report.whole is not None else []
        # A drawing's name is unique on the page.
        drawn.append(figure(name, charts.ledger_pair(pair).replace("ameanstepbyheading", f"step{place}")))
    sections.append(("ledgers", "A mean step of each, all of the run after warm-up", drawn))
    top = [paragraph(line, "lead") for line in _verdicts(comparison)]
    top.append(box("info", "", comparison.warnings))
    return whole_page(f"{plural(len(comparison.runs), 'run')} compared", top, sections)


def _verdicts(comparison: RunComparison) -> Iterator[str]:
    for place, row in enumerate(comparison.rows):
        if row.stretch == "settled" and row.change is not None:
            said = f"{letter(place // 2)} against A: {row.verdict}, {change_words(row.change)}"
            yield f"{said}: {row.why}."


def _sections(report: Report) -> Iterator[Section]:
    yield (
        "life",
        "All attempts",
        [
            table_html(life_tables.life_table(report)),
            table_html(life_tables.attempts_table(report)),
            folded("By interval", life_tables.intervals_table(report)),
            folded("Under the names of ml-goodput-measurement", life_tables.google_table(report)),
        ],
    )
    yield (
        "pace",
        "Throughput over time",
        [
            figure("The job's pace; above it the tuner's trials", charts.rate_line(report)),
            table_html(tables.stability_table(report)),
            figure(
                "Spread of the windows: line 5th to 95th percentile, box 10th to 90th, stroke the median",
                charts.spread_pair(report, _spreads(report)),
            ),
        ],
    )
    yield (
        "ledger",
        "Where the time went",
        [
            figure("A mean step, by what it went to, over time", charts.ledger_line(report)),
            _legend(report),
            figure(
                "A mean step, before and after" if report.is_tuned else "A mean step",
                charts.ledger_pair(tables.sides_of(report)),
            ),
            table_html(tables.ledger_table(report)),
            folded("The time line in figures", tables.line_table(report)),
            *_communicators(report),
        ],
    )
    changes = tables.changes_table(report)
    gains = figure(
        "Share of step time saved: diamond expected, dot measured (filled: kept), line its interval",
        charts.gains(report.changes),
    )
    orders = [paragraph(text) for text in report.orders[-tables.ROWS_MAX :]]
    yield (
        "changes",
        "What changed and what it brought",
        [gains, table_html(changes), numbered(tables.reasons(report)), *orders],
    )
    ladder = report.ladder
    bars = "" if ladder is None else charts.ladder_bars(ladder)
    drawn = figure("How long a step would be at least", bars)
    yield "ladder", "What would help most", [drawn, table_html(tables.ladder_table(report))]
    yield "usage", "Utilization", [table_html(utilization_tables.usage_table(report))]
    yield (
        "energy",
        "Energy",
        [
            table_html(utilization_tables.energy_table(report)),
            table_html(utilization_tables.power_table(report)),
        ],
    )
    yield "cost", "Cost", [table_html(utilization_tables.cost_table(report))]
    yield (
        "incidents",
        "Stragglers and hangs",
        [table_html(utilization_tables.incidents(report)) or paragraph("None was reported.")],
    )
    yield "ranks", "Ranks", [table_html(utilization_tables.ranks_table(report))]
    yield "trust", "How far to trust this", [table_html(utilization_tables.trust_table(report))]


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
        yield box(classes, title, [notice.line for notice in notices if notice.is_damage is is_damage])


def _tiles(report: Report) -> Iterator[Tile]:
    """Yield the figures that readers look for first: name, figure, explanation."""
    side, before = report.after or report.before, report.before
    if side is not None and side.rate is not None:
        was = "" if side is before or before is None or before.rate is None else f"{number(before.rate.median)} before"
        yield "median pace", f"{number(side.rate.median)} {rate_word(report)}", was
        if report.change is not None:
            yield "after against before", *_change_tile(report, report.change)
        if report.proven_gain_ratio is not None:
            yield "proven by trials", *_proven_tile(report.proven_gain_ratio, report.proven_gain_low)
        yield f"stable within {tables.STABLE_WORD}", tables.stable_word(side.rate), "of pace, window by window"
        exposed_ns = part_of(side.ledger_ns, "exposed_communication")
        if exposed_ns is not None and (total := sum(side.ledger_ns.values())):
            yield "exposed communication", percent(exposed_ns / total), "of a mean step"
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
            f"{allowed}: {over.budget_ratio * 100:.2f} %",
        )


def _change_tile(report: Report, change: Interval) -> tuple[str, str]:
    more = bounds(change.low, change.high)
    if report.change_verdict not in ("faster", "slower"):
        more = f"{report.change_verdict}; {'no interval' if more == '-' else more}"
    return percent(change.change_ratio, signed=True), more


def _proven_tile(gain: float, low: float | None) -> tuple[str, str]:
    if low is None:
        return percent(gain), "of step time saved, with no bound"
    return f"≥ {percent(low)}", f"of step time saved; {percent(gain)} measured"


def _communicators(report: Report) -> tuple[Markup, ...]:
    table = communicators_table(report.communicators, tables.ROWS_MAX)
    return () if table is None else (subheading(table.name), table_html(table))


def _legend(report: Report) -> Markup:
    used = [name for name in LEDGER_HEADINGS if any(piece.ledger_ns.get(name) for piece in report.line)]
    return legend([(name, HEADING_WORDS[name]) for name in used])
