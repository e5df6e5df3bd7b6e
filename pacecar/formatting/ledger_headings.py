"""Holds the words, colours and glyphs of a ledger's headings.

They are in one place, so that each table, bar and picture says the same thing.

Left out: what needs a terminal and rich (`pacecar.formatting.ledger_bar`).
"""

from __future__ import annotations

from pacecar.records import LEDGER_HEADINGS

__all__ = ["HEADING_COLOURS", "HEADING_GLYPHS", "HEADING_WORDS", "SCENARIO_WORDS", "UNCALIBRATED_WORDS"]

HEADING_WORDS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "exposed_copy": "exposed copy",
    "data_wait": "data wait",
    "host_bound": "host-bound",
    "optimizer_host": "optimizer on host",
    "checkpoint": "checkpoint",
    "stopped": "stopped",
    "unknown": "unknown",
}

SCENARIO_WORDS = {
    "communication_hidden": "communication fully hidden",
    "link_twice_as_fast": "link twice as fast",
    "buckets_twice_as_large": "buckets twice as large",
    "data_free": "data for free",
    "straggler_median": "straggler as fast as the median",
    "launch_gaps_gone": "launch gaps gone",
    "all": "all of these",
}
"""The scenarios of the what-if bounds, and those that only `pacecar analyze` answers, by replay."""

HEADING_COLOURS = {
    "compute": "#009E73",
    "exposed_communication": "#D55E00",
    "exposed_copy": "#E69F00",
    "data_wait": "#56B4E9",
    "host_bound": "#0072B2",
    "optimizer_host": "#CC79A7",
    "checkpoint": "#F0E442",
    "stopped": "#882255",
    "unknown": "#999999",
}
"""Okabe and Ito's palette (2008, "Color Universal Design"), which the colour-blind can tell apart, and the wine of
Tol's "muted" one (2021, "Colour Schemes") for `stopped`, as their eighth colour is black.

The same colours as on the dashboards (`dashboards/palette.py`).
"""

HEADING_GLYPHS = dict(zip(LEDGER_HEADINGS, "#=+dhokx?", strict=True))
"""For terminals without colour."""

UNCALIBRATED_WORDS = {
    "off": "exact windows are switched off",
    "unavailable": "this torch has no exact windows",
    "warming_up": "the first exact window is still to come",
    "price": "an exact window would cost more than the overhead budget has earned so far",
    "profiler": "the script's own profiler is on, and only one can be",
}
"""Why most of a ledger is unknown."""
