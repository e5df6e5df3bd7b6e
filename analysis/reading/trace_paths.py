"""Finds the trace files at the paths that a user typed, in natural order.

A folder is searched at any depth for the usual names of traces (`*.json`, `*.pt.trace.json`, each
also `.gz` or `.zst`).  `rank10` comes after `rank2`.  A file given by path may have any name.

Left out: whether a file is a trace (`trace.reader`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

__all__ = ["FILES_MAX", "FoundTraces", "find_traces", "natural_order", "printable"]

FILES_MAX = 65_536
"""More ranks than any job has; a folder with more files is a mistake, such as the root of a disk."""

_TRACE_NAME = re.compile(r"\.json(?:\.gz|\.zst)?$|\.pt\.trace\.json", re.IGNORECASE)


class FoundTraces(msgspec.Struct, frozen=True):
    """The trace files, each once, and an error line for every path without one."""

    files: tuple[Path, ...]
    errors: tuple[str, ...]


def find_traces(paths: Iterable[Path]) -> FoundTraces:
    """Return the trace files at `paths`; raises nothing."""
    files: dict[Path, None] = {}
    errors: list[str] = []
    for path in paths:
        try:
            if path.is_dir():
                inside = sorted(_walk(path), key=natural_order)
                if not inside:
                    errors.append(f"{printable(path)}: no trace in this folder (*.json, *.json.gz, *.json.zst)")
                files.update(dict.fromkeys(inside))
            else:
                path.stat()
                files[path] = None
        except OSError as error:
            errors.append(f"{printable(path)}: {(error.strerror or str(error)).lower()}")
    if len(files) > FILES_MAX:
        errors.append(f"{len(files)} files, more than {FILES_MAX}: the rest is left out")
    return FoundTraces(tuple(files)[:FILES_MAX], tuple(errors))


def printable(path: Path) -> str:
    """Return a path as text that can be written as UTF-8; names on disk may be any bytes."""
    return os.fsencode(path).decode("utf-8", "replace")


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers inside names as numbers."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]


def _walk(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise error

    # An unreadable subfolder is an error, not an empty folder; links to folders are not followed.
    for where, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(where, name)
            # Only files: opening a pipe would wait for a writer.  A pipe given by path is opened, as in `<(zcat x)`.
            if _TRACE_NAME.search(name) and not name.startswith(".") and (path.is_file() or not path.exists()):
                yield path
