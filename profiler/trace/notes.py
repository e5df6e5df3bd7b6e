"""Counts what was odd in a trace, one warning for each kind.

A list of every odd event would be as long as a broken file.  So each kind is one warning, with how often it came and
the message of its first occurrence.
"""

from __future__ import annotations

from .columns import Effect, TraceWarning

__all__ = ["Notes"]


class Notes:
    """Warnings by code, in the order in which they first came."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, tuple[str, Effect]] = {}

    def add(self, code: str, message: str, count: int = 1, effect: Effect = "said") -> None:
        """Count `code`; the first message and effect stay."""
        if count:
            self._counts[code] = self._counts.get(code, 0) + count
            self._first.setdefault(code, (message, effect))

    def warnings(self) -> tuple[TraceWarning, ...]:
        """Return one warning for each code."""
        return tuple(
            TraceWarning(code, message, self._counts[code], effect) for code, (message, effect) in self._first.items()
        )
