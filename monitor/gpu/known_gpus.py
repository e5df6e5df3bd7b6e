"""Remembers on disk which GPUs this node had, and says which of them are not there any more.

A GPU that does not come back after a boot has no series that could fall: the driver lists seven and all is well.  So
the daemon keeps a list of every GPU that it has read, by UUID, and compares.  No driver after one is the same case:
then all of them are missing.  A GPU that goes while the daemon runs is not missing but down (`gpu_state`); it is
missing for the next daemon.

    tick   --> what is there now             never waits
    thread --> the file, once a minute       a disk that hangs holds up nobody

A new GPU at the PCI address of one that is gone replaces it.  A GPU that was taken out on purpose is forgotten when
somebody deletes the file.  What is missing is judged SETTLE_SECONDS after the daemon's start: drivers
are loaded after daemons, and a GPU without persistence mode takes seconds to answer.

The file is in the folder of the recordings, which is the daemon's own in every deployment, under the node's name,
because home folders are shared among nodes.
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
from pacecar.records import Sample, Snapshot
from pacecar.records.ranges import Label, Nanoseconds
from pacecar.safe_files import own_folder, replacing

from ..watched_threads import CLOSE_SECONDS, WatchedThread

__all__ = ["GPUS_MAX", "SETTLE_SECONDS", "SYNC_SECONDS", "GpuInventory", "KnownGpu", "known_gpus_path", "read_known"]

SETTLE_SECONDS = 30.0
SYNC_SECONDS = 60.0
"""How often the file is looked at; so soon a deleted one takes effect."""

SAVE_SECONDS = 3600.0
"""How often the times at which GPUs were last seen are saved while nothing else changes."""

GPUS_MAX = 128
"""GPUs that are remembered, those seen last: a node has at most 64."""

FILE_BYTES_MAX = 256 * 1024
"""GPUS_MAX entries of the longest labels take less."""

_log = logging.getLogger(__name__)


class KnownGpu(msgspec.Struct, frozen=True):
    """A GPU that was read on this node: `gpu` is the label of its metrics then, `seen_wall_ns` when that was last."""

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
    """Return the GPUs in the file; raises OSError, and ValueError for what is no such file."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is not a regular file")
        raw = stream.read(FILE_BYTES_MAX + 1)
    if len(raw) > FILE_BYTES_MAX:
        raise ValueError(f"it is larger than {FILE_BYTES_MAX} bytes")
    return msgspec.json.decode(raw, type=_File).gpus[-GPUS_MAX:]  # msgspec.ValidationError is a ValueError


class GpuInventory:
    """The GPUs that are there, those that were, and the file.  `update` is called by one thread, the rest by any."""

    def __init__(self, path: Path, clock: Clock) -> None:
        self.path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, KnownGpu] = {}
        self._present: set[str] = set()
        self._unnamed: set[str] = set()
        self._is_asked = self._is_loaded = self._has_file = self._has_changed = False
        self._saved_ns = self._started_ns = clock.monotonic_ns()
        self._told: frozenset[str] = frozenset()
        self._trouble: str | None = None
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
                _log.warning("%s does not get written, and is left behind", self.path)
            self.thread = None

    def update(self, snapshot: Snapshot) -> None:
        """Take the GPUs of a tick."""
        up = {sample.labels[0] for sample in snapshot.of("pacecar_gpu_up") if sample.value}
        named = {sample.labels[0]: sample.labels for sample in snapshot.of("pacecar_gpu_info") if sample.labels[1]}
        with self._lock:
            self._is_asked = "gpu" in snapshot.outcomes
            self._unnamed = {sample.labels[0] for sample in snapshot.of("pacecar_gpu_up")} - named.keys()
            for gpu, (_, uuid, name, _, address, *_) in named.items():
                self._present.add(uuid)
                if gpu in up and self._is_loaded:
                    self._note(KnownGpu(uuid, name, address, gpu, snapshot.wall_ns))
            missing = self._missing()
        self._tell(missing)

    def missing(self) -> tuple[KnownGpu, ...]:
        """Return the GPUs that were here and are not, in the order of their labels; empty until that can be judged."""
        with self._lock:
            return self._missing()

    def last_known(self, gpu: str) -> KnownGpu | None:
        """Return the GPU that had the label `gpu` when it was last read, for one that does not say which it is."""
        with self._lock:
            return next((known for known in reversed(self._known.values()) if known.gpu == gpu), None)

    def own_samples(self) -> Iterator[Sample]:
        """Yield of each GPU that is remembered whether it is missing; nothing until that can be judged."""
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
        # A GPU that has not said which it is is the one that had its label.
        found = [
            known
            for known in self._known.values()
            if known.uuid not in self._present and known.gpu not in self._unnamed
        ]
        return tuple(sorted(found, key=lambda known: (len(known.gpu), known.gpu, known.uuid)))

    def _note(self, seen: KnownGpu) -> None:
        before = self._known.pop(seen.uuid, None)
        self._known[seen.uuid] = seen  # the latest is last: those seen longest ago are the first to go
        if before is None:
            for other in list(self._known.values()):
                if other.pci_bus_id == seen.pci_bus_id and other.uuid not in self._present:
                    del self._known[other.uuid]
            while len(self._known) > GPUS_MAX:
                del self._known[next(iter(self._known))]
        if before is None or msgspec.structs.replace(before, seen_wall_ns=seen.seen_wall_ns) != seen:
            self._has_changed = True

    # --- what is told ---------------------------------------------------------------------------

    def _tell(self, missing: Sequence[KnownGpu]) -> None:
        """Log each GPU once when it is found missing."""
        uuids = frozenset(known.uuid for known in missing)
        for known in missing:
            if known.uuid not in self._told:
                _log.warning(
                    "GPU %s (%s, PCI address %s) is missing: it was last read at %s, as GPU %s.  If it was taken out on"
                    " purpose, delete %s",
                    clean(known.uuid), clean(known.name), clean(known.pci_bus_id), second_text(known.seen_wall_ns),
                    clean(known.gpu), self.path,
                )  # fmt: skip
        if self._told and not uuids:
            _log.info("no GPU is missing any more")
        self._told = uuids

    # --- the file, on its thread ----------------------------------------------------------------

    def _run(self) -> None:
        self._keep_file()
        while not self._is_closing:
            self._wake.wait(SYNC_SECONDS)
            self._keep_file()

    def _keep_file(self) -> None:
        """Read the file, or bring it up to date; a trouble is logged once, and tried again at the next turn."""
        try:
            if not self._is_loaded:
                self._load()
            self._save()
        except OSError as error:
            trouble = f"{self.path}: {error.strerror or error}"
            if trouble != self._trouble:
                _log.warning("GPUs that go missing will not be noticed after a restart: %s", trouble)
            self._trouble = trouble
        else:
            self._trouble = None

    def _load(self) -> None:
        known: tuple[KnownGpu, ...] = ()
        try:
            known = read_known(self.path)
            self._has_file = True
        except FileNotFoundError:
            pass
        except ValueError as error:
            _log.warning("%s is damaged, and the GPUs in it are forgotten: %s", self.path, clean(error))
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
            _log.info("%s was deleted: GPUs that are not there are forgotten", self.path)
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
