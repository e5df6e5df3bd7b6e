"""How are the run's numbers written for people?  One place, so that display and closing table say the same thing."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.text import Text

from pacecar.records import LEDGER_HEADINGS, KnobValue, Ledger

__all__ = ["HEADING_WORDS", "knob_text", "knobs_text", "ledger_bar", "ledger_legend", "percent", "plural"]

HEADING_WORDS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copy",
    "data_wait": "data wait",
    "host_bound": "host-bound",
    "optimizer_host": "optimizer on host",
    "checkpoint": "checkpoint",
    "unknown": "unknown",
}

# Okabe and Ito's palette, which the colour-blind can tell apart; the glyphs are for terminals without colour.
_STYLES = {
    "compute": "#009E73",
    "exposed_communication": "#D55E00",
    "exposed_copy": "#CC79A7",
    "data_wait": "#F0E442",
    "host_bound": "#56B4E9",
    "optimizer_host": "#0072B2",
    "checkpoint": "#E69F00",
    "unknown": "#999999",
}
_GLYPHS = dict(zip(LEDGER_HEADINGS, "#=+dhok?", strict=True))


def percent(ratio: float | None, *, signed: bool = False) -> str:
    """Return 0.123 as "12.3 %", and what is missing as a dash."""
    if ratio is None:
        return "-"
    return f"{ratio * 100:+.1f} %" if signed else f"{ratio * 100:.1f} %"


def plural(count: int, noun: str) -> str:
    """Return "1 step", "2 steps"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def knob_text(knob: str, value: KnobValue) -> str:
    """Return a knob's value; bytes as MiB or KiB."""
    if knob.endswith("_bytes") and isinstance(value, int):
        return f"{value / 2**20:.4g} MiB" if value >= 2**20 else f"{value / 2**10:.4g} KiB"
    return str(value)


def knobs_text(values: Mapping[str, KnobValue]) -> str:
    """Return all knobs on one line."""
    return "   ".join(f"{knob} {knob_text(knob, value)}" for knob, value in sorted(values.items())) or "-"


def ledger_bar(ledger: Ledger, width: int, console: Console) -> Text:
    """Return `ledger` as a bar of `width` cells; each heading gets its share, rounded so that the bar is full."""
    bar = Text(no_wrap=True)
    edge_ns = 0
    for heading, part_ns in ledger.parts().items():
        start = _cells(edge_ns, ledger.wall_ns, width)
        edge_ns += part_ns
        cells = _cells(edge_ns, ledger.wall_ns, width) - start
        bar.append(_glyph(heading, console) * cells, style=_STYLES[heading])
    return bar


def ledger_legend(ledger: Ledger, width: int, console: Console) -> list[Text]:
    """Return the headings that the bar shows, with their shares, in lines of at most `width` cells."""
    lines = [Text()]
    for heading, part_ns in ledger.parts().items():
        if part_ns == 0:
            continue
        entry = f" {HEADING_WORDS[heading]} {percent(part_ns / ledger.wall_ns)}"
        if len(lines[-1]) > 0 and len(lines[-1]) + 3 + 1 + len(entry) > width:
            lines.append(Text())
        if len(lines[-1]) > 0:
            lines[-1].append("   ")
        lines[-1].append(_glyph(heading, console), style=_STYLES[heading]).append(entry)
    return lines


def _cells(part_ns: int, wall_ns: int, width: int) -> int:
    return round(part_ns / wall_ns * width) if wall_ns > 0 else 0


def _glyph(heading: str, console: Console) -> str:
    has_blocks = console.color_system is not None and console.encoding.startswith("utf")
    return "\N{FULL BLOCK}" if has_blocks else _GLYPHS[heading]
