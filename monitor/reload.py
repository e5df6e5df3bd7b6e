"""Watches the configuration files of a running daemon and reads them anew when they change; a bad file changes nothing.

To start a second daemon with the new settings, or to stop and start, leaves a gap in every series.  To read a file as
soon as it changes reads half of it: an editor truncates and writes, and half of a TOML file is often a valid one with
fewer settings.  So a file that changed is read when it has looked the same twice.  A file that cannot be used, or that
is gone, leaves everything as it was: the log names it, the metric goes to 0, and it is tried again when it changes.

SIGHUP reads at once: whoever sends it says that the file is whole.

Not every setting can change under a running daemon: a port that is bound, a collector that runs.  Settings that were
changed and wait for a restart are named in the log too, so that nobody takes them for applied.

Left out: inotify.  It needs a file descriptor and a parser of its own to save one stat(2) a second, and sees neither
network file systems nor the swap of a Kubernetes volume's link.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from pacecar.config import DaemonConfig
from pacecar.records import Sample

from .catalog_sample import sample

__all__ = ["LIVE", "ReloadResults", "ReloadWatch", "changes", "in_force"]

LIVE = frozenset(
    {
        "cpu_budget",
        "glances_per_second",
        "job_forget_seconds",
        "jobs_max",
        "log_level",
        "ranks_max",
        "web_config_file",
    }
)
"""Keys of [daemon] that take effect at once; docs/configuration.md says the same, and a test compares."""

Stamp = tuple[int, int, int, int, int] | None
"""What tells one state of a file from another; None where there is none."""

_log = logging.getLogger(__name__)


class ReloadResults:
    """How reloads went.  One thread records them, any thread reads."""

    def __init__(self) -> None:
        self._is_good = True
        self._good_wall_ns: int | None = None
        self._reloads = {"success": 0, "failure": 0}

    def started(self, wall_ns: int) -> None:
        """Note when the daemon was started, with settings that could be used."""
        self._good_wall_ns = wall_ns

    def record(self, *, has_succeeded: bool, is_good: bool, wall_ns: int) -> None:
        """Count a reload; `is_good` says whether what is in the files can be used, of those not read this time too."""
        self._reloads["success" if has_succeeded else "failure"] += 1
        self._is_good = is_good
        if is_good:
            self._good_wall_ns = wall_ns

    def own_samples(self) -> Iterator[Sample]:
        """Yield whether the files can be used, since when, and how many reloads there were."""
        yield sample("pacecar_daemon_config_last_reload_successful", int(self._is_good))
        if self._good_wall_ns is not None:
            yield sample("pacecar_daemon_config_last_reload_success_timestamp_seconds", self._good_wall_ns)
        for outcome, count in self._reloads.items():
            yield sample("pacecar_daemon_config_reloads_total", count, outcome)


class Changes(NamedTuple):
    """The keys that differ: those that take effect at once, and those that need a restart."""

    live: tuple[str, ...]
    restart: tuple[str, ...]


def changes(before: DaemonConfig, after: DaemonConfig) -> Changes:
    """Return what differs between two configurations."""
    names = [f for f in DaemonConfig.__struct_fields__ if getattr(before, f) != getattr(after, f)]
    return Changes(tuple(n for n in names if n in LIVE), tuple(n for n in names if n not in LIVE))


def in_force(running: DaemonConfig, wanted: DaemonConfig) -> DaemonConfig:
    """Return what is in force after a reload: the live settings of `wanted`, the rest as the daemon was started."""
    return msgspec.structs.replace(running, **{name: getattr(wanted, name) for name in LIVE})


class ReloadWatch:
    """Files that are read together, and what reading them does.

    `read` reads and applies them, and raises one of `errors` when they cannot be used; it then has changed nothing.
    `files` gives their paths, as they are after the last good reading.
    """

    def __init__(
        self,
        read: Callable[[], None],
        files: Callable[[], Iterable[str | os.PathLike[str]]],
        errors: tuple[type[Exception], ...],
    ) -> None:
        self._read = read
        self._files = files
        self._errors: tuple[type[Exception], ...] = (*errors, FileNotFoundError)
        self._good = self._tried = self._seen = self._stamps()
        self.is_good = True

    def is_due(self) -> bool:
        """Return whether files changed since they were tried, and have not between the last two looks."""
        stamps = self._stamps()
        settled, self._seen = stamps == self._seen, stamps
        return settled and stamps != self._tried

    def reload(self, why: str) -> bool:
        """Read the files; return whether they could be used.  What went wrong is one line in the log."""
        before = self._stamps()
        gone = [path for path, stamp in before.items() if stamp is None and self._good.get(path) is not None]
        try:
            if gone:
                raise FileNotFoundError(f"{gone[0]}: is gone")
            self._read()
            self.is_good = True
        except self._errors as error:
            self.is_good = False
            _log.error("%s: %s; the settings before it stay in force", why, error)
        after = self._stamps()
        # Else it was written meanwhile: this state was not tried, and is due once it has settled.
        if all(after.get(path, stamp) == stamp for path, stamp in before.items()):
            self._tried = after
            if self.is_good:
                self._good = after
        self._seen = after
        return self.is_good

    def _stamps(self) -> dict[str, Stamp]:
        return {os.fspath(path): _stamp(path) for path in self._files()}


def _stamp(path: str | os.PathLike[str]) -> Stamp:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns)
