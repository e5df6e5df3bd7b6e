"""Queues records and delivers them from its own thread, so that the training thread never waits.

The queue is bounded.  `put` appends without waking the thread, which would cost the training thread a system call and
make the woken thread compete for the GIL just as the next forward begins.  Instead the thread checks the queue every
LOOK_SECONDS and delivers everything in it.  When the queue is full the *oldest* record is dropped: every step record
has totals, so the newest one is worth the most.

The thread delivers through a `Carrier`.  If that fails (no daemon, full disk) it backs off exponentially up to
BACKOFF_SECONDS_MAX and retries the same record.  What the reader would reject is removed first (`field_filter`).  At
the end of a job the thread waits for a daemon that is restarting, but not for one that was never there.

A forked child (a DataLoader worker) has the queue but not the thread, and its locks may be held forever.  So every
public method returns at once in any process but the first.

`RecordSink` is the interface of every destination of records: it accepts a record without waiting.
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
    "LateRecords",
    "RecordQueue",
    "RecordRefused",
    "RecordSink",
    "RecordSource",
    "reason_of",
]

QUEUE_LENGTH_MAX = 1024
"""Queue bound, about 1 MiB of records: minutes of a typical job, so that a daemon can restart without loss."""

LOOK_SECONDS = 0.5
"""Time between two checks of the queue: fast enough for a live view, and only two wake-ups a second at any pace."""

BACKOFF_SECONDS_MIN = 0.05
BACKOFF_SECONDS_MAX = 2.0
"""A restarted daemon gets records again after at most this time."""

_log = logging.getLogger(__name__)


class RecordRefused(ValueError):  # noqa: N818  about a single record, not a failure
    """The carrier will never accept this record; the queue drops it."""


class Carrier(Protocol):
    """Delivers records to a destination; all calls come from the queue's thread."""

    @property
    def destination(self) -> str:
        """The destination's name in log lines."""
        ...

    def deliver(self, record: JobRecord | Answer, timeout_seconds: float) -> None:
        """Deliver `record`, waiting at most `timeout_seconds`.

        Raises:
            OSError: delivery failed for now; the same record will be retried.
            RecordRefused: the destination will never accept the record, which is dropped.
        """
        ...

    def listen(self) -> None:
        """Read anything the other side has sent; never waits or raises."""
        ...

    def close(self) -> None:
        """Close sockets and files."""
        ...


class LateRecords(Protocol):
    """Records that are built late, as seen by the thread that delivers them."""

    def flush_in_background(self, after_seconds: float = ...) -> None:
        """Put them into the queue, unless that happened less than `after_seconds` ago."""
        ...

    def charge(self, cost_ns: int) -> None:
        """Charge the processor time of delivering, without `flush_in_background`."""
        ...


class RecordSource(Protocol):
    """The source of a queue's records, as seen by the queue's thread."""

    @property
    def records(self) -> LateRecords:
        """The records that are built late."""
        ...

    def wake(self) -> None:
        """Handle incoming messages at the very next step boundary."""
        ...


class RecordQueue:
    """A `RecordSink` that delivers through `carrier` from a daemon thread, started by the first `put`.

    `is_optional`: the destination may never exist, which is logged as information instead of a warning.
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
        """Charge `source` for the thread from now on; make it put its late records, if any, before each check."""
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
            except IndexError:  # the thread was faster, so there is space
                pass
        self._queue.append(record)
        if self._thread is None:
            with self._starting:  # one of our threads may call put too
                self._start()

    def close(self, timeout_seconds: float) -> None:
        """Deliver queued records for at most `timeout_seconds`, then close; the rest is counted as dropped."""
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
                    source.records.flush_in_background()
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
                    source.records.charge(time.thread_time_ns() - begun)
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
            _log.info("pacecar does not find %s; it measures without it and keeps looking", self._carrier.destination)
        else:
            _log.warning("pacecar cannot write to %s: %s; it keeps trying", self._carrier.destination, reason_of(error))

    def _put_back(self, record: JobRecord | Answer) -> None:
        if len(self._queue) >= self._queue_length_max:
            self._dropped += 1
        else:
            self._queue.appendleft(record)


def reason_of(error: OSError) -> str:
    """Return only the kernel's description of the error, without its number and the path."""
    return error.strerror or str(error)


class RecordSink(Protocol):
    """Accepts records on the training thread.  `put` neither blocks nor raises; what does not fit is counted."""

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
