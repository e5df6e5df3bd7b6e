"""Holds the doctor's sources (roots, environment, driver), and reads kernel files, noting what cannot be read.

The sources are passed in, so that a recorded machine is read like this one.  A missing file is healthy and not noted.
A file that cannot be read or parsed is noted by name, and everything else still counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pacecar.kernel_files.link_speeds import INTERFACE_HAS_NONE
from pacecar.kernel_files.reader import KernelFiles, integer
from pacecar.monitor.gpu.driver import Nvml
from pacecar.nccl_ras import RasFinding

from .facts.model import Seen

__all__ = ["UNREADABLE_MAX", "FactReader", "HostAccess"]

UNREADABLE_MAX = 64
"""Notes that are kept; further ones are counted."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostAccess:
    """The sources that the doctor reads.

    Without `nvml` no driver is queried; without `files` the files under the roots are read; `known_gpus` is the
    daemon's list of GPUs.  `ras` returns what NCCL's RAS says is wrong, None if there is none, or raises `RasError`;
    without `ras` it is not asked.
    """

    proc: Path = Path("/proc")
    sys: Path = Path("/sys")
    etc: Path = Path("/etc")
    home: Path | None = None
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    nvml: Nvml | None = None
    pid: int | None = None
    files: KernelFiles | None = None
    known_gpus: Path | None = None
    ras: Callable[[], tuple[RasFinding, ...] | None] | None = None


class FactReader:
    """Reads kernel files and notes failures."""

    def __init__(self, access: HostAccess) -> None:
        self.access = access
        self.files = access.files or KernelFiles(access.proc, access.sys)
        self._notes: list[str] = []
        self._count = 0
        self._limited: dict[str, None] = {}

    @property
    def unreadable(self) -> tuple[str, ...]:
        """What exists and could not be read."""
        more = self._count - len(self._notes)
        return (*self._notes, f"and {more} more") if more else tuple(self._notes)

    @property
    def limited(self) -> tuple[str, ...]:
        """What this user may not see, which is not a fault of the machine."""
        return tuple(self._limited)

    def note(self, reason: str) -> None:
        """Record that something could not be read."""
        self._count += 1
        if len(self._notes) < UNREADABLE_MAX:
            self._notes.append(reason)

    def limit(self, reason: str) -> None:
        """Record, once, that this user may not see something."""
        self._limited[reason] = None

    def text(self, path: Path) -> str | None:
        """Return the text of `path`, None if it cannot be read."""
        try:
            return self.files.read(path)
        except OSError as error:
            if error.errno not in INTERFACE_HAS_NONE:
                self.note(f"{path}: {error.strerror or error}")
            return None

    def names(self, path: Path) -> list[str]:
        """Return the sorted names in the folder `path`, none if it cannot be read."""
        try:
            return self.files.names(path)
        except OSError as error:
            if error.errno not in INTERFACE_HAS_NONE:
                self.note(f"{path}: {error.strerror or error}")
            return []

    def parsed(self, path: Path, parse: Callable[[str], T]) -> Seen[T] | None:
        """Return what `parse` makes of the stripped text of `path`, None if it is missing or malformed."""
        text = self.text(path)
        if text is None:
            return None
        try:
            return Seen(parse(text.strip()), str(path))
        except (ValueError, IndexError) as error:
            self.note(f"{path}: {error} in {text.strip()[:80]!r}")
            return None

    def word(self, path: Path) -> Seen[str] | None:
        """Return the only line of `path`, None if it is missing or empty."""
        seen = self.parsed(path, str)
        return seen if seen is not None and seen.value else None

    def number(self, path: Path) -> Seen[int] | None:
        """Return the only number in `path`, None if it is missing or malformed."""
        return self.parsed(path, integer)
