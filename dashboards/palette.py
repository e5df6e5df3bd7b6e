"""Defines the colours of the dashboards: each has one meaning on every panel, and none relies on red against green.

Grafana's default palette assigns colours in order of arrival: "exposed communication" would be green today and yellow
tomorrow.  Headings of the ledger have the colours of `pacecar.formatting.ledger_headings`.
"""

from __future__ import annotations

from pacecar.formatting.ledger_headings import HEADING_COLOURS

__all__ = ["BAD", "GOOD", "HEADING_COLOURS", "LINE_COLOURS", "NEUTRAL", "WARN"]

GREEN, VERMILION, ORANGE, SKY = "#009E73", "#D55E00", "#E69F00", "#56B4E9"
BLUE, PINK, YELLOW, GREY = "#0072B2", "#CC79A7", "#F0E442", "#999999"

GOOD, WARN, BAD, NEUTRAL = SKY, ORANGE, VERMILION, GREY

LINE_COLOURS = (SKY, ORANGE, GREEN, PINK, YELLOW, BLUE, VERMILION, GREY)
"""For lines with fixed names and no meaning of their own; neighbours also differ in lightness."""
