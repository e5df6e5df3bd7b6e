"""Makes the tables of the page that one trace and several ranks have in common, title, head, cells and their numbers.

The words are those of the terminal's tables (`output.words`); a page has room for more rows and columns, and its
readers sort them.  A missing number is a dash.
"""

from __future__ import annotations

from collections.abc import Sequence

from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.page.table import Cell, Table, sortable_table
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import DASH, DisplayUnit, bandwidth, duration, percent, size_text, unit_for
from pacecar.records import LEDGER_HEADINGS, Ledger

from ..one_rank.kernel_families import kernel_name
from ..output.words import GAP_WORDS
from ..report import CollectiveTotal, Family, Gap, Scenario, StepReport

__all__ = [
    "ROWS_MAX", "collectives_table", "count_cell", "families_table", "gaps_table", "ledger_table", "steps_table",
    "time_cell", "what_if_table", "word_cell",
]  # fmt: skip

ROWS_MAX = 200
"""Rows of one table, the largest; `--json` has all."""


KERNEL_CHARACTERS_MAX = 120
"""Of the name of a family's largest kernel."""


def time_cell(unit: DisplayUnit, value_ns: float | None) -> Cell:
    """Return a time in its column's unit."""
    return unit.text(value_ns), value_ns


def count_cell(value: float | None) -> Cell:
    """Return a whole number."""
    return (DASH, None) if value is None else (f"{value:,.0f}".replace(",", " "), value)


def word_cell(words: str | None) -> Cell:
    """Return words that somebody else wrote."""
    return clean(words) if words else DASH, None


def share_cell(part: float | None, whole: float | None) -> Cell:
    """Return a part of a whole as a percentage."""
    return (DASH, None) if part is None or not whole else (percent(part / whole), part / whole)


def cut_note(shown: int, found: int) -> str:
    """Return what a table leaves out."""
    return "" if shown >= found else f"The largest {shown} of {found}; --json has all."


def ledger_table(ledger: Ledger) -> Table | None:
    """Return the headings that have time, and always compute and unknown: how far to trust the rest."""
    unit = unit_for([ledger.wall_ns])
    rows = [
        ((HEADING_WORDS[name], None), time_cell(unit, value), share_cell(value, ledger.wall_ns))
        for name, value in ledger.parts().items()
        if value or name in {"compute", "unknown"}
    ]
    rows.append((("span", None), time_cell(unit, ledger.wall_ns), (DASH, None)))
    note = "Each instant has one heading; the headings add up to the span exactly."
    if ledger.communication_ns:
        hidden = percent(ledger.overlap_ratio)
        note += f" Communication took {unit.text(ledger.communication_ns)} in all, {hidden} of it under compute."
    return sortable_table("Ledger", ("heading", "time", "share"), rows, note=note)


def steps_table(steps: Sequence[StepReport]) -> Table | None:
    """Return a row for each step."""
    used = [name for name in LEDGER_HEADINGS if any(step.ledger.parts().get(name) for step in steps)]
    unit = unit_for([step.ledger.wall_ns for step in steps])
    rows = [
        (
            (str(step.step), step.step),
            time_cell(unit, step.ledger.wall_ns),
            *(time_cell(unit, step.ledger.parts().get(name)) for name in used),
        )
        for step in steps[:ROWS_MAX]
    ]
    head = ("step", "time", *(HEADING_WORDS[name] for name in used))
    note = "" if len(steps) <= ROWS_MAX else f"The first {ROWS_MAX} of {len(steps)} steps; --json has all."
    return sortable_table("Steps", head, rows, note=note)


def gaps_table(gaps: Sequence[Gap], span_ns: int) -> Table | None:
    """Return the idle time of the device by what ended it."""
    found = [gap for gap in gaps if gap.count]
    unit = unit_for([gap.duration_ns for gap in found])
    rows = [
        (
            (GAP_WORDS.get(gap.cause, clean(gap.cause)), None),
            time_cell(unit, gap.duration_ns),
            share_cell(gap.duration_ns, span_ns),
            count_cell(gap.count),
            (duration(gap.duration_ns / gap.count), gap.duration_ns / gap.count),
        )
        for gap in sorted(found, key=lambda gap: -gap.duration_ns)
    ]
    return sortable_table("Idle, by what ended it", ("ended by", "time", "share", "gaps", "mean"), rows)


def collectives_table(found: Sequence[CollectiveTotal]) -> Table | None:
    """Return the collectives by kind; waiting and wire where several ranks were put together."""
    largest = sorted(found, key=lambda one: -one.duration_ns)[:ROWS_MAX]
    has_split = any(one.wire_ns is not None for one in largest)
    unit, middle = unit_for([one.duration_ns for one in largest]), unit_for([one.median_ns for one in largest])
    rows = []
    for one in largest:
        split = [time_cell(unit, one.wait_ns), time_cell(unit, one.wire_ns)] if has_split else []
        rows.append(
            [
                word_cell(one.operation), word_cell(one.dtype), word_cell(one.group),
                (size_text(one.bytes), one.bytes), count_cell(one.group_size), count_cell(one.count),
                time_cell(unit, one.duration_ns), *split, time_cell(unit, one.exposed_ns),
                time_cell(middle, one.median_ns), time_cell(middle, one.min_ns), time_cell(middle, one.max_ns),
                (bandwidth(one.algorithm_bandwidth), one.algorithm_bandwidth),
                (bandwidth(one.bus_bandwidth), one.bus_bandwidth),
            ]
        )  # fmt: skip
    head = (
        "operation", "type", "group", "size", "ranks", "count", "time", *(("waiting", "wire") if has_split else ()),
        "exposed", "median", "shortest", "longest", "alg. bandwidth", "bus bandwidth",
    )  # fmt: skip
    note = (
        "Times are summed over ranks. Waiting is from a rank's own arrival to the last one's, wire from there to the"
        " end; bandwidths are of the wire."
        if has_split
        else "One trace cannot tell waiting from the wire, so bandwidths are lower bounds."
    )
    note = f"{note} {cut_note(len(largest), len(found))}".strip()
    return sortable_table("Collectives", head, rows, texts=3, note=note)


def families_table(families: Sequence[Family]) -> Table | None:
    """Return the families of kernels."""
    unit = unit_for([family.duration_ns for family in families])
    rows = [
        (
            word_cell(family.family.replace("_", " ")),
            time_cell(unit, family.duration_ns),
            (percent(family.share_ratio), family.share_ratio),
            count_cell(family.count),
            word_cell(kernel_name(family.largest)[:KERNEL_CHARACTERS_MAX]),
        )
        for family in sorted(families, key=lambda family: -family.duration_ns)
    ]
    return sortable_table("Kernel families", ("family", "time", "share", "count", "largest kernel"), rows, long=4)


def what_if_table(scenarios: Sequence[Scenario]) -> Table | None:
    """Return the what-if answers with their errors and what binds."""
    if not scenarios:
        return None
    unit = unit_for([one.step_ns + one.saved_ns for one in scenarios])
    today = scenarios[0].step_ns + scenarios[0].saved_ns
    is_replayed = any(one.error_ns is not None for one in scenarios)
    rows = [
        (
            (SCENARIO_WORDS.get(one.name, clean(one.name)), None),
            time_cell(unit, one.step_ns),
            time_cell(unit, one.saved_ns),
            share_cell(one.saved_ns, today),
            time_cell(unit, one.error_ns),
            word_cell(one.note),
        )
        for one in sorted(scenarios, key=lambda one: -one.saved_ns)
    ]
    note = (
        "By replay: the job played again without it. The error is how far what is saved may be off."
        if is_replayed
        else "Bounds, not promises: the shortest step if only this were gone."
    )
    return sortable_table("What if", ("scenario", "step", "saved", "share", "error", "why"), rows, note=note, long=5)
