"""Reads and writes the knob store on its own thread while the job trains, because file access may take seconds.

Home folders lie on network drives that hang, and a lock may be held.  So the training loop never waits: what was not
read when tuning begins is not used, and changes go into a short queue.  The first problem is logged, and the job goes
on without memory.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Empty, Full, Queue

import msgspec

from pacecar.clock import Clock
from pacecar.records import JobHello

from .knob_store import (
    DamagedError,
    Fingerprint,
    KnobsFileError,
    KnobStore,
    StoredKnobs,
    default_place,
    remembered,
    stale,
    used,
)

__all__ = ["CLOSE_SECONDS_MAX", "JobMemory", "StoreThread", "store_thread_for"]

EDITS_MAX = 16
"""Most changes that wait to be written; a run makes a few."""

CLOSE_SECONDS_MAX = 2.0
"""Longest wait at the end of a job for what is still to be written."""

Edit = Callable[[tuple[StoredKnobs, ...]], Sequence[StoredKnobs]]

_log = logging.getLogger(__name__)


class StoreThread:
    """One job's access to the store.  `recall` and `put`, for the training thread, return at once."""

    def __init__(self, file: KnobStore) -> None:
        self._file = file
        self._edits: Queue[Edit | None] = Queue(EDITS_MAX)
        self._entries: dict[str, StoredKnobs] | None = None
        self._has_warned = False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="pacecar-knob-store", daemon=True)

    def start(self) -> None:
        """Start reading the file."""
        self._thread.start()

    def recall(self, fingerprint: Fingerprint) -> StoredKnobs | None:
        """Return the entry of such a job; None if there is none, it is stale, or it was not read in time."""
        entry = (self._entries or {}).get(fingerprint.key)
        return entry if entry is not None and entry.stale is None else None

    def put(self, edit: Edit) -> None:
        """Queue `edit` for the file; it is dropped, with a warning, when EDITS_MAX wait."""
        if os.getpid() == self._pid:
            try:
                self._edits.put_nowait(edit)
            except Full:
                self._warn_once(f"{self._file.path}: {EDITS_MAX} changes wait to be written; one is dropped")

    def close(self, timeout_seconds: float = CLOSE_SECONDS_MAX) -> None:
        """Write what waits, for at most `timeout_seconds`.  Harmless when repeated."""
        if os.getpid() != self._pid or not self._thread.is_alive():
            return
        try:
            self._edits.put_nowait(None)
        except Full:
            return
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            self._warn_once(f"{self._file.path}: not written within {timeout_seconds:g} s")

    def _run(self) -> None:
        try:
            self._entries = {entry.key: entry for entry in self._read()}
            while (edit := self._edits.get()) is not None:
                self._change(edit)
        except Exception:  # noqa: BLE001  a thread's own outer boundary: the job goes on without memory
            _log.warning("pacecar: an error in the knob store; this run's best knobs are not saved", exc_info=True)
            self._drain()

    def _read(self) -> tuple[StoredKnobs, ...]:
        try:
            return self._file.read()
        except DamagedError:
            self._change(lambda entries: entries)  # moves it aside, and logs where to
        except KnobsFileError as error:
            self._warn_once(str(error))
        return ()

    def _change(self, edit: Edit) -> None:
        try:
            message = self._file.change(edit)
        except KnobsFileError as error:
            self._warn_once(str(error))
        else:
            if message is not None:
                _log.warning("pacecar: %s", message)

    def _warn_once(self, what: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning("pacecar: this run's best knobs are not saved: %s", what)

    def _drain(self) -> None:
        try:
            while self._edits.get_nowait() is not None:
                pass
        except Empty:
            pass


def store_thread_for(knobs_file: str | None) -> StoreThread | None:
    """Return a thread for `knobs_file`, or for the user's default file; None for a user without a home."""
    if knobs_file is not None:
        return StoreThread(KnobStore(Path(knobs_file).expanduser().absolute(), is_ours=False))
    place = default_place()
    return None if place is None else StoreThread(KnobStore(place, is_ours=True))


class JobMemory:
    """The store for one job: uses its fingerprint, and signs entries with its name."""

    def __init__(self, store_thread: StoreThread, fingerprint: Fingerprint, hello: JobHello, clock: Clock) -> None:
        self._store_thread = store_thread
        self._fingerprint = fingerprint
        self._hello = hello
        self._clock = clock

    def recall(self, began: Mapping[str, int]) -> StoredKnobs | None:
        """Return the entry of a job like this one that began with these values."""
        self._fingerprint = msgspec.structs.replace(self._fingerprint, began=dict(began))
        return self._store_thread.recall(self._fingerprint)

    def keep(self, knobs: Mapping[str, int], gain_ratio: float, pace_ns: int | None, steps: int) -> None:
        """Remember these as the best, unless uneven work shares are among them: those are this run's machines'."""
        if knobs.get("work_share"):
            return
        now = self._clock.wall_ns()
        entry = StoredKnobs(
            key=self._fingerprint.key,
            fingerprint=self._fingerprint,
            knobs=dict(knobs),
            gain_ratio=gain_ratio,
            pace_ns=pace_ns,
            steps=steps,
            saved_wall_ns=now,
            used_wall_ns=now,
            job=self._hello.job,
            pacecar_version=self._hello.pacecar_version,
        )
        self._store_thread.put(lambda entries: remembered(entries, entry))

    def use(self, entry: StoredKnobs) -> None:
        """Note that `entry` is tried."""
        now = self._clock.wall_ns()
        self._store_thread.put(lambda entries: used(entries, entry, now))

    def doubt(self, entry: StoredKnobs, why: str) -> None:
        """Note that `entry` did not hold."""
        self._store_thread.put(lambda entries: stale(entries, entry, why))
