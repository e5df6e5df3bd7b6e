"""Reads the major and the minor number of a version that somebody else wrote, so that versions can be compared.

As text "5.9" is above "5.23", and not all parts are numbers ("6.8.0-45-generic", "2.13.0a0+git1").  What changes the
behaviour of a library or a kernel comes with a minor version, so the rest is left out.
"""

from __future__ import annotations

import re

__all__ = ["major_minor"]


def major_minor(version: str) -> tuple[int, int] | None:
    """Return the two numbers that `version` begins with, None where it does not."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))
