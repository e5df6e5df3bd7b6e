"""Collects what was wrong with the input: each kind of fault once a place, with the first example and a count.

A file with a million bad lines must not make a million messages, and none may be passed over in silence.  Two weights:
*damage* means that something which should be there is lost, and the exit code says so; the rest is normal in a run that
still goes on, or that a newer pacecar wrote.
"""

from __future__ import annotations

import msgspec

from pacecar.formatting.plain_text import clean

__all__ = ["TEXT_CHARACTERS_MAX", "Notice", "ReportError", "ReportNotices"]

NOTICES_MAX = 100
"""Different notices that are listed; more are only counted, as nobody reads a second hundred."""

TEXT_CHARACTERS_MAX = 300
"""Length of one sentence from a file."""


class ReportError(ValueError):
    """There is nothing sound to report; the message names the place and the fault."""


class Notice(msgspec.Struct, frozen=True):
    """`count` faults of one kind at `place`; `text` describes the first."""

    place: str
    text: str
    count: int
    is_damage: bool


class ReportNotices:
    """Collects notices, in the order in which their kinds were first found."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], list[int | str | bool]] = {}
        self._left_out = 0
        self._damage_left_out = False

    def add(self, place: str, kind: str, text: str, *, is_damage: bool = True) -> None:
        """Count one fault; `kind` tells faults apart, `text` is kept of the first."""
        key = (place, kind)
        known = self._found.get(key)
        if known is not None:
            known[1] = int(known[1]) + 1
        elif len(self._found) < NOTICES_MAX:
            self._found[key] = [clean(text, TEXT_CHARACTERS_MAX), 1, is_damage]
        else:
            self._left_out += 1
            self._damage_left_out |= is_damage

    def count(self, *kinds: str) -> int:
        """Return how many faults there were of `kinds`, of each the first word of its name."""
        return sum(int(found[1]) for (_, kind), found in self._found.items() if kind.split()[0] in kinds)

    @property
    def is_damaged(self) -> bool:
        """Whether anything that should be there is lost."""
        return self._damage_left_out or any(bool(found[2]) for found in self._found.values())

    def list(self) -> tuple[Notice, ...]:
        """Return what was found."""
        said = [
            Notice(clean(place, TEXT_CHARACTERS_MAX), str(text), int(count), bool(damage))
            for (place, _), (text, count, damage) in self._found.items()
        ]
        if self._left_out:
            said.append(Notice("the input", "more faults are not listed", self._left_out, self._damage_left_out))
        return tuple(said)
