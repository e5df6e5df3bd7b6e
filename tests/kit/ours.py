"""Tells what names pacecar's modules or shows its files from what lies in a clone, whose folder is called pacecar too.

Imports nothing of pacecar: programs that run without it read this file.
"""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["OURS", "ROOMS", "shows_our_files"]

OURS = re.compile(rb"(?<!/)pacecar(?!/)")
"""One of our modules by name, in bytes that somebody pickled."""

ROOT = Path(__file__).resolve().parents[2]
ROOMS = tuple(sorted(link.name for link in (ROOT / "pacecar").iterdir() if link.is_symlink()))
"""The folders beside `pacecar` that are its packages."""

FOLDERS = [f"{ROOT}/{room}/" for room in ("pacecar", *ROOMS)]


def shows_our_files(text: str) -> bool:
    """Return whether a traceback in `text` has a line of ours; digits may have been replaced by N."""
    return any(room in text or re.sub(r"\d+", "N", room) in text for room in FOLDERS)
