"""Defines the colours of the dashboards: each has one meaning on every panel, and none relies on red against green.

Grafana's default palette gives colours by order of arrival, so that "exposed communication" is green today and yellow
tomorrow.  Here each heading of the ledger has a fixed colour of the palette by Okabe and Ito (2008, "Color Universal
Design"), which people with each kind of colour blindness can tell apart.
"""

from __future__ import annotations

from pacecar.records import LEDGER_HEADINGS

__all__ = ["BAD", "GOOD", "HEADING_COLOURS", "LINE_COLOURS", "NEUTRAL", "WARN"]

GREEN, VERMILION, ORANGE, SKY = "#009E73", "#D55E00", "#E69F00", "#56B4E9"
BLUE, PINK, YELLOW, GREY = "#0072B2", "#CC79A7", "#F0E442", "#999999"
WINE = "#882255"
"""Of Tol's "muted" palette (2021, "Colour Schemes"): the last of Okabe and Ito's is black."""

HEADING_COLOURS = {
    "compute": GREEN,
    "exposed_communication": VERMILION,
    "exposed_copy": ORANGE,
    "data_wait": SKY,
    "host_bound": BLUE,
    "optimizer_host": PINK,
    "checkpoint": YELLOW,
    "stopped": WINE,
    "unknown": GREY,
}
"""Heading of the ledger -> colour, in the order in which the headings are stacked."""

assert tuple(HEADING_COLOURS) == LEDGER_HEADINGS, "a heading of the ledger has no colour, or the order differs"

GOOD, WARN, BAD, NEUTRAL = SKY, ORANGE, VERMILION, GREY

LINE_COLOURS = (SKY, ORANGE, GREEN, PINK, YELLOW, BLUE, VERMILION, GREY)
"""For lines that have a fixed name and no meaning of their own; neighbours differ in lightness too."""
