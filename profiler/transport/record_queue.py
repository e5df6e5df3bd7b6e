"""Queues records and delivers them from a thread of its own, so that the training thread never waits.

The queue is bounded.  `put` is an append and wakes nobody: waking a thread costs the training thread a system call, and
the woken one then wants the GIL just as the next forward begins.  The thread looks by itself every LOOK_SECONDS and
delivers all that has come.  When the queue is full the *oldest* record is dropped, because the totals in every step
record make the newest worth the most.

The thread delivers through a `Carrier`.  When that fails (no daemon, full disk) it backs off exponentially up to
BACKOFF_SECONDS_MAX and tries the same record again.  What its reader would reject is left out first (`field_filter`).
At the end of a job the thread waits for a daemon that is being restarted, but not for one that never was there.

A forked child (a DataLoader worker) has the queue but not the thread, and locks may be held for ever there.  So every
public call in another process than the first returns at once.

`RecordSink` is the interface of every destination of records: it takes a record without waiting.

Left out: what is delivered and where.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from typing import Protocol

from pacecar.daemon_peer import UntrustedDaemonError
from pacecar.records import Answer, JobRecord

from .field_filter import FieldFilter

__all__ = [
    "BACKOFF_SECONDS_MAX",
    "LOOK_SECONDS",
    "QUEUE_LENGTH_MAX",
    "Carrier",
    "RecordQueue",
    "RecordRefused",
    "RecordSink",
    "RecordSource",
    "reason_of",
]

QUEUE_LENGTH_MAX = 1024
"""Queue bound, about 1 MiB of records: minutes of a usual job, so that a daemon can be restarted without loss."""

LOOK_SECONDS = 0.5
"""Time between two looks at the queue: fast enough for a person who watches, and two wake-ups a second at any pace."""

BACKOFF_SECONDS_MIN = 0.05
BACKOFF_SECONDS_MAX = 2.0
"""A restarted daemon gets records again after at most this."""

_log = logging.getLogger(__name__)


class RecordRefused(ValueError):  # noqa: N818  a verdict on one record, not a failure
    """The carrier will never accept this record; the queue drops it."""


class Carrier(Protocol):
    """Brings records to a destination; all calls come from the queue's thread."""

    @property
    def destination(self) -> str:
        """Name the destination for a log line."""
        ...

    def deliver(self, record: JobRecord | Answer, timeout_seconds: float) -> None:
        """Deliver `record`, waiting at most `timeout_seconds`.

        Raises:
            OSError: not now; the same record will be tried again.
            RecordRefused: never; the record is dropped.
        """
        ...

    def listen(self) -> None:
        """Read what the other side has sent, if anything; never waits, never raises."""
        ...

    def close(self) -> None:
        """Close sockets and files."""
        ...


class RecordSource(Protocol):
    """Whoever makes the records of a queue, as the queue's thread sees it."""

    def look(self) -> None:
        """Put the records that are made late."""
        ...

    def charge_records(self, duration_ns: int) -> None:
        """Take what delivering took of the processor, without `look`."""
        ...

    def wake(self) -> None:
        """Look at once, at the next step boundary, at what has come in."""
        ...


class RecordQueue:
    """A `RecordSink` that delivers through `carrier` from a daemon thread, started by the first `put`.

    `is_optional`: the destination may never be there, which is said as information and not as a warning.
    """

    def __init__(
        self, carrier: Carrier, *, queue_length_max: int = QUEUE_LENGTH_MAX, is_optional: bool = False
    ) -> None:
        self._carrier = carrier
        self._sendable = FieldFilter(carrier.destination)
        self._queue: deque[JobRecord | Answer] = deque()
        self._queue_length_max = queue_length_max
        self._is_optional = is_optional
        self._dropped = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._deadline = float("inf")
        self._is_complaining = False
        self._has_delivered = False
        self._is_absent = False
        self._source: RecordSource | None = None
        self._has_late_records = False

    def serve(self, source: RecordSource, *, has_late_records: bool = True) -> None:
        """Charge `source` for the thread from now on; before each look have it put its late records, if it has any."""
        self._source, self._has_late_records = source, has_late_records

    @property
    def dropped(self) -> int:
        """How many records were dropped so far."""
        return self._dropped

    def put(self, record: JobRecord | Answer) -> None:
        """Queue `record`; when the queue is full the oldest one is dropped and counted."""
        if os.getpid() != self._pid:
            return
        if self._closing.is_set():
            self._dropped += 1
            return
        if len(self._queue) >= self._queue_length_max:
            try:
                self._queue.popleft()
                self._dropped += 1
            except IndexError:  # the thread was faster, so there is room
                pass
        self._queue.append(record)
        if self._thread is None:
            with self._starting:  # a thread of ours may put too
                self._start()

    def close(self, timeout_seconds: float) -> None:
        """Deliver what is queued, for at most `timeout_seconds`, then close; what is left is counted as dropped."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds + 0.5)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="pacecar-records", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        backoff = BACKOFF_SECONDS_MIN
        try:
            while True:
                self._closing.wait(LOOK_SECONDS)
                source = self._source
                if source is not None and self._has_late_records:
                    source.look()
                begun = time.thread_time_ns()
                while self._queue and time.monotonic() < self._deadline:
                    record = self._queue.popleft()
                    sendable = self._sendable.make(record)
                    self._dropped += sendable is None
                    if sendable is None or self._deliver(sendable):
                        backoff = BACKOFF_SECONDS_MIN
                        continue
                    self._put_back(record)
                    if self._closing.is_set() and self._is_absent and not self._has_delivered:
                        return
                    self._closing.wait(backoff) if not self._closing.is_set() else time.sleep(BACKOFF_SECONDS_MIN)
                    backoff = min(2 * backoff, BACKOFF_SECONDS_MAX)
                if self._closing.is_set():
                    return
                self._carrier.listen()
                if source is not None:
                    source.charge_records(time.thread_time_ns() - begun)
        except Exception:  # noqa: BLE001  a thread's own outer boundary: the job cannot act on its traceback
            _log.warning("pacecar stops writing to %s after an error", self._carrier.destination, exc_info=True)
        finally:
            self._closing.set()
            self._dropped += len(self._queue)
            self._queue.clear()
            self._carrier.close()

    def _deliver(self, record: JobRecord | Answer) -> bool:
        left = self._deadline - time.monotonic()
        try:
            self._carrier.deliver(record, min(BACKOFF_SECONDS_MAX, max(left, 0.0)))
        except RecordRefused as refusal:
            self._dropped += 1
            _log.warning("pacecar drops a record for %s: %s", self._carrier.destination, refusal)
        except OSError as error:
            self._is_absent = isinstance(error, (FileNotFoundError, ConnectionRefusedError, UntrustedDaemonError))
            if not self._is_complaining:
                self._is_complaining = True
                self._complain(error)
            return False
        else:
            self._is_complaining = False
            self._has_delivered = True
        return True

    def _complain(self, error: OSError) -> None:
        """Say once that records cannot be delivered."""
        if self._is_optional and isinstance(error, FileNotFoundError) and not self._has_delivered:
            _log.info("pacecar does not find %s: it measures without it, and keeps looking", self._carrier.destination)
        else:
            _log.warning("pacecar cannot write to %s: %s; it keeps trying", self._carrier.destination, reason_of(error))

    def _put_back(self, record: JobRecord | Answer) -> None:
        if len(self._queue) >= self._queue_length_max:
            self._dropped += 1
        else:
            self._queue.appendleft(record)


def reason_of(error: OSError) -> str:
    """Return the reason alone: the kernel's words for the error, without its number and the path."""
    return error.strerror or str(error)


class RecordSink(Protocol):
    """Takes records on the training thread.  `put` neither blocks nor raises; what does not fit is counted."""

    @property
    def dropped(self) -> int:
        """How many records were dropped so far."""
        ...

    def put(self, record: JobRecord) -> None:
        """Queue `record` or drop it."""
        ...

    def close(self, timeout_seconds: float) -> None:
        """Deliver what is queued, for at most `timeout_seconds`, then close."""
        ...
