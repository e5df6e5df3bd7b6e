"""Formats points in time for people and file names, in UTC, because records come from machines in several time zones.

A record's wall time may be any number, so a value that is not a date is formatted as unknown and never raises.
"""

from __future__ import annotations

from datetime import UTC, datetime

__all__ = ["day_text", "file_stamp", "second_text"]

UNKNOWN = "an unknown time"

NS_PER_SECOND = 1_000_000_000


def second_text(wall_ns: int) -> str:
    """Return `2026-11-25 14:03:09 UTC`."""
    return _formatted(wall_ns, "%Y-%m-%d %H:%M:%S UTC")


def day_text(wall_ns: int) -> str:
    """Return `2026-11-25`."""
    return _formatted(wall_ns, "%Y-%m-%d")


def file_stamp(wall_ns: int) -> str:
    """Return `20261125T140309Z` (ISO 8601's basic format), which sorts by time."""
    return _formatted(wall_ns, "%Y%m%dT%H%M%SZ")


def _formatted(wall_ns: int, form: str) -> str:
    try:
        return datetime.fromtimestamp(wall_ns // NS_PER_SECOND, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
