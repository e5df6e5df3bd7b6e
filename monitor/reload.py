"""Watches a running daemon's configuration files and reads them again when they change; a bad file changes nothing.

A restart would leave a gap in every series.  Reading a file as soon as it changes would read half of it: an editor
truncates and writes, and half of a TOML file is often valid with fewer settings.  So a changed file is read after two
equal checks.  An invalid or missing file changes nothing: the log names it, the metric goes to 0, and it is tried again
when it changes.  SIGHUP reads at once, because its sender knows that the file is complete.

Some settings cannot change under a running daemon: a bound port, a running collector.  The log names changed settings
that wait for a restart.

Left out: inotify.  It needs a descriptor and a parser to save one stat(2) a second, and sees neither network file
systems nor the replaced link of a Kubernetes volume.
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
"""Keys of [daemon] that take effect at once; a test compares them with docs/configuration.md."""

Stamp = tuple[int, int, int, int, int] | None
"""What distinguishes two states of a file; None if there is none."""

_log = logging.getLogger(__name__)


class ReloadResults:
    """The results of reloads.  One thread records them, any thread reads."""

    def __init__(self) -> None:
        self._is_good = True
        self._good_wall_ns: int | None = None
        self._reloads = {"success": 0, "failure": 0}

    def started(self, wall_ns: int) -> None:
        """Record when the daemon was started, with valid settings."""
        self._good_wall_ns = wall_ns

    def record(self, *, has_succeeded: bool, is_good: bool, wall_ns: int) -> None:
        """Count a reload; `is_good` says whether all files are valid, including those not read this time."""
        self._reloads["success" if has_succeeded else "failure"] += 1
        self._is_good = is_good
        if is_good:
            self._good_wall_ns = wall_ns

    def own_samples(self) -> Iterator[Sample]:
        """Yield whether the files are valid, since when, and how many reloads there were."""
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
    """Return the settings after a reload: the live ones of `wanted`, the others as the daemon was started."""
    return msgspec.structs.replace(running, **{name: getattr(wanted, name) for name in LIVE})


class ReloadWatch:
    """Files that are read together, and how.

    `read` reads and applies them, or raises one of `errors` if they are invalid and then has changed nothing. `files`
    returns their paths as of the last valid reading.
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
        """Return whether files changed since they were last tried, but not between the last two checks."""
        stamps = self._stamps()
        settled, self._seen = stamps == self._seen, stamps
        return settled and stamps != self._tried

    def reload(self, why: str) -> bool:
        """Read the files; return whether they were valid.  An error is one line in the log."""
        before = self._stamps()
        gone = [path for path, stamp in before.items() if stamp is None and self._good.get(path) is not None]
        try:
            if gone:
                raise FileNotFoundError(f"{gone[0]}: is gone")
            self._read()
            self.is_good = True
        except self._errors as error:
            self.is_good = False
            _log.error("%s: %s; the previous settings stay in force", why, error)
        after = self._stamps()
        # Otherwise it was written meanwhile: this state was not tried, and is due once it has settled.
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
