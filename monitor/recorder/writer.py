"""Writes recordings to a disk that may be full, slow or gone, on a thread that may hang, and tries again.

A full disk is full at the next attempt too, so it is logged once and tried every RETRY_SECONDS; a line for each attempt
would fill the log of a node whose disk is full.  What is written are the chunks of the moment at which it was wanted: a
later attempt does not lose what has meanwhile left the window.  They are held for GIVE_UP_SECONDS, one capture at a
time, so the memory is at most twice that of the ring buffers.  Whoever asked for a file is told at the first failure,
and does not wait.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records.recording import RecordingHeader, parts

from ..watched_threads import WatchedThread
from .shelf import RecordingFolder, RecordingFolderFullError

__all__ = ["GIVE_UP_SECONDS", "RETRY_SECONDS", "Capture", "RecordingWriter"]

RETRY_SECONDS = 30.0
GIVE_UP_SECONDS = 600.0

_log = logging.getLogger(__name__)


class Capture(NamedTuple):
    """What is to be written, and who gets the result."""

    header: RecordingHeader
    chunks: tuple[bytes, ...]
    askers: tuple[Callable[[bool, str], None], ...] = ()
    label: str = "request"
    """Part of the file's name, which says whose recording it is (`shelf`)."""


class RecordingWriter:
    """Writes one capture at a time.  `write` is called by one thread, the figures may be read by any."""

    def __init__(self, clock: Clock, shelf: RecordingFolder) -> None:
        self._clock = clock
        self._shelf = shelf
        self.files = self.failures = self.lost = 0
        self.files_bytes: int | None = None
        self._capture: Capture | None = None
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._named: str | None = None
        self._is_hopeless = False
        self.thread: WatchedThread | None = None
        """The thread that writes; None before `start` and after `close`."""

    @property
    def is_busy(self) -> bool:
        """Whether a capture is not written yet."""
        return self._capture is not None

    def start(self) -> None:
        """Start the thread."""
        self.thread = WatchedThread("scrivener", self._run, self._clock)
        self.thread.start()

    def close(self, timeout_seconds: float) -> None:
        """Try once more what is not written, and end; a write that hangs is left behind."""
        self._stop.set()
        self._wake.set()
        if self.thread is not None:
            if not self.thread.join(timeout_seconds):
                _log.warning("%s does not take what is written, the recording is left behind", self._shelf.folder)
            self.thread = None

    def write(self, capture: Capture) -> None:
        """Have `capture` written; one that still waits, as can be at the daemon's end, is lost."""
        if self._capture is not None:
            self.lost += 1
        self._capture = capture
        self._wake.set()

    def _run(self) -> None:
        self._measure()
        while True:
            self._wake.wait()
            self._wake.clear()
            capture = self._capture
            if capture is not None:
                self._finish(capture)
            if self._stop.is_set() and self._capture is None:
                return

    def _finish(self, capture: Capture) -> None:
        """Write `capture`, however often that must be tried."""
        begun = self._clock.monotonic_ns()
        askers = capture.askers
        wants_retry = any(trigger.kind != "request" for trigger in capture.header.triggers)
        while True:
            done, said = self._try(capture)
            for answer in askers:
                answer(done, said)
            askers = ()
            if done or not wants_retry:
                break
            if self._is_hopeless:
                self.lost += 1
                break
            is_late = self._clock.monotonic_ns() - begun >= GIVE_UP_SECONDS * NS_PER_SECOND
            if is_late or self._stop.is_set():
                self.lost += 1
                _log.warning("a recording is given up: %s", said)
                break
            self._stop.wait(RETRY_SECONDS)
        if self._capture is capture:
            self._capture = None

    def _try(self, capture: Capture) -> tuple[bool, str]:
        pieces = list(parts(capture.header, capture.chunks))
        size = sum(map(len, pieces))
        try:
            path = self._shelf.put(pieces, size, capture.label, capture.header.written_wall_ns)
        except OSError as error:
            self._is_hopeless = isinstance(error, RecordingFolderFullError)
            self.failures += 1
            said = f"no recording can be written in {self._shelf.folder}: {error.strerror or error}"
            if said != self._named:
                self._named = said
                again = "it is given up" if self._is_hopeless else f"trying again every {RETRY_SECONDS:g} s"
                _log.warning("%s; %s", said, again)
            return False, said
        self._named, self._is_hopeless = None, False
        self._measure()
        self.files += 1
        _log.info("wrote %s, %d bytes", path, size)
        return True, str(path)

    def _measure(self) -> None:
        try:
            self.files_bytes = self._shelf.size()
        except OSError:
            self.files_bytes = None
