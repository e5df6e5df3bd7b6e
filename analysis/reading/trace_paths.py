"""Finds the trace files at the paths and URLs that a user typed, in natural order.

A folder is searched at any depth for the usual names of traces (`*.json`, `*.pt.trace.json`, each
also `.gz` or `.zst`), and so is a URL without such a name.  `rank10` comes after `rank2`.  A file given by path may
have any name.

Left out: whether a file is a trace (`trace.reader`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ..trace.decoding.header import rank_in_name
from ..trace.decoding.remote_file import TracePlace, Url, driver_errors

__all__ = ["FILES_MAX", "FoundTraces", "find_traces", "natural_order", "printable"]

FILES_MAX = 65_536
"""More ranks than any job has; a folder with more files is a mistake, such as the root of a disk."""

_TRACE_NAME = re.compile(r"\.json(?:\.gz|\.zst)?$|\.pt\.trace\.json", re.IGNORECASE)

_VERSION_MARKS = (
    "ETag",
    "etag",
    "md5Hash",
    "blob_id",
    "Content-MD5",
    "LastModified",
    "mtime",
    "last_modified",
    "created",
)
"""What stores call that which changes with an object's content, the surest first."""


class FoundTraces(msgspec.Struct, frozen=True):
    """The trace files, each once, and an error line for every path without one."""

    files: tuple[TracePlace, ...]
    errors: tuple[str, ...]


def find_traces(paths: Iterable[TracePlace], ranks: Container[int] | None = None) -> FoundTraces:
    """Return the trace files at `paths`, without those whose name tells a rank outside `ranks`; raises nothing."""
    files: dict[TracePlace, None] = {}
    errors: list[str] = []
    for path in paths:
        try:
            if isinstance(path, Url):
                remote = sorted(_remote(path), key=natural_order)
                if not remote:
                    errors.append(f"{printable(path)}: no trace there (*.json, *.json.gz, *.json.zst)")
                files.update(dict.fromkeys(remote))
            elif path.is_dir():
                shut: list[OSError] = []
                inside = sorted(_walk(path, shut), key=natural_order)
                errors += [f"{printable(Path(each.filename))}: {(each.strerror or str(each)).lower()}" for each in shut]
                if not inside and not shut:
                    errors.append(f"{printable(path)}: no trace in this folder (*.json, *.json.gz, *.json.zst)")
                files.update(dict.fromkeys(inside))
            else:
                path.stat()
                files[path] = None
        except OSError as error:
            errors.append(f"{printable(path)}: {(error.strerror or str(error)).lower()}")
    chosen = [file for file in files if ranks is None or (rank := rank_in_name(file.name)) is None or rank in ranks]
    if files and not chosen:
        errors.append(f"none of {len(files)} files is of one of the ranks asked for")
    if len(chosen) > FILES_MAX:
        errors.append(f"{len(chosen)} files, more than {FILES_MAX}: the rest is left out")
    return FoundTraces(tuple(chosen)[:FILES_MAX], tuple(errors))


def printable(path: TracePlace) -> str:
    """Return a path as text that can be written as UTF-8; names on disk may be any bytes, and URLs have secrets."""
    return os.fsencode(path).decode("utf-8", "replace")


def natural_order(path: TracePlace) -> list[tuple[int, int, str]]:
    """Return a key that sorts numbers inside names as numbers."""
    parts = re.split(r"([0-9]+)", str(path))
    return [(1, int(part), "") if part.isdecimal() and part.isascii() else (0, 0, part) for part in parts]


def _walk(folder: Path, shut: list[OSError]) -> Iterator[Path]:
    """Yield the traces in a folder, and add the errors of folders that cannot be read to `shut`."""
    for where, _, names in os.walk(folder, onerror=shut.append):  # links to folders are not followed
        for name in names:
            path = Path(where, name)
            # Only files: opening a pipe would wait for a writer.  A pipe given by path is opened, as in `<(zcat x)`.
            if _TRACE_NAME.search(name) and not name.startswith(".") and _may_be_file(path):
                yield path


def _may_be_file(path: Path) -> bool:
    try:
        return path.is_file() or not path.exists()
    except OSError:  # its folder may be listed, but not entered: said when it is read
        return True


def _remote(url: Url) -> Iterator[Url]:
    """Yield the traces at a URL.  Raises OSError, and not because of one file."""
    driver, path = url.driver()
    with driver_errors(url):
        if _TRACE_NAME.search(url.name):
            yield _known(url.text, driver.info(path))
            return
        inside = driver.find(path, detail=True)
    if list(inside) == [path]:  # an object with another name
        yield _known(url.text, inside[path])
        return
    for name, info in inside.items():
        text = driver.unstrip_protocol(name)
        # A host or account belongs to the driver, whose names lack it: another process needs it to open them.
        if driver._get_kwargs_from_urls(text) != driver._get_kwargs_from_urls(url.text):
            text = f"{url.text.rstrip('/')}/{name.removeprefix(path).lstrip('/')}"
        if _TRACE_NAME.search(name) and not name.rpartition("/")[2].startswith("."):
            yield _known(text, info)


def _known(text: str, info: dict[str, Any]) -> Url:
    """Return a URL with what the store says of it; each names the version as it likes."""
    marks = (info.get(each) for each in _VERSION_MARKS)
    return Url(text, info.get("size") or 0, next((str(mark) for mark in marks if mark), ""))
