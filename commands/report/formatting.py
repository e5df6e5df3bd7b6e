"""Formats a report's figures, the same for page, tables and terminal.

A missing value is a dash.  A figure has about three significant digits.
"""

from __future__ import annotations

from collections.abc import Mapping

from pacecar.formatting.quantities import percent
from pacecar.knobs import by_name, setting
from pacecar.records import KnobValue

from .document import Report, Stat
from .figures import Interval

__all__ = [
    "amount", "bounds", "change_words", "difference", "elapsed", "joules", "knob_words", "milliseconds", "money",
    "mostly_unknown", "number", "part_of", "points", "rate_word", "reading", "relative", "signed_milliseconds",
    "steps_word", "trial_seconds",
]  # fmt: skip

DASH = "-"

WINDOW_HEADINGS = frozenset({"compute", "exposed_communication", "exposed_copy", "optimizer_host"})
"""Headings that only a profiled window can separate; without one, the timers of a step do not know them."""


def mostly_unknown(ledger_ns: Mapping[str, int]) -> bool:
    """Return whether most of the time is unknown, because no window calibrated these steps."""
    return 2 * ledger_ns.get("unknown", 0) > sum(ledger_ns.values())


def part_of(ledger_ns: Mapping[str, int], heading: str) -> int | None:
    """Return the nanoseconds under a heading; None if they were not measured."""
    part_ns = ledger_ns.get(heading)
    return None if part_ns == 0 and heading in WINDOW_HEADINGS and mostly_unknown(ledger_ns) else part_ns


def number(value: float | None, digits: int = 3) -> str:
    """Return a figure with about `digits` significant digits and spaces between thousands."""
    if value is None:
        return DASH
    magnitude = abs(value)
    if magnitude >= 10 ** (digits - 1) or magnitude == int(magnitude):
        return f"{value:,.0f}".replace(",", " ")
    if magnitude < 1e-4:
        return f"{value:.{digits - 1}e}"
    places = digits - 1
    while magnitude < 1 and places < 8:
        magnitude *= 10
        places += 1
    while magnitude >= 10 and places > 0:
        magnitude /= 10
        places -= 1
    return f"{value:.{places}f}"


def milliseconds(ns: float | None) -> str:
    """Return a duration of a step in milliseconds."""
    return DASH if ns is None else f"{ns / 1e6:,.2f} ms".replace(",", " ")


def signed_milliseconds(before_ns: float | None, after_ns: float | None) -> str:
    """Return the change of a step's duration."""
    return (
        DASH if before_ns is None or after_ns is None else f"{(after_ns - before_ns) / 1e6:+,.2f} ms".replace(",", " ")
    )


def relative(before: float | None, after: float | None) -> str:
    """Return the relative change of a figure."""
    return DASH if before is None or before == 0 or after is None else percent(after / before - 1, signed=True)


def points(before: float | None, after: float | None) -> str:
    """Return the change of a share in percentage points."""
    return DASH if before is None or after is None else f"{(after - before) * 100:+.1f} points"


def difference(before: float | None, after: float | None, unit: str) -> str:
    """Return the change of a reading in `unit`: ratios in points, temperatures in degrees, others relative."""
    if unit == "ratio":
        return points(before, after)
    if unit == "celsius":
        return DASH if before is None or after is None else f"{after - before:+.1f} °C"
    return relative(before, after)


def trial_seconds(ns: int | None) -> str:
    """Return the cost of a trial to a hundredth of a second, so that a column of them adds up."""
    return DASH if ns is None else f"{ns / 1e9:,.2f} s".replace(",", " ")


def elapsed(ns: float | None) -> str:
    """Return a long duration: 8.2 s, 3 min 25 s, 4 h 10 min, 3 d 4 h."""
    if ns is None:
        return DASH
    seconds = ns / 1e9
    if seconds < 0:
        return f"-{elapsed(-ns)}"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def amount(value: float | None, unit: str) -> str:
    """Return a reading in its unit."""
    if value is None:
        return DASH
    if unit == "ratio":
        return percent(value)
    if unit == "bytes":
        return f"{number(value / 2**30)} GiB" if value >= 2**30 else f"{number(value / 2**20)} MiB"
    if unit == "bytes_per_second":
        return f"{number(value * 8 / 1e9)} Gbit/s"
    if unit == "flops_per_second":
        return f"{number(value / 1e12)} TFLOP/s" if value >= 1e12 else f"{number(value / 1e9)} GFLOP/s"
    return f"{number(value)} {'W' if unit == 'watts' else '°C'}"


def reading(stat: Stat | None, unit: str) -> str:
    """Return mean and standard deviation."""
    if stat is None:
        return DASH
    spread = "" if stat.sd is None else f" ± {amount(stat.sd, unit)}"
    return amount(stat.mean, unit) + spread


def bounds(low: float | None, high: float | None) -> str:
    """Return an interval of gains, -2.0 .. 4.1 %."""
    return DASH if low is None or high is None else f"{low * 100:+.1f} .. {high * 100:+.1f} %"


def change_words(change: Interval | None) -> str:
    """Return a difference with its interval."""
    if change is None:
        return DASH
    if change.low is None or change.high is None:
        return f"{percent(change.change_ratio, signed=True)} (no interval)"
    return f"{percent(change.change_ratio, signed=True)} ({bounds(change.low, change.high)})"


def knob_words(knob: str, value: KnobValue) -> str:
    """Return a knob's value with its unit; the value of an unknown knob is unchanged."""
    if isinstance(value, int) and (knob in by_name or knob.endswith("_bytes")):
        return setting(knob, value)
    return str(value)


def rate_word(report: Report) -> str:
    """Return the unit of the report's rates."""
    is_guess = report.rate_unit == "samples" and report.samples_guessed
    return f"{report.rate_unit}/s" + (" (a guess)" if is_guess else "")


def money(value: float | None) -> str:
    """Return an amount of money, with four decimals below 0.1."""
    if value is None:
        return DASH
    if value != 0 and abs(value) < 0.1:
        return f"{value:.4f}"
    return f"{value:,.2f}".replace(",", " ")


def joules(value: float | None) -> str:
    """Return an energy."""
    return DASH if value is None else f"{number(value)} J"


def steps_word(first: tuple[int, int], last: tuple[int, int]) -> str:
    """Return a stretch of steps; the start of the job is named only if there were several."""
    if first[0] == last[0] == 0:
        return f"{first[1]} to {last[1]}"
    return f"{first[1]} of start {first[0] + 1} to {last[1]} of start {last[0] + 1}"
