"""Prints one trace for a terminal, and the tables that several ranks have in common with one.

A trace is: what it is, where its time went, which steps were odd, what the device waited for, which collectives and
kernels were the largest, and what it would be worth to change something.  Nothing is computed but medians of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from pacecar.formatting.ledger_bar import ledger_bar, ledger_legend
from pacecar.formatting.ledger_headings import HEADING_WORDS, SCENARIO_WORDS
from pacecar.formatting.plain_text import clean
from pacecar.formatting.quantities import bandwidth, percent, plural, size_text, unit_for
from pacecar.formatting.tables import rich_table
from pacecar.records import LEDGER_HEADINGS

from ..one_rank.kernel_families import kernel_name
from ..report import CollectiveTotal, Family, Gap, Scenario, StepReport, TraceReport
from .words import GAP_WORDS

__all__ = ["BAR_WIDTH_MAX", "ROWS_MAX", "collectives_table", "ladder_table", "trace_text"]

ROWS_MAX = 8
"""The most collectives and families shown: the largest, which have all but a few percent of the time."""

SAVED_SHARE_MIN = 0.0005
"""The least share of the step that is shown: less would print as 0.0 %."""

SPEEDUP_SHOWN_MAX = 100
"""The largest speedup shown as a number: beyond it the window held almost no work, and the figure is meaningless."""

BAR_WIDTH_MAX = 88

WIDE_COLUMNS = 120
"""From this width on a table shows columns for which 80 characters have no room."""


def trace_text(report: TraceReport, console: Console) -> Iterator[RenderableType]:
    """Yield what is to be printed of one trace, in order."""
    yield from _title(report)
    yield Text()
    width = min(console.width, BAR_WIDTH_MAX)
    if report.ledger.wall_ns > 0:
        yield ledger_bar(report.ledger, width, console)
        yield from ledger_legend(report.ledger, width, console)
        yield Text()
        yield _ledger(report)
    for part in (
        _steps(report.steps),
        _gaps(report.gaps, report.span_ns),
        collectives_table(report.collectives, console),
        _families(report.families),
        ladder_table(report.what_if),
    ):
        if part is not None:
            yield Text()
            yield part


def _title(report: TraceReport) -> Iterator[Text]:
    yield Text(clean(Path(report.file).name), style="bold", overflow="fold")
    facts = [
        _rank(report),
        report.backend or "",
        _gpus(report.gpus),
        f"{report.events:,} events".replace(",", " "),
        "cut off" if report.is_truncated else "",
    ]
    yield Text(clean(", ".join(fact for fact in facts if fact)), style="dim")


def _rank(report: TraceReport) -> str:
    if report.rank is None:
        return ""
    return f"rank {report.rank}" + (f" of {report.world_size}" if report.world_size is not None else "")


def _gpus(gpus: Sequence[str]) -> str:
    names = [name for name in dict.fromkeys(gpus) if name]
    count = f"{len(gpus)} x " if len(gpus) > 1 and len(names) == 1 else ""
    return count + ", ".join(names)


def _ledger(report: TraceReport) -> Table:
    title = {"trace": "Ledger, first to last work", "steps": "Ledger of the steps", "hta": "Ledger, HTA's window"}
    table = rich_table(title.get(report.window, "Ledger"))
    table.add_column("", min_width=24)
    table.add_column("time", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", style="dim")
    unit = unit_for([report.span_ns])
    wall = report.ledger.wall_ns
    for name, value in _sum_rows(report.ledger.parts()):
        table.add_row(name, unit.text(value), percent(value / wall))
    table.add_section()
    table.add_row("span", unit.text(report.span_ns), "")
    table.add_row("device idle", unit.text(report.idle_ns), percent(report.idle_ns / wall))
    if report.communication_ns > 0:
        table.add_row("communication", unit.text(report.communication_ns), percent(report.communication_ns / wall))
        hidden = report.overlapped_communication_ns
        ratio = f"{percent(report.overlap_ratio)} of communication"
        table.add_row("  overlapped by compute", unit.text(hidden), percent(hidden / wall), ratio)
    return table


def _sum_rows(parts: dict[str, int]) -> list[tuple[str, int]]:
    """Return the nonzero headings with their words, and always `compute` and `unknown`: how far to trust the rest."""
    return [
        (HEADING_WORDS[name], value) for name, value in parts.items() if value != 0 or name in {"compute", "unknown"}
    ]


def _steps(steps: Sequence[StepReport]) -> Table | None:
    if not steps:
        return None
    table = rich_table(plural(len(steps), "step"))
    table.add_column("", min_width=24)
    ledgers = []
    for step, words in _notable(steps):
        table.add_column(f"{'/'.join(words)} #{step.step}", justify="right")
        ledgers.append(step.ledger)
    unit = unit_for([ledger.wall_ns for ledger in ledgers])
    for heading in LEDGER_HEADINGS:
        values = [ledger.parts().get(heading, 0) for ledger in ledgers]
        if any(values):
            table.add_row(HEADING_WORDS[heading], *(unit.text(value) for value in values))
    table.add_section()
    table.add_row("step", *(unit.text(ledger.wall_ns) for ledger in ledgers))
    return table


def _notable(steps: Sequence[StepReport]) -> list[tuple[StepReport, list[str]]]:
    """Return the steps that get a column, and why.  The median is an actual step, so that its column adds up."""
    if len(steps) == 1:
        return [(steps[0], ["only"])]
    middle = statistics.median_low(step.ledger.wall_ns for step in steps)
    median = next(step for step in steps if step.ledger.wall_ns == middle)
    slowest = max(steps, key=lambda step: step.ledger.wall_ns)
    reasons = [("first", steps[0]), ("median", median), ("last", steps[-1]), ("slowest", slowest)]
    if len(steps) == 2:
        del reasons[1]
    # A step may be two of these, and numbers may come twice in a broken trace: steps are told apart by their start.
    chosen: dict[int, tuple[StepReport, list[str]]] = {}
    for word, step in reasons:
        chosen.setdefault(step.start_ns, (step, []))[1].append(word)
    return list(chosen.values())


def _gaps(gaps: Sequence[Gap], span_ns: int) -> Table | None:
    gaps = [gap for gap in gaps if gap.count > 0]
    if not gaps:
        return None
    table = rich_table("Idle, by what ended it")
    table.add_column("", min_width=24)
    for column in ("time", "share", "gaps", "mean"):
        table.add_column(column, justify="right")
    unit = unit_for([gap.duration_ns for gap in gaps])
    mean = unit_for([gap.duration_ns / gap.count for gap in gaps])
    for gap in sorted(gaps, key=lambda gap: -gap.duration_ns):
        share = percent(gap.duration_ns / span_ns) if span_ns else "-"
        words = GAP_WORDS.get(gap.cause, clean(gap.cause))
        table.add_row(words, unit.text(gap.duration_ns), share, str(gap.count), mean.text(gap.duration_ns / gap.count))
    return table


def collectives_table(rows: Sequence[CollectiveTotal], console: Console) -> Table | None:
    """Return the collectives with the most time; wait and wire where they are known."""
    if not rows:
        return None
    largest = sorted(rows, key=lambda row: -row.duration_ns)
    has_split = any(row.wire_ns is not None for row in rows)
    table = rich_table(_largest("Collectives", len(rows), sum(row.count for row in rows)))
    table.add_column("operation", no_wrap=True, overflow="ellipsis")
    columns = ["size", "ranks", "count", "time", *(["wait", "wire"] if has_split else ["median", "exposed"]), "bus bw"]
    is_wide = console.width >= WIDE_COLUMNS
    if is_wide:
        columns[4:4] = ["type", "group"]
        columns += ["alg bw", "shortest", "longest"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    unit = unit_for([row.duration_ns for row in largest])
    middle = unit_for([row.median_ns for row in largest])
    for row in largest[:ROWS_MAX]:
        split = [unit.text(row.wait_ns), unit.text(row.wire_ns)]
        alone = [middle.text(row.median_ns), unit.text(row.exposed_ns)]
        cells = [size_text(row.bytes), _count(row.group_size), str(row.count), unit.text(row.duration_ns)]
        cells += [*(split if has_split else alone), bandwidth(row.bus_bandwidth)]
        if is_wide:
            cells[4:4] = [clean(row.dtype or "-"), clean(row.group or "-")[:16]]
            cells += [bandwidth(row.algorithm_bandwidth), middle.text(row.min_ns), middle.text(row.max_ns)]
        table.add_row(clean(row.operation), *cells)
    return table


def _count(value: int | None) -> str:
    return "-" if value is None else str(value)


def _families(families: Sequence[Family]) -> Table | None:
    if not families:
        return None
    table = rich_table(_largest("Kernel families", len(families), sum(family.count for family in families)))
    table.add_column("family", no_wrap=True)
    for column in ("time", "share", "count"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("largest", no_wrap=True, overflow="ellipsis", style="dim", ratio=1)
    table.expand = True
    unit = unit_for([family.duration_ns for family in families])
    for family in sorted(families, key=lambda family: -family.duration_ns)[:ROWS_MAX]:
        cells = (unit.text(family.duration_ns), percent(family.share_ratio), str(family.count))
        table.add_row(clean(family.family).replace("_", " "), *cells, Text(kernel_name(family.largest)))
    return table


def ladder_table(scenarios: Sequence[Scenario]) -> Table | None:
    """Return the table of what-if answers; those that save nothing are left out."""
    worth = [one for one in scenarios if one.saved_ns > SAVED_SHARE_MIN * (one.step_ns + one.saved_ns)]
    if not worth:
        return None
    is_replayed = any(one.error_ns is not None for one in worth)
    table = rich_table("What if (by replay)" if is_replayed else "What if (bounds, not promises)")
    table.add_column("", min_width=24)
    table.add_column("pace", justify="right", no_wrap=True)
    table.add_column("saved", justify="right", no_wrap=True)
    table.add_column("faster", justify="right", no_wrap=True)
    if is_replayed:
        table.add_column("error", justify="right", no_wrap=True)
    unit = unit_for([scenario.step_ns + scenario.saved_ns for scenario in worth])
    today = worth[0].step_ns + worth[0].saved_ns
    table.add_row("as it is", unit.text(today))
    for scenario in worth:
        words = SCENARIO_WORDS.get(scenario.name, clean(scenario.name))
        saved = percent(scenario.saved_ns / today) if today else "-"
        cells = [words, unit.text(scenario.step_ns), saved, _speedup(scenario.speedup)]
        if is_replayed:
            cells.append("-" if scenario.error_ns is None or not today else percent(scenario.error_ns / today))
        table.add_row(*cells)
    return table


def _speedup(ratio: float) -> str:
    return f"{ratio:.2f} x" if ratio < SPEEDUP_SHOWN_MAX else f"> {SPEEDUP_SHOWN_MAX} x"


def _largest(noun: str, kinds: int, count: int) -> str:
    shown = f"the largest {ROWS_MAX} of {kinds}" if kinds > ROWS_MAX else ""
    return f"{noun} ({', '.join(part for part in (shown, f'{count} in all') if part)})"
