"""Removes control characters, line ends and direction marks from foreign text.

Jobs choose their names, hosts and reasons, and files and clients contain anything.  Printed unchanged, such text can
move the cursor, hide lines or forge log entries.  So all text that this process did not write itself goes through
`clean` before it reaches a terminal, a log line or a report.  Characters that Unicode calls unprintable (C0 and C1
controls, ESC, line and paragraph separators, bidirectional marks, surrogates) become U+FFFD.  `escaped` shows which
character it was, where a person looks for a fault in the text.

Left out: markup.  HTML and Markdown are escaped where they are written.
"""

from __future__ import annotations

import dataclasses
import logging
from enum import Enum
from typing import TypeVar, cast

__all__ = ["PlainFormatter", "clean", "clean_values", "escaped"]

T = TypeVar("T")

DEPTH_MAX = 64
"""Nesting of a document that is cleaned; ours have fewer than ten levels."""


def clean(text: object, characters_max: int | None = None) -> str:
    """Return `text` on one line without control characters, in at most `characters_max` characters."""
    line = str(text)
    if not line.isprintable():
        line = "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in line)
    if characters_max is not None and len(line) > characters_max:
        return line[: characters_max - 1] + "…"
    return line


def escaped(text: str) -> str:
    r"""Return `text` on one line, with tabs as blanks and other unprintable characters as escapes: \x1b, \u202e."""
    return "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text.replace("\t", " "))


def clean_values(value: T, _depth: int = 0) -> T:
    """Return `value` with every text in it cleaned: in msgspec structs, dataclasses, mappings and sequences."""
    import msgspec  # here, because every command's start imports this module

    assert _depth < DEPTH_MAX, "documents are trees"
    below = _depth + 1
    new: object = value
    if isinstance(value, Enum):  # its texts are ours
        return value
    if isinstance(value, str):
        new = clean(value)
    elif isinstance(value, dict):
        new = {clean_values(key, below): clean_values(one, below) for key, one in value.items()}
    elif isinstance(value, tuple) and hasattr(value, "_make"):
        new = value._make(clean_values(one, below) for one in value)
    elif isinstance(value, list | tuple):
        new = type(value)(clean_values(one, below) for one in value)
    elif isinstance(value, msgspec.Struct):
        new = msgspec.structs.replace(value, **_texts(value, value.__struct_fields__, below))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value))
        new = dataclasses.replace(value, **_texts(value, names, below))
    return cast("T", new)


def _texts(value: object, names: tuple[str, ...], depth: int) -> dict[str, object]:
    found = {name: getattr(value, name) for name in names}
    return {name: clean_values(one, depth) for name, one in found.items() if not isinstance(one, int | float)}


class PlainFormatter(logging.Formatter):
    """Formats each log record on one line; the lines of a traceback are cleaned one by one."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's name
        """Return the line without its traceback."""
        return clean(super().formatMessage(record))

    def formatException(self, ei: object) -> str:  # noqa: N802  logging's name
        """Return the traceback."""
        return "\n".join(map(clean, super().formatException(ei).split("\n")))  # type: ignore[arg-type]  # sys.exc_info()
