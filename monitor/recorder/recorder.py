"""Keeps the last minutes at full rate in memory, and writes them to a file when something happens.

Prometheus has a sample every 15 s: at most one of the ten seconds before an Xid.  Writing everything to disk would slow
the job's disk.  So everything stays in memory for minutes and is written on demand.

    tick, glances, socket server --> queue --> recorder's thread: ring buffers, triggers --> writer's thread: folder

Callers only append to a queue: no encoding, no file, no waiting.  What does not fit is dropped and counted.  The
recorder's thread moves entries to the ring buffers.  The writer has its own thread, because a disk may hang for minutes
and recording must go on.

Queue (`fair_queue`), memory (`user_buffers`), pending recordings (`pending_triggers`) and files (`writer`) have a share
for the host and each user, so no job's records displace the host's ticks, and no faked hang displaces an Xid's file.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.records import Goodbye, HangSuspicion, HangVerdict, JobHello, JobRecord, Sample, Snapshot
from pacecar.records.job_identity import JobKey
from pacecar.records.recording import RecordingEvent, RecordingHeader, Trigger, TriggerKind

from ..catalog_sample import sample
from ..ingest.log_limiter import LogLimiter
from ..watched_threads import WatchedThread
from .fair_queue import HOST, FairQueue
from .pending_triggers import AFTER_SECONDS, INTERVAL_SECONDS, Due, PendingTriggers, owner_of
from .triggers import TriggerPace, Triggers
from .user_buffers import UserBuffers
from .writer import Capture, RecordingFolder, RecordingWriter

__all__ = [
    "AFTER_SECONDS",
    "INTERVAL_SECONDS",
    "QUEUE_BYTES_MAX",
    "QUEUE_MAX",
    "TICKS_TOGETHER",
    "Around",
    "FlightRecorder",
    "RecorderLimits",
]

QUEUE_MAX = 8192
QUEUE_BYTES_MAX = 16 << 20
"""Bounds of the queue: some seconds of the heaviest flood that the socket server accepts."""

RECORD_BYTES = 200
"""Bytes counted for a queued record besides its payload: the objects that hold it."""

SAMPLE_BYTES = 64
"""Bytes counted for a queued sample, most of which it shares with the daemon's state."""

LINES_PER_MINUTE = 6
"""Recordings announced in the log, for each owner."""

ASKERS_MAX = 16

TICKS_TOGETHER = 5
IDLE_SECONDS = 5.0
"""The recorder's thread runs when this many ticks wait, or after this time: five ticks at once cost half as much as one
at a time.  Triggers are found that much later, still before their files are written."""

CLOSE_SECONDS = 5.0
TEXT_CHARACTERS_MAX = 1024

_log = logging.getLogger(__name__)

Answerer = Callable[[bool, str], None]
"""Called once, with whether the file was written, and its path or the reason."""


class RecorderLimits(NamedTuple):
    """How much is kept, and where."""

    window_ns: int
    memory_bytes: int
    folder: str
    folder_bytes: int
    stall_ns: int


class Around(NamedTuple):
    """What a recording needs besides entries; the recorder's thread asks for it when it makes a file."""

    hellos: tuple[JobHello, ...]
    identity: tuple[Sample, ...]


class _Record(NamedTuple):
    payload: bytes
    job: JobKey
    hang: HangSuspicion | HangVerdict | None
    is_over: bool
    uid: int | None


class _Ask(NamedTuple):
    uid: int
    note: str
    answer: Answerer


_Entry = Snapshot | Sequence[Sample] | _Record | RecordingEvent | _Ask

_KINDS: tuple[TriggerKind, ...] = ("xid", "gpu_lost", "hang", "stall", "request")


class FlightRecorder:
    """The flight recorder.  `overhear...`, `record_rank`, `note` and `ask` may be called from any thread."""

    def __init__(
        self,
        clock: Clock,
        limits: RecorderLimits,
        *,
        host: str,
        version: str,
        around: Callable[[], Around] = lambda: Around((), ()),
        paces: Callable[[], Sequence[TriggerPace]] = tuple,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._host, self._version = host, version
        self._around, self._paces = around, paces
        offset = clock.wall_ns() - clock.monotonic_ns()
        self._buffers = UserBuffers(window_ns=limits.window_ns, bytes_max=limits.memory_bytes, wall_offset_ns=offset)
        self._triggers = Triggers(stall_ns=limits.stall_ns)
        self.writer = RecordingWriter(clock, RecordingFolder(limits.folder, bytes_max=limits.folder_bytes))
        self._queue: FairQueue[_Entry] = FairQueue(QUEUE_MAX, QUEUE_BYTES_MAX)
        self._counts: Counter[str] = Counter()
        self._pending = PendingTriggers()
        self._notices = LogLimiter(_log, LINES_PER_MINUTE, clock)
        self._askers: list[Answerer] = []
        self._wake = threading.Event()
        self._ticks = 0
        self._closing = False
        self._tap = _LogTap(self.note)
        self.thread: WatchedThread | None = None
        """The thread that fills the ring buffers; None before `start` and after `close`."""

    def start(self) -> None:
        """Start the threads, and begin to record pacecar's own warnings and errors."""
        self.writer.start()
        self.thread = WatchedThread("recorder", self._run, self._clock)
        self.thread.start()
        logging.getLogger("pacecar").addHandler(self._tap)

    def close(self) -> None:
        """Write the most important pending recording, once, without waiting for a disk that hangs."""
        if self.thread is None:
            return
        logging.getLogger("pacecar").removeHandler(self._tap)
        self._closing = True
        self._wake.set()
        self.thread.join(CLOSE_SECONDS)
        self.thread = None
        self.writer.close(CLOSE_SECONDS)

    # --- any thread -----------------------------------------------------------------------------

    def overhear_tick(self, snapshot: Snapshot) -> None:
        """Queue a tick, and wake the recorder's thread when TICKS_TOGETHER wait."""
        samples = sum(len(getattr(outcome, "samples", ())) for outcome in snapshot.outcomes.values())
        self._put(snapshot, SAMPLE_BYTES * samples)
        self._ticks += 1
        if self._ticks % TICKS_TOGETHER == 0:
            self._wake.set()

    def overhear_glance(self, samples: Sequence[Sample]) -> None:
        """Queue what a collector read between two ticks."""
        self._put(samples, SAMPLE_BYTES * len(samples))

    def record_rank(self, record: JobRecord, payload: bytes, hello: JobHello, uid: int | None = None) -> None:
        """Queue an accepted record: its encoding, the hello of its rank, and the user."""
        hang = record if isinstance(record, HangSuspicion | HangVerdict) else None
        entry = _Record(payload, JobKey.of(hello), hang, isinstance(record, Goodbye), uid)
        self._put(entry, RECORD_BYTES + len(payload), uid)

    def note(self, kind: str, text: str) -> None:
        """Queue an event described in words."""
        text = text[:TEXT_CHARACTERS_MAX]
        self._put(RecordingEvent(self._clock.monotonic_ns(), kind, text), len(text))

    def ask(self, uid: int, note: str, answer: Answerer) -> None:
        """Write a file now and call `answer`; the caller has checked that `uid` is authorized."""
        if self._put(_Ask(uid, note, answer), len(note)):
            self._wake.set()
        else:
            answer(False, "the recorder is too busy; try again")

    def _put(self, entry: _Entry, size: int, owner: int | str | None = HOST) -> bool:
        fits = self._queue.put(entry, self._clock.monotonic_ns(), owner, size)
        if self._queue.is_filling:
            self._wake.set()
        return fits

    def own_samples(self) -> Iterator[Sample]:
        """Yield what is kept in memory, and how many entries were dropped, triggers found and files written."""
        buffers, writer = self._buffers, self.writer
        yield sample("pacecar_recorder_memory_bytes", buffers.memory_bytes)
        yield sample("pacecar_recorder_span_seconds", buffers.host.span_ns(self._clock.monotonic_ns()))
        yield sample("pacecar_recorder_entries_total", buffers.entries)
        for reason, count in self._dropped().items():
            yield sample("pacecar_recorder_dropped_total", count, reason)
        for kind in _KINDS:
            yield sample("pacecar_recorder_triggers_total", self._counts[kind], kind)
        yield sample("pacecar_recorder_files_total", writer.files)
        yield sample("pacecar_recorder_write_failures_total", writer.failures)
        yield sample("pacecar_recorder_lost_total", writer.lost)
        files_bytes = writer.files_bytes
        if files_bytes is not None:
            yield sample("pacecar_recorder_files_bytes", files_bytes)

    def _dropped(self) -> dict[str, int]:
        return {"queue": self._queue.dropped, "memory": self._buffers.dropped}

    # --- the recorder's thread ------------------------------------------------------------------

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
            is_over = self._closing
            try:
                self.step()
                due = self._pending.last(self._clock.monotonic_ns()) if is_over else None
                if due is not None:
                    self._capture(due)
            except Exception:  # noqa: BLE001  the outer boundary: a bug costs a moment of the recording only
                _log.exception("a bug cost the recorder a moment")

    def step(self) -> None:
        """Move the queue to the ring buffers, and begin a file if one is due."""
        for at_ns, _, entry, _ in self._queue.drain():
            self._record(at_ns, entry)
            self._buffers.fit()
        self._trigger(self._triggers.paces(self._paces(), self._clock.wall_ns()))
        now = self._clock.monotonic_ns()
        self._buffers.expire(now)
        due = None if self.writer.is_busy else self._pending.due(now)
        if due is not None:
            self._capture(due)

    def _record(self, at_ns: int, entry: _Entry) -> None:
        match entry:
            case Snapshot():
                self._buffers.host.tick(entry, at_ns)
                self._trigger(self._triggers.tick(entry))
            case _Record():
                self._buffers.of_user(entry.uid).record(entry.payload, at_ns)
                if entry.hang is not None:
                    self._trigger(self._triggers.hang(str(entry.job), entry.hang, self._clock.wall_ns(), entry.uid))
                if entry.is_over:
                    self._triggers.over(str(entry.job))
            case RecordingEvent():
                self._buffers.host.event(entry)
            case _Ask():
                self._handle_ask(entry)
            case _:
                self._buffers.host.glance(entry, at_ns)

    def _handle_ask(self, ask: _Ask) -> None:
        if len(self._askers) >= ASKERS_MAX:
            ask.answer(False, f"{ASKERS_MAX} requests for a recording are pending; try again")
            return
        self._askers.append(ask.answer)
        detail = f"uid {ask.uid} asked" + (f": {ask.note}" if ask.note else "")
        wall_ns = self._clock.wall_ns()
        self._trigger([Trigger(kind="request", subject=f"uid {ask.uid}", detail=detail, wall_ns=wall_ns)])

    def _trigger(self, triggers: Sequence[Trigger]) -> None:
        for trigger in triggers:
            now = self._clock.monotonic_ns()
            self._counts[trigger.kind] += 1
            event = RecordingEvent(now, f"trigger {trigger.kind}", trigger.detail[:TEXT_CHARACTERS_MAX])
            is_of_user = trigger.kind in ("hang", "stall")
            (self._buffers.of_user(trigger.uid) if is_of_user else self._buffers.host).event(event)
            # Once for each file: a storm of triggers must not become a storm of lines.
            if self._pending.add(trigger, now) and trigger.kind != "request":
                self._notices.warn("trigger", "will write a recording: %s", trigger.detail, of=owner_of(trigger))
        self._buffers.fit()

    def _capture(self, due: Due) -> None:
        """Pass the contents of the ring buffers and the triggers of `due` to the writer."""
        around = self._around()
        now = self._clock.monotonic_ns()
        header = RecordingHeader(
            host=self._host,
            pacecar_version=self._version,
            written_wall_ns=self._clock.wall_ns(),
            window_ns=self._limits.window_ns,
            triggers=due.triggers,
            triggers_left_out=due.left_out,
            hellos=around.hellos,
            identity=around.identity,
            dropped=self._dropped(),
        )
        askers: list[Answerer] = []
        if due.label == "request":
            askers, self._askers = self._askers, askers
        self.writer.write(Capture(header, self._buffers.seal(now), tuple(askers), due.label))


class _LogTap(logging.Handler):
    """Adds the daemon's own warnings to the recording."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning; if it cannot be formatted, the code that logged it must not fail."""
        try:
            self._note(f"log {record.levelname.lower()}", f"{record.name}: {record.getMessage()}")
        except (TypeError, ValueError, KeyError):
            self.handleError(record)
