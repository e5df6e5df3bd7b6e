"""Parses the major and minor number of a kernel's or library's version, so that versions can be compared.

Compared as text, "5.9" is above "5.23", and not all parts are numbers ("6.8.0-45-generic", "2.13.0a0+git1").  Behaviour
changes with minor versions, so the rest is ignored.
"""

from __future__ import annotations

import re

__all__ = ["major_minor"]


def major_minor(version: str) -> tuple[int, int] | None:
    """Return the two numbers at the beginning of `version`, if any."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
