"""Splits the text of the kernel's files into lines, where the kernel ends them.

The obvious `splitlines` ends a line also at a carriage return, a form feed, U+0085 and more.  The kernel escapes a line
feed in the name of a process or of a mount point and none of those, so whoever chose such a name would add lines to
what the kernel says: another process' pid, another's mount, another's container.  For the same reason these files are
read as bytes: reading them as text turns a carriage return into a line feed.
"""

from __future__ import annotations

__all__ = ["lines_of"]


def lines_of(text: str) -> list[str]:
    """Return the lines of `text`, each ended by a line feed and by nothing else; the last may lack it."""
    return text.removesuffix("\n").split("\n") if text else []
