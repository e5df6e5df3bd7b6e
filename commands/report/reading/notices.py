"""Collects faults of the input: each kind once for each place, with the first example and a count.

A million bad lines must not make a million messages, and none may be hidden.  *Damage* means that expected data is
lost, and sets the exit code; other notices are normal for a run that is still going or that a newer pacecar wrote.
"""

from __future__ import annotations

import msgspec

from pacecar.formatting.plain_text import clean

__all__ = ["TEXT_CHARACTERS_MAX", "Notice", "ReportError", "ReportNotices"]

NOTICES_MAX = 100
"""Different notices listed; further ones are only counted."""

TEXT_CHARACTERS_MAX = 300
"""Length of one sentence from a file."""


class ReportError(ValueError):
    """There is nothing to report; the message names the place and the fault."""


class Notice(msgspec.Struct, frozen=True):
    """`count` faults of one kind at `place`; `text` describes the first."""

    place: str
    text: str
    count: int
    is_damage: bool

    @property
    def line(self) -> str:
        """The notice in one line."""
        return f"{self.place}: {self.text}" + (f" ({self.count} such)" if self.count > 1 else "")


class ReportNotices:
    """Collects notices, in the order of their first occurrence."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[int | str | bool]] = {}
        self._left_out = 0
        self._damage_left_out = False

    def add(self, place: str, kind: str, text: str, *, is_damage: bool = True) -> None:
        """Count one fault; faults of the same place and `kind` share the `text` of the first."""
        key = (place, kind)
        known = self._found.get(key)
        if known is not None:
            known[1] = int(known[1]) + 1
        elif len(self._found) < NOTICES_MAX:
            self._found[key] = [clean(text, TEXT_CHARACTERS_MAX), 1, is_damage]
        else:
            self._left_out += 1
            self._damage_left_out |= is_damage

    def list(self) -> tuple[Notice, ...]:
        """Return the notices."""
        said = [
            Notice(clean(place, TEXT_CHARACTERS_MAX), str(text), int(count), bool(damage))
            for (place, _), (text, count, damage) in self._found.items()
        ]
        if self._left_out:
            said.append(Notice("the input", "more faults are not listed", self._left_out, self._damage_left_out))
        return tuple(said)
