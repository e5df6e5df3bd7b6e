"""Formats figures where room is short: in at most six cells, and a dash for what is not known.  Pure."""

from __future__ import annotations

from pacecar.records.commands import KnobValue

__all__ = ["DASH", "amount", "binary", "duration", "percent", "setting", "spoken"]

DASH = "-"


def amount(value: float | None, unit: str = "") -> str:
    """Return 1234567 as "1.2M"; `unit` follows."""
    return _scaled(value, 1000.0, ("", "k", "M", "G", "T", "P"), unit)


def binary(value: float | None) -> str:
    """Return bytes as "93.8G", by powers of 1024 as in htop."""
    return _scaled(value, 1024.0, ("B", "K", "M", "G", "T", "P"), "")


def _scaled(value: float | None, base: float, signs: tuple[str, ...], unit: str) -> str:
    if value is None:
        return DASH
    left, step = float(value), 0
    while abs(left) >= base and step < len(signs) - 1:
        left, step = left / base, step + 1
    digits = 0 if abs(left) >= 100 or (step == 0 and left == int(left)) else 1
    return f"{left:.{digits}f}{signs[step]}{unit}"


def percent(ratio: float | None, *, digits: int = 0, signed: bool = False) -> str:
    """Return 0.43 as "43%"."""
    return DASH if ratio is None else f"{ratio * 100:{'+' if signed else ''}.{digits}f}%"


_UNITS = (
    (1e-3, 1e6, "us", 0),
    (0.1, 1e3, "ms", 1),
    (1.0, 1e3, "ms", 0),
    (120.0, 1.0, "s", 1),
    (7200.0, 1 / 60, "min", 0),
)


def duration(seconds: float | None) -> str:
    """Return seconds in the unit that fits."""
    if seconds is None:
        return DASH
    for limit, factor, unit, digits in _UNITS:
        if abs(seconds) < limit:
            return f"{seconds * factor:.{digits}f}{unit}"
    return f"{seconds / 3600:.1f}h"


def spoken(name: str | None) -> str:
    """Return a name of the document as words."""
    return DASH if name is None else name.replace("_", " ")


def setting(knob: str, value: KnobValue | None) -> str:
    """Return a knob's value for people: bytes as such."""
    if isinstance(value, int | float) and knob.endswith("_bytes"):
        return binary(value)
    return DASH if value is None else str(value)
