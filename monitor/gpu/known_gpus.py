"""Remembers on disk which GPUs this node had, and reports those that are missing.

A GPU that does not come back after a boot has no series that could fall: the driver lists seven and all looks well.  So
the daemon keeps a list of every GPU that it has read, by UUID, and compares.  If the driver is gone after a boot, all
of them are missing.  A GPU that disappears while the daemon runs is down (`gpu_state`), and missing for the next
daemon.

    tick   --> what is there now             never waits
    thread --> the file, once a minute       so a disk that hangs blocks nothing else

A new GPU replaces a missing one at its PCI address.  To forget a GPU that was removed on purpose, delete the file. The
comparison starts SETTLE_SECONDS after the daemon: drivers are loaded after daemons, and a GPU without persistence mode
takes seconds to answer.

The file lies in the folder of the recordings, which belongs to the daemon in every deployment.  Its name contains the
node's name, because nodes share home folders.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.formatting.dates import second_text
from pacecar.formatting.plain_text import clean
from pacecar.records import Failed, Sample, Snapshot
from pacecar.records.ranges import Label, Nanoseconds
from pacecar.safe_files import own_folder, replacing

from ..watched_threads import CLOSE_SECONDS, WatchedThread

__all__ = ["GPUS_MAX", "SETTLE_SECONDS", "SYNC_SECONDS", "GpuInventory", "KnownGpu", "known_gpus_path", "read_known"]

SETTLE_SECONDS = 30.0
SYNC_SECONDS = 60.0
"""How often the file is checked, which is how soon a deletion takes effect."""

SAVE_SECONDS = 3600.0
"""How often the times of the last sightings are saved while nothing else changes."""

GPUS_MAX = 128
"""GPUs that are remembered, the most recently seen; a node has at most 64."""

FILE_BYTES_MAX = 256 * 1024
"""GPUS_MAX entries with the longest labels take less."""

_log = logging.getLogger(__name__)


class KnownGpu(msgspec.Struct, frozen=True):
    """A GPU that was read on this node: `gpu` was its label and `seen_wall_ns` the time of the last reading."""

    uuid: Label
    name: Label
    pci_bus_id: Label
    gpu: Label
    seen_wall_ns: Nanoseconds


class _File(msgspec.Struct, frozen=True):
    version: Literal[1]
    gpus: tuple[KnownGpu, ...]


def known_gpus_path(recordings: str | os.PathLike[str], node: str) -> Path:
    """Return the file of the node called `node` in the folder of the recordings."""
    return Path(recordings) / f"known-gpus-{clean(node).replace('/', '_')}.json"


def read_known(path: Path) -> tuple[KnownGpu, ...]:
    """Return the GPUs in the file; raises OSError, or ValueError if it is not such a file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        raw = stream.read(FILE_BYTES_MAX + 1)
    if len(raw) > FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
    return msgspec.json.decode(raw, type=_File).gpus[-GPUS_MAX:]  # msgspec.ValidationError is a ValueError


class GpuInventory:
    """The GPUs that are present, those that were, and the file.  One thread calls `update`, any thread the rest."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, KnownGpu] = {}
        self._present: set[str] = set()
        self._unnamed: set[str] = set()
        self._is_asked = self._is_loaded = self._has_file = self._has_changed = False
        self._saved_ns = self._started_ns = clock.monotonic_ns()
        self._logged: frozenset[str] = frozenset()
        self._problem: str | None = None
        self._wake = threading.Event()
        self._is_closing = False
        self.thread: WatchedThread | None = None
        """The thread that reads and writes the file; None before `start` and after `close`."""

    def start(self) -> None:
        """Start the thread, which reads the file first."""
        self._started_ns = self._clock.monotonic_ns()
        self.thread = WatchedThread("inventory", self._run, self._clock)
        self.thread.start()

    def close(self) -> None:
        """Save what changed; a disk that hangs is left behind."""
        self._is_closing = True
        self._wake.set()
        if self.thread is not None:
            if not self.thread.join(CLOSE_SECONDS):
                _log.warning("%s is not written in time: the thread is left behind", self.path)
            self.thread = None

    def update(self, snapshot: Snapshot) -> None:
        """Record the GPUs of a tick."""
        up = {sample.labels[0] for sample in snapshot.of("pacecar_gpu_up") if sample.value}
        named = {sample.labels[0]: sample.labels for sample in snapshot.of("pacecar_gpu_info") if sample.labels[1]}
        with self._lock:
            self._is_asked = "gpu" in snapshot.outcomes
            asked = {sample.labels[0] for sample in snapshot.of("pacecar_gpu_up")}
            if asked or not isinstance(snapshot.outcomes.get("gpu"), Failed):  # else no GPU was asked
                self._unnamed = asked - named.keys()
            for gpu, (_, uuid, name, _, address, *_) in named.items():
                self._present.add(uuid)
                if gpu in up and self._is_loaded:
                    self._remember(KnownGpu(uuid, name, address, gpu, snapshot.wall_ns))
            missing = self._missing()
        self._log_missing(missing)

    def missing(self) -> tuple[KnownGpu, ...]:
        """Return the missing GPUs in the order of their labels; empty until that can be judged."""
        with self._lock:
            return self._missing()

    def last_known(self, gpu: str) -> KnownGpu | None:
        """Return the GPU that last had the label `gpu`, for one that does not report its identity."""
        with self._lock:
            return next((known for known in reversed(self._known.values()) if known.gpu == gpu), None)

    def own_samples(self) -> Iterator[Sample]:
        """Yield whether each remembered GPU is missing; nothing until that can be judged."""
        with self._lock:
            known, missing = list(self._known.values()) if self._is_settled else [], self._missing()
        for one in known:
            yield Sample("pacecar_gpu_missing", (one.uuid, one.name, one.pci_bus_id), int(one in missing))

    # --- what is known, under the lock ----------------------------------------------------------

    @property
    def _is_settled(self) -> bool:
        waited_ns = self._clock.monotonic_ns() - self._started_ns
        return self._is_loaded and self._is_asked and waited_ns >= SETTLE_SECONDS * NS_PER_SECOND

    def _missing(self) -> tuple[KnownGpu, ...]:
        if not self._is_settled:
            return ()
        # A GPU that has not reported its identity counts as the one that had its label.
        found = [
            known
            for known in self._known.values()
            if known.uuid not in self._present and known.gpu not in self._unnamed
        ]
        return tuple(sorted(found, key=lambda known: (len(known.gpu), known.gpu, known.uuid)))

    def _remember(self, seen: KnownGpu) -> None:
        before = self._known.pop(seen.uuid, None)
        self._known[seen.uuid] = seen  # the latest is last, so those seen longest ago are dropped first
        if before is None:
            for other in list(self._known.values()):
                if other.pci_bus_id == seen.pci_bus_id and other.uuid not in self._present:
                    del self._known[other.uuid]
            while len(self._known) > GPUS_MAX:
                del self._known[next(iter(self._known))]
        if before is None or msgspec.structs.replace(before, seen_wall_ns=seen.seen_wall_ns) != seen:
            self._has_changed = True

    # --- what is told ---------------------------------------------------------------------------

    def _log_missing(self, missing: Sequence[KnownGpu]) -> None:
        """Log each GPU once when it is found missing."""
        uuids = frozenset(known.uuid for known in missing)
        for known in missing:
            if known.uuid not in self._logged:
                _log.warning(
                    "GPU %s (%s, PCI address %s) is missing: it was last read at %s, as GPU %s.  If it was removed on"
                    " purpose, delete %s",
                    clean(known.uuid), clean(known.name), clean(known.pci_bus_id), second_text(known.seen_wall_ns),
                    clean(known.gpu), self.path,
                )  # fmt: skip
        if self._logged and not uuids:
            _log.info("no GPU is missing now")
        self._logged = uuids

    # --- the file, on its thread ----------------------------------------------------------------

    def _run(self) -> None:
        self._sync_file()
        while not self._is_closing:
            self._wake.wait(SYNC_SECONDS)
            self._sync_file()

    def _sync_file(self) -> None:
        """Read the file or bring it up to date; log a problem once and try again next time."""
        try:
            if not self._is_loaded:
                self._load()
            self._save()
        except OSError as error:
            problem = f"{self.path}: {error.strerror or error}"
            if problem != self._problem:
                _log.warning("GPUs that disappear will not be noticed after a restart: %s", problem)

            self._problem = problem
        else:
            self._problem = None

    def _load(self) -> None:
        known: tuple[KnownGpu, ...] = ()
        try:
            known = read_known(self.path)
            self._has_file = True
        except FileNotFoundError:
            pass
        except ValueError as error:
            _log.warning("%s is damaged, so the GPUs in it are forgotten: %s", self.path, clean(error))
        with self._lock:
            self._known = {one.uuid: one for one in known}
            self._is_loaded = True

    def _save(self) -> None:
        was_deleted = self._has_file and not self.path.exists()
        now_ns = self._clock.monotonic_ns()
        with self._lock:
            if was_deleted:
                self._known = {uuid: known for uuid, known in self._known.items() if uuid in self._present}
                self._has_file, self._has_changed = False, True
            is_due = self._has_changed or self._is_closing or now_ns - self._saved_ns >= SAVE_SECONDS * NS_PER_SECOND
            known = tuple(self._known.values())
            self._has_changed = self._has_changed and not is_due
        if was_deleted:
            _log.info("%s was deleted: missing GPUs are forgotten", self.path)
        if not known or not is_due:
            return
        try:
            os.close(own_folder(self.path.parent))
            with replacing(self.path) as stream:
                stream.write(msgspec.json.encode(_File(1, known)))
        except OSError:
            self._has_changed = True
            raise
        self._has_file, self._saved_ns = True, now_ns
