"""Holds the words, colours and glyphs of a ledger's headings, for every table, bar, picture and dashboard.

Left out: drawing with rich (`pacecar.formatting.ledger_bar`).
"""

from __future__ import annotations

from pacecar.records import LEDGER_HEADINGS, Cause
from pacecar.records.measurements.what_if import AT_MOST

__all__ = [
    "CAUSE_WORDS", "HEADING_COLOURS", "HEADING_GLYPHS", "HEADING_WORDS", "SCENARIO_WORDS", "UNCALIBRATED_WORDS",
    "heading_words",
]  # fmt: skip

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

CAUSE_WORDS = {
    **{cause.value: HEADING_WORDS.get(cause.value, cause.value) for cause in Cause},
    "link": "slow link",
    "throttled": "throttled compute",
    "gc": "garbage collection",
    "imbalance": "uneven work",
    "exposed_copy": "copies",
}
"""What holds a job up, by the value of its `Cause`."""

SCENARIO_WORDS = {
    "communication_hidden": "communication fully hidden",
    "link_twice_as_fast": "link twice as fast",
    "buckets_twice_as_large": "buckets twice as large",
    "data_free": "data for free",
    "straggler_median": "straggler as fast as the median",
    "launch_gaps_gone": "launch gaps gone",
    "all": "all of these",
}
"""The questions that `pacecar analyze` answers by replay."""

SCENARIO_WORDS |= {AT_MOST + name: words for name, words in SCENARIO_WORDS.items()}
"""And bounds: a table or picture of them says in its head that they are the most that can be saved."""

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
"""Okabe and Ito's palette (2008, "Color Universal Design"), which colour-blind people can tell apart.  Its eighth
colour is black, so `stopped` has the wine of Tol's "muted" palette (2021, "Colour Schemes")."""
assert tuple(HEADING_COLOURS) == LEDGER_HEADINGS, "charts stack the headings in this order"

HEADING_GLYPHS = dict(zip(LEDGER_HEADINGS, "#=+dhokx?", strict=True))
"""For terminals without colour."""

UNCALIBRATED_WORDS = {
    "off": "exact windows are switched off",
    "unavailable": "this torch has no exact windows",
    "warming_up": "the first exact window is still to come",
    "price": "an exact window would cost more than the overhead budget has earned so far",
    "profiler": "the script's own profiler is on, and only one can run",
}
"""Why most of a ledger is unknown."""


def heading_words(heading: str) -> str:
    """Return the words of a heading of `pacecar.ledger.attempts`."""
    return heading.replace("start_up_", "start-up: ").replace("start_up", "start-up").replace("_", " ")
