"""Translates paths of v2 control groups from a container's view into paths below the host's root.

A container has its own view (a cgroup namespace; on v2 Kubernetes gives one to every pod).  In it, its own group is
`/`, and groups outside are relative, as in `/../../kubepods-pod7.slice/x.scope`.  With the host's /sys mounted the
groups can be read, but their folder depends on the host's name of our own group, which no file contains.

So we search for our own folder by inode: it has the inode of the root of our view, and lies as many levels below the
host's root as the mount says.  It does not move while we run, so one search is enough.

Source: cgroup_namespaces(7).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

__all__ = ["CgroupMounts"]

FOLDERS_MAX = 20_000
"""Most folders searched on one level; a node with 500 pods has some 3000 groups."""


class _Own(NamedTuple):
    inode: int
    names: tuple[str, ...] | None


class CgroupMounts:
    """Translates paths of our view of the v2 hierarchy into the host's; remembers where our own group is."""

    def __init__(self, process_root: Path) -> None:
        self._process_root = process_root
        self._own: _Own | None = None

    def folder(self, mountpoint: str) -> Path:
        """Return where this process sees `mountpoint`."""
        return self._process_root / mountpoint.lstrip("/")

    def outside(self, path: str, *, own_mountpoint: str, host_mountpoint: str, host_root: str) -> str | None:
        """Return `path` from the host's root; None if our own folder is not found or `path` lies above that root.

        `host_root` is the root of the host's mount in mountinfo: `/..` for each level that we are below it.
        """
        depth = len(_names(host_root))
        own = self._names_of_own(own_mountpoint, self.folder(host_mountpoint), depth)
        names = _names(path)
        ups = next((index for index, name in enumerate(names) if name != ".."), len(names))
        if own is None or ups > depth or ".." in names[ups:]:
            return None
        return "/" + "/".join((*own[: depth - ups], *names[ups:]))

    def _names_of_own(self, own_mountpoint: str, top: Path, depth: int) -> tuple[str, ...] | None:
        try:
            inode = self.folder(own_mountpoint).stat().st_ino
        except OSError:
            return None
        if self._own is None or self._own.inode != inode:
            self._own = _Own(inode, _find(top, depth, inode))
        return self._own.names


def _names(path: str) -> Sequence[str]:
    return [name for name in path.split("/") if name]


def _find(top: Path, depth: int, inode: int) -> tuple[str, ...] | None:
    """Return the names on the way to the folder with `inode`, `depth` levels below `top`."""
    level: list[tuple[str, ...]] = [()]
    for below in range(1, depth + 1):
        found: list[tuple[str, ...]] = []
        for names in level:
            with suppress(OSError), os.scandir(top.joinpath(*names)) as entries:  # a group may have ended
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        if below == depth and entry.inode() == inode:
                            return (*names, entry.name)
                        found.append((*names, entry.name))
        level = found[:FOLDERS_MAX]
    return None
