"""Makes the tables of a comparison of runs: the runs, the verdicts, and their quantities."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pacecar.formatting.ledger_headings import HEADING_WORDS
from pacecar.formatting.quantities import percent
from pacecar.formatting.tables import Table, table_of_rows
from pacecar.records import LEDGER_HEADINGS

from ..comparison import settled_side
from ..document import Report, RunComparison, RunSide
from ..formatting import bounds, elapsed, joules, knob_words, milliseconds, money, number, part_of

__all__ = ["comparison_tables", "letter"]


def comparison_tables(comparison: RunComparison) -> list[Table]:
    """Return the legend of runs, the verdicts, and the quantities of the settled stretches."""
    letters = [letter(place) for place in range(len(comparison.runs))]
    legend = [(name, report.run, report.job, str(report.world_size or report.ranks_seen), elapsed(report.duration_ns))
              for name, report in zip(letters, comparison.runs, strict=True)]  # fmt: skip
    head = ("", "run", "job", "ranks", "lasted")
    return [table_of_rows("The runs", head, legend, texts=3), _verdicts(comparison), _quantities(comparison, letters)]


def _verdicts(comparison: RunComparison) -> Table:
    rows = []
    for place, row in enumerate(comparison.rows):
        change = row.change
        rows.append((
            letter(place // 2), row.stretch, f"{number(row.rate)} {comparison.rate_unit}/s", milliseconds(row.step_ns),
            percent(None if change is None else change.change_ratio, signed=True),
            "-" if change is None else bounds(change.low, change.high), percent(row.noise_ratio), row.verdict or "-",
            row.why,
        ))  # fmt: skip
    note = (
        "Change of the median rate against run A with its 95 % interval: circular block bootstrap over windows of steps"
        " (Politis and Romano 1992), block length by Politis and White (2004). Noise is"
        " how much a run differs from itself between its halves. One run is one sample: no interval covers what"
        " differs from day to day."
    )
    head = ("run", "stretch", "median", "mean step", "change", "interval", "noise", "verdict", "why")
    return table_of_rows("Which is faster", head, rows, texts=2, note=note, long=8)


def letter(place: int) -> str:
    """Return A, B, C ... for the runs in order; A1 after Z."""
    return chr(65 + place % 26) + (str(place // 26) if place >= 26 else "")


def _quantities(comparison: RunComparison, names: list[str]) -> Table:
    sides = [settled_side(report)[1] for report in comparison.runs]
    rows: list[tuple[str, ...]] = [
        *_knobs(sides),
        ("coefficient of variation", *(percent(s.rate.cv if s is not None and s.rate else None) for s in sides)),
        ("step, 95th percentile", *(milliseconds(None if s is None else s.step_p95_ns) for s in sides)),
    ]
    for heading in LEDGER_HEADINGS:
        parts = [None if s is None else part_of(s.ledger_ns, heading) for s in sides]
        if any(parts):
            rows.append((HEADING_WORDS[heading], *_with_differences(parts)))
    rows.append(("communication under compute", *(percent(None if s is None else s.overlap_ratio) for s in sides)))
    rows.append(("energy a sample", *(joules(_settled_energy(report)) for report in comparison.runs)))
    rows.append(("a million tokens", *(money(_settled_cost(report)) for report in comparison.runs)))
    rows.append(("pacecar's overhead", *(percent(report.overhead.ratio) for report in comparison.runs)))
    rows = [row for row in rows if any(cell != "-" for cell in row[1:])]
    return table_of_rows(
        "The settled stretch of each", ("", *names), rows, note="Differences in brackets are against run A."
    )


def _knobs(sides: Sequence[RunSide | None]) -> Iterator[tuple[str, ...]]:
    names = sorted({knob for side in sides if side is not None for knob in side.knobs})
    for knob in names:
        values = (None if side is None else side.knobs.get(knob) for side in sides)
        yield (knob, *("-" if value is None else knob_words(knob, value) for value in values))


def _with_differences(values: list[int | None]) -> Iterator[str]:
    """Yield each duration, with its difference from the first."""
    first = values[0]
    for place, value in enumerate(values):
        differs = place > 0 and value is not None and first is not None
        yield milliseconds(value) + (f" ({((value or 0) - (first or 0)) / 1e6:+.2f})" if differs else "")


def _settled_energy(report: Report) -> float | None:
    energy = report.energy_after if report.is_tuned else report.energy_before
    return None if energy is None else energy.joules_per_sample


def _settled_cost(report: Report) -> float | None:
    if report.cost is None:
        return None
    side = report.cost.after if report.is_tuned else report.cost.before
    return None if side is None else side.per_million_tokens
