r"""Read recorded machines: the files of /proc, /sys and /etc of one machine in one text file of tests/machines/.

    # a comment
    sys/class/net/eth0/mtu = 9000                      a file of one line
    sys/class/net/eth0/device -> sys/devices/pci0000   a link, to a path from the root of the machine
    sys/block/sda/                                     an empty folder
    sys/devices/pci0000/config @100 0d000100           bytes at that place (hexadecimal) of a page of 4096 zeros
    proc/loadavg                                       a file of many lines, or of none
    | 0.50 0.25 0.10 2/345 6789

Every line of a file ends with a newline.  A tab is a tab.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

__all__ = ["MACHINES", "Recording", "Site", "machine", "recording", "write"]

MACHINES = Path(__file__).parents[1] / "machines"
PAGE_BYTES = 4096
"""PCI Express configuration space."""


class Recording(NamedTuple):
    """A machine's files and links by their path from the root; a folder is a file without content."""

    files: dict[str, str | bytes]
    links: dict[str, str]
    folders: tuple[str, ...] = ()


def recording(name: str) -> Recording:
    """Return tests/machines/`name`.txt; raises ValueError with the line that says nothing."""
    files: dict[str, str | bytes] = {}
    links: dict[str, str] = {}
    folders: list[str] = []
    path = ""
    for number, line in enumerate((MACHINES / f"{name}.txt").read_text().split("\n"), 1):
        if line.startswith("#") or not line:
            continue
        if line == "|" or line.startswith("| "):
            before = files.get(path)
            if not isinstance(before, str):
                raise ValueError(f"{name}.txt:{number}: a line of no file: {line!r}")
            files[path] = before + line[2:] + "\n"
            continue
        path, kind, rest = _entry(line)
        if path in files or path in links:
            raise ValueError(f"{name}.txt:{number}: {path} twice")
        if kind == "->":
            links[path] = rest
        elif kind == "@":
            files[path] = _page(rest)
        elif kind == "=":
            files[path] = rest + "\n"
        elif path.endswith("/"):
            folders.append(path)
        else:
            files[path] = ""
    return Recording(files, links, tuple(folders))


def _entry(line: str) -> tuple[str, str, str]:
    for kind, sign in (("=", " = "), ("->", " -> "), ("@", " @")):
        path, found, rest = line.partition(sign)
        if found and " " not in path:
            return path, kind, rest
    return line, "", ""


def _page(words: str) -> bytes:
    page = bytearray(PAGE_BYTES)
    for word in words.split(" @"):
        at, _, content = word.partition(" ")
        page[int(at, 16) : int(at, 16) + len(content) // 2] = bytes.fromhex(content)
    return bytes(page)


def write(
    root: Path, files: Mapping[str, str | bytes], links: Mapping[str, str], folders: tuple[str, ...] = ()
) -> None:
    """Lay a machine out below `root`."""
    base = str(root)
    for folder in {os.path.dirname(path) for path in (*files, *links, *folders)}:
        os.makedirs(f"{base}/{folder}", exist_ok=True)
    for path, content in files.items():
        number = os.open(f"{base}/{path}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.write(number, content if isinstance(content, bytes) else content.encode())
        os.close(number)
    for path, target in links.items():
        os.symlink(os.path.relpath(target, os.path.dirname(path)), f"{base}/{path}")


class Site:
    """A place where one machine after the other stands; only what differs is written, for a machine is 500 files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._files: dict[str, str | bytes] = {}
        self._links: dict[str, str] = {}

    def build(self, files: Mapping[str, str | bytes], links: Mapping[str, str]) -> None:
        """Make what stands here these files and links, and nothing else of what was built before."""
        for path in [p for p in self._files if p not in files] + [
            p for p, t in self._links.items() if links.get(p) != t
        ]:
            (self.root / path).unlink()
            self._remove_empty(path)
        write(
            self.root,
            {path: content for path, content in files.items() if self._files.get(path) != content},
            {path: target for path, target in links.items() if self._links.get(path) != target},
        )
        self._files, self._links = dict(files), dict(links)

    def _remove_empty(self, path: str) -> None:
        for folder in (self.root / path).parents:
            if folder == self.root or any(folder.iterdir()):
                return
            folder.rmdir()


def machine(name: str, root: Path) -> Path:
    """Lay the recorded machine out below `root`, for a test to change, and return `root`."""
    write(root, *recording(name))
    return root
