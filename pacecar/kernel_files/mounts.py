"""Parses lines of /proc/PID/mountinfo (proc_pid_mountinfo(5))."""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["Mount", "parse_mount"]

_ESCAPE = re.compile(r"\\([0-7]{3})")
"""The kernel writes space, tab, newline and backslash in octal."""


class Mount(NamedTuple):
    """One mount; `options` are those of the file system, not of the mount point."""

    device: str
    root: str
    mountpoint: str
    kind: str
    source: str
    options: tuple[str, ...]


def parse_mount(line: str) -> Mount:
    """Return one mount; raises ValueError or IndexError."""
    before, dash, after = line.partition(" - ")
    if dash == "":
        raise ValueError("no ` - ` before the file system type")
    fields, (kind, source, options) = before.split(" "), after.split(" ", 2)
    return Mount(
        fields[2], _unescape(fields[3]), _unescape(fields[4]), kind, _unescape(source), tuple(options.split(","))
    )


def _unescape(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)
