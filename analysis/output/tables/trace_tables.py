"""Defines the tables that one trace and several ranks have in common: ledger, steps, idle, collectives, what-if."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from pacecar.analysis.document.report import CollectiveTotal, Family, Gap, Scenario, StepReport, TraceReport
from pacecar.analysis.one_rank.kernel_families import kernel_name
from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.quantities import percent, plural, unit_for
from pacecar.formatting.tables import Shown, Table, TableColumn
from pacecar.records import LEDGER_HEADINGS

from ..words import GAP_WORDS

__all__ = [
    "collectives_table", "cut_words", "families_table", "gaps_table", "ledger_table", "marked_steps_table",
    "steps_table", "what_if_table"
]  # fmt: skip

NAME_CELLS = 24
"""The first column of all tables of one trace has this width, so that their figures align."""

KERNEL_CHARACTERS_MAX = 120
"""The most characters shown of a family's largest kernel."""

GROUP_CHARACTERS_MAX = 16

SAVED_SHARE_MIN = 0.0005
"""The least share of the step that is worth a row in little room: less would print as 0.0 %."""

SPEEDUP_SHOWN_MAX = 100
"""The largest speedup shown as a number: beyond it the window has almost no work, and the figure is meaningless."""


def cut_words(shown: int, found: int, which: str = "largest") -> str:
    """Return which of how many rows are shown; nothing if all are."""
    return "" if shown >= found else f"the {which} {shown} of {found}"


def ledger_table(report: TraceReport) -> Table | None:
    """Return the headings with time, and always compute and unknown, which tells how far to trust the rest."""
    wall = report.ledger.wall_ns
    if wall <= 0:
        return None
    rows = [
        (HEADING_WORDS[name], value)
        for name, value in report.ledger.parts().items()
        if value or name in {"compute", "unknown"}
    ]
    headings = len(rows)
    rows += [("span", report.span_ns), ("device idle", report.idle_ns)]
    caption = ""
    if report.communication_ns > 0:
        overlapped = ("  overlapped by compute", report.overlapped_communication_ns)
        rows += [("communication", report.communication_ns), overlapped]
        caption = f"{percent(report.overlap_ratio)} of the communication is overlapped by compute."
    title = {"trace": "Ledger, first to last work", "steps": "Ledger of the steps", "hta": "Ledger, HTA's window"}
    columns = [
        TableColumn.text("heading", [name for name, _ in rows], name_cells=NAME_CELLS),
        TableColumn.time("time", unit_for([report.span_ns]), [value for _, value in rows]),
        TableColumn.ratio("share", [value / wall for _, value in rows]),
    ]
    note = "Each instant has one heading; the headings add up to the span exactly."
    return Table(title.get(report.window, "Ledger"), columns, caption, note, sums=len(rows) - headings)


def steps_table(steps: Sequence[StepReport], most: int) -> Table | None:
    """Return a row for each step."""
    if not steps:
        return None
    shown = steps[:most]
    unit = unit_for([step.ledger.wall_ns for step in shown])
    columns = [
        TableColumn.number("step", [step.step for step in shown]),
        TableColumn.time("time", unit, [step.ledger.wall_ns for step in shown]),
        *(
            TableColumn.time(HEADING_WORDS[name], unit, [step.ledger.parts().get(name) for step in shown])
            for name in _used(shown)
        ),
    ]
    return Table("Steps", columns, cut=cut_words(len(shown), len(steps), "first"))


def marked_steps_table(steps: Sequence[StepReport]) -> Table | None:
    """Return the first, median, last and slowest step side by side, with a row for each heading."""
    if not steps:
        return None
    marked = _marked(steps)
    used = _used([step for step, _ in marked])
    unit = unit_for([step.ledger.wall_ns for step, _ in marked])
    columns = [
        TableColumn.text("heading", [*(HEADING_WORDS[name] for name in used), "step"], name_cells=NAME_CELLS),
        *(
            TableColumn.time(
                f"{'/'.join(words)} #{step.step}",
                unit,
                [*(step.ledger.parts().get(name, 0) for name in used), step.ledger.wall_ns],
            )
            for step, words in marked
        ),
    ]
    return Table(plural(len(steps), "step"), columns, sums=1)


def _used(steps: Sequence[StepReport]) -> list[str]:
    return [name for name in LEDGER_HEADINGS if any(step.ledger.parts().get(name) for step in steps)]


def _marked(steps: Sequence[StepReport]) -> list[tuple[StepReport, list[str]]]:
    """Return the steps that get a column, and why.  The median is an actual step, so that its column adds up."""
    if len(steps) == 1:
        return [(steps[0], ["only"])]
    middle = statistics.median_low(step.ledger.wall_ns for step in steps)
    median = next(step for step in steps if step.ledger.wall_ns == middle)
    slowest = max(steps, key=lambda step: step.ledger.wall_ns)
    reasons = [("first", steps[0]), ("median", median), ("last", steps[-1]), ("slowest", slowest)]
    if len(steps) == 2:
        del reasons[1]
    # A step may be two of these, and a broken trace may repeat numbers: steps are distinguished by their start.
    chosen: dict[int, tuple[StepReport, list[str]]] = {}
    for word, step in reasons:
        chosen.setdefault(step.start_ns, (step, []))[1].append(word)
    return list(chosen.values())


def gaps_table(gaps: Sequence[Gap], span_ns: int) -> Table | None:
    """Return the idle time of the device by its cause."""
    found = sorted((gap for gap in gaps if gap.count), key=lambda gap: -gap.duration_ns)
    if not found:
        return None
    means = [gap.duration_ns / gap.count for gap in found]
    columns = [
        TableColumn.text("ended by", [GAP_WORDS.get(gap.cause, gap.cause) for gap in found], name_cells=NAME_CELLS),
        TableColumn.time("time", unit_for([found[0].duration_ns]), [gap.duration_ns for gap in found]),
        TableColumn.ratio("share", [gap.duration_ns / span_ns if span_ns else None for gap in found]),
        TableColumn.count("gaps", [gap.count for gap in found]),
        TableColumn.time("mean", unit_for(means), means),
    ]
    return Table("Idle, by what ended it", columns)


def collectives_table(found: Sequence[CollectiveTotal], most: int) -> Table | None:
    """Return the collectives by kind, with waiting and wire if several ranks were compared."""
    if not found:
        return None
    rows = sorted(found, key=lambda row: -row.duration_ns)[:most]
    is_split = any(row.wire_ns is not None for row in found)
    split: Shown = "always" if is_split else "page"
    alone: Shown = "wide" if is_split else "always"
    unit, middle = unit_for([rows[0].duration_ns]), unit_for([row.median_ns for row in rows])
    columns = [
        TableColumn.text("operation", [row.operation for row in rows]),
        TableColumn.size("size", [row.bytes for row in rows]),
        TableColumn.count("ranks", [row.group_size for row in rows]),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.text("type", [row.dtype for row in rows], "wide"),
        TableColumn.text("group", [row.group for row in rows], "wide", most=GROUP_CHARACTERS_MAX),
        TableColumn.time("time", unit, [row.duration_ns for row in rows]),
        TableColumn.time("median", middle, [row.median_ns for row in rows], alone),
        TableColumn.time("shortest", middle, [row.min_ns for row in rows], "wide"),
        TableColumn.time("longest", middle, [row.max_ns for row in rows], "wide"),
        TableColumn.time("exposed", unit, [row.exposed_ns for row in rows], alone),
        TableColumn.time("wait", unit, [row.wait_ns for row in rows], split),
        TableColumn.time("wire", unit, [row.wire_ns for row in rows], split),
        TableColumn.bandwidth("alg bw", [row.algorithm_bandwidth for row in rows], "wide"),
        TableColumn.bandwidth("bus bw", [row.bus_bandwidth for row in rows]),
    ]
    note = (
        "Times are summed over ranks. Wait is from a rank's own arrival to the last one's, wire from there to the end;"
        " bandwidths are of the wire."
        if is_split
        else "One trace cannot tell waiting from the wire, so bandwidths are lower bounds."
    )
    cut, about = cut_words(len(rows), len(found)), f"{sum(row.count for row in found)} in all"
    return Table("Collectives", columns, note=note, cut=cut, about=about)


def families_table(families: Sequence[Family], most: int) -> Table | None:
    """Return the families of kernels."""
    if not families:
        return None
    rows = sorted(families, key=lambda family: -family.duration_ns)[:most]
    columns = [
        TableColumn.text("family", [row.family.replace("_", " ") for row in rows]),
        TableColumn.time("time", unit_for([rows[0].duration_ns]), [row.duration_ns for row in rows]),
        TableColumn.ratio("share", [row.share_ratio for row in rows]),
        TableColumn.count("count", [row.count for row in rows]),
        TableColumn.text(
            "largest", [kernel_name(row.largest) for row in rows], most=KERNEL_CHARACTERS_MAX, is_long=True
        ),
    ]
    cut, about = cut_words(len(rows), len(families)), f"{sum(family.count for family in families)} in all"
    return Table("Kernel families", columns, cut=cut, about=about)


def what_if_table(scenarios: Sequence[Scenario], *, worth_only: bool = False) -> Table | None:
    """Return the what-if answers with their errors and bounds; `worth_only` leaves out those that save nothing."""
    rows = [one for one in scenarios if not worth_only or one.saved_ns > SAVED_SHARE_MIN * (one.step_ns + one.saved_ns)]
    if not rows:
        return None
    today = rows[0].step_ns + rows[0].saved_ns
    unit = unit_for([today])
    is_replayed = any(one.error_ns is not None for one in rows)
    names = [SCENARIO_WORDS.get(one.name, one.name) for one in rows]
    columns = [
        TableColumn.text("scenario", ["as it is", *names], name_cells=NAME_CELLS),
        TableColumn.time("pace", unit, [today, *(one.step_ns for one in rows)]),
        TableColumn.time("saved", unit, [None, *(one.saved_ns for one in rows)]),
        TableColumn.ratio("share", [None, *(one.saved_ns / today if today else None for one in rows)]),
        TableColumn.number("faster", [None, *(one.speedup for one in rows)], _speedup),
        TableColumn.time("error", unit, [None, *(one.error_ns for one in rows)], "always" if is_replayed else "page"),
        TableColumn.text("why", ["", *(one.note for one in rows)], "page", is_long=True),
    ]
    note = (
        "The job played again without it. The error is how far what is saved may be off."
        if is_replayed
        else "The shortest step if only this were gone."
    )
    return Table("What if (by replay)" if is_replayed else "What if (bounds, not promises)", columns, note=note)


def _speedup(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < SPEEDUP_SHOWN_MAX else f"> {SPEEDUP_SHOWN_MAX} x"
