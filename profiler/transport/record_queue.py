"""Queues records and delivers them from its own thread, so that the training thread never waits.

The queue is bounded.  `put` appends without waking the thread, which would cost the training thread a system call and
make the woken thread compete for the GIL just as the next forward begins.  Instead the thread checks the queue every
LOOK_SECONDS and delivers everything in it.  When the queue is full the *oldest* record is dropped: every step record
has totals, so the newest one is worth the most.

The thread delivers through a `Carrier`.  If that fails (no daemon, full disk) it backs off exponentially up to
BACKOFF_SECONDS_MAX and retries the same record.  At the end of a job the thread waits for a daemon that is restarting,
but not for one that was never there.

A daemon rejects a record with any field out of range (`pacecar.records.ranges`), and a reader of a run folder skips its
line.  So one impossible figure, from a clock set back or FLOPs beyond 64 bits, would cost all others in the record.
Therefore the thread decodes each record once before it leaves, as its reader will do (`FieldFilter`).  An optional
field that is out of range is removed, text that is too long is cut, and a record that cannot be repaired this way is
not sent.  This is logged once per kind of record and field.  A valid record costs one encoding and one decoding in C.

A forked child (a DataLoader worker) has the queue but not the thread, and its locks may be held forever.  So every
public method returns at once in any process but the first.

`RecordSink` is the interface of every destination of records: it accepts a record without waiting.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import inspect

from pacecar.daemon_peer import UntrustedDaemonError
from pacecar.records import Answer, JobRecord
from pacecar.records.job_orders import JobAnswer

__all__ = [
    "BACKOFF_SECONDS_MAX",
    "LOOK_SECONDS",
    "QUEUE_LENGTH_MAX",
    "Carrier",
    "FieldFilter",
    "LateRecords",
    "RecordQueue",
    "RecordRefused",
    "RecordSink",
    "RecordSource",
    "Sendable",
    "put_into_all",
    "reason_of",
]

MENDS_MAX = 8
"""The most fields repaired in one record; a record with more is not worth sending."""

_FIELD = re.compile(r"\$\.(\w+)")
"""The record's own field in a path named by msgspec: `$.memory.allocated_bytes`."""

_CUT = "..."

_log = logging.getLogger(__name__)

Sendable = JobRecord | Answer | JobAnswer
"""What a queue carries."""

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Sendable)


class FieldFilter:
    """Makes records valid for their readers.  One thread at a time."""

    def __init__(self, destination: str) -> None:
        """`destination` names the readers in a log line."""
        self._destination = destination
        self._said: set[tuple[str, str]] = set()

    def make(self, record: Sendable) -> Sendable | None:
        """Return `record`, or a copy without what is out of range; None if it cannot be repaired."""
        for _ in range(MENDS_MAX):
            try:
                _decoder.decode(_encoder.encode(record))
            except (msgspec.ValidationError, OverflowError, UnicodeEncodeError, TypeError) as error:
                mended = self._mend(record, error)
                if mended is None:
                    return None
                record = mended
            else:
                return record
        return None

    def _mend(self, record: Sendable, error: Exception) -> Sendable | None:
        field = self._culprit(record, error)
        kind = type(record).__name__
        value: Any = None if field is None else getattr(record, field)
        if field is None:
            self._say(kind, "", "pacecar does not send a %s to %s: %s", kind, self._destination, error)
            return None
        if isinstance(value, str):
            replacement: Any = self._cut(record, field, value)
        elif _is_optional(type(record), field):
            replacement = None
        else:
            self._say(kind, field, "pacecar does not send a %s to %s: %s: %s", kind, self._destination, field, error)
            return None
        how = "leaves out" if replacement is None else "cuts"
        self._say(kind, field, "pacecar %s %s of a %s for %s: %s", how, field, kind, self._destination, error)
        return msgspec.structs.replace(record, **{field: replacement})

    @staticmethod
    def _culprit(record: Sendable, error: Exception) -> str | None:
        """Return the field that caused the error; None if the error does not name it."""
        if isinstance(error, msgspec.ValidationError):
            found = _FIELD.search(str(error))
            return None if found is None else found[1]
        for field in record.__struct_fields__:
            try:
                _encoder.encode(getattr(record, field))
            except (OverflowError, UnicodeEncodeError, TypeError):
                return field
        return None

    @staticmethod
    def _cut(record: Sendable, field: str, text: str) -> str:
        text = text.encode("utf-8", "replace").decode()
        limits = [one.max_length for one in _types(type(record), field) if isinstance(one, inspect.StrType)]
        limit = min((limit for limit in limits if limit is not None), default=len(text))
        return text if len(text) <= limit else text[: limit - len(_CUT)] + _CUT

    def _say(self, kind: str, field: str, message: str, *arguments: object) -> None:
        if (kind, field) not in self._said:
            self._said.add((kind, field))
            _log.warning(message, *arguments)


def _types(kind: type, field: str) -> tuple[inspect.Type, ...]:
    """Return the types that `field` of the record `kind` may have."""
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), "a record is a struct"
    (found,) = [one.type for one in info.fields if one.name == field]
    return found.types if isinstance(found, inspect.UnionType) else (found,)


def _is_optional(kind: type, field: str) -> bool:
    return any(isinstance(one, inspect.NoneType) for one in _types(kind, field))


QUEUE_LENGTH_MAX = 1024
"""Queue bound, about 1 MiB of records: minutes of a typical job, so that a daemon can restart without loss."""

LOOK_SECONDS = 0.5
"""Time between two checks of the queue: fast enough for a live view, and only two wake-ups a second at any pace."""

BACKOFF_SECONDS_MIN = 0.05
BACKOFF_SECONDS_MAX = 2.0
"""A restarted daemon gets records again after at most this time."""


class RecordRefused(ValueError):  # noqa: N818  about a single record, not a failure
    """The carrier will never accept this record; the queue drops it."""


class Carrier(Protocol):
    """Delivers records to a destination; all calls come from the queue's thread."""

    @property
    def destination(self) -> str:
        """The destination's name in log lines."""
        ...

    def deliver(self, record: Sendable, timeout_seconds: float) -> None:
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
        self._queue: deque[Sendable] = deque()
        self._queue_length_max = queue_length_max
        self._is_optional = is_optional
        self._dropped = 0
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._closing = threading.Event()
        self._due = threading.Event()
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

    def put(self, record: Sendable) -> None:
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
        if isinstance(record, Answer | JobAnswer):  # a person waits for it
            self._due.set()
        if self._thread is None:
            with self._starting:  # one of our threads may call put too
                self._start()

    def close(self, timeout_seconds: float) -> None:
        """Deliver queued records for at most `timeout_seconds`, then close; the rest is counted as dropped."""
        if os.getpid() != self._pid or self._closing.is_set():
            return
        self._deadline = time.monotonic() + timeout_seconds
        self._closing.set()
        self._due.set()
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
                self._due.wait(LOOK_SECONDS)
                self._due.clear()
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

    def _deliver(self, record: Sendable) -> bool:
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

    def _put_back(self, record: Sendable) -> None:
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


def put_into_all(sinks: Sequence[RecordSink]) -> Callable[[JobRecord], None]:
    """Return a function that puts a record into each of `sinks`."""

    def put(record: JobRecord) -> None:
        for sink in sinks:
            sink.put(record)

    return put
