"""Keeps the last minutes at full rate in memory, and writes them to a file when something happens: the flight recorder.

Prometheus has a sample every 15 s and keeps it for weeks; of the ten seconds before an Xid that is none or one.  To
keep everything on disk costs the job its disk.  So everything is kept in memory for minutes and written when it is
wanted.

    tick, glances, socket server --> queue --> recorder's thread: ring buffers, triggers --> writer's thread: folder

Whoever calls `overhear_...` appends to a queue and goes on: no encoding, no file, no waiting.  What does not fit into
the queue is dropped and counted.  The recorder's thread puts it into the ring buffers; the writer is a thread of its
own, because a disk may hang for minutes and what happens meanwhile must be kept too.

Queue (`fair_queue`), memory (`user_buffers`), what is due (`pending_triggers`) and files (`writer`) have a share for
the host and one for each user, so that no job's records flush the host's ticks and no made-up hang a real Xid's file.
What cannot be written is tried again, from the same chunks, and given up after ten minutes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from pacecar.clock import Clock
from pacecar.records import Goodbye, HangSuspicion, JobHello, JobRecord, Sample, Snapshot
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
"""Most that may wait for the recorder's thread: with both, some seconds of the heaviest flood that the socket server
takes in."""

RECORD_BYTES = 200
"""What a record in the queue counts beside its payload: the objects that hold it."""

SAMPLE_BYTES = 64
"""What a sample in the queue counts: most of it is shared with the daemon's state."""

LINES_PER_MINUTE = 6
"""Recordings announced in the log for each owner."""

ASKERS_MAX = 16

TICKS_TOGETHER = 5
IDLE_SECONDS = 5.0
"""The recorder's thread works when so many ticks wait, or after so long: what it makes of five ticks in one go costs
half of what it costs in five.  A trigger is found that much later, and its file is written later still."""

CLOSE_SECONDS = 5.0
TEXT_CHARACTERS_MAX = 1024

_log = logging.getLogger(__name__)

Answerer = Callable[[bool, str], None]
"""Told once whether the file was written, and where or why not."""


class RecorderLimits(NamedTuple):
    """How much is kept."""

    window_ns: int
    memory_bytes: int
    folder: str
    folder_bytes: int
    stall_ns: int


class Around(NamedTuple):
    """What the daemon knows and no entry has: asked when a file is made, by the recorder's thread."""

    hellos: tuple[JobHello, ...]
    identity: tuple[Sample, ...]


class _Record(NamedTuple):
    payload: bytes
    job: JobKey
    hang: HangSuspicion | None
    is_over: bool
    uid: int | None


class _Ask(NamedTuple):
    uid: int
    note: str
    answer: Answerer


_Entry = Snapshot | Sequence[Sample] | _Record | RecordingEvent | _Ask

_KINDS: tuple[TriggerKind, ...] = ("xid", "gpu_lost", "hang", "stall", "request")


class FlightRecorder:
    """The flight recorder.  Everything called `overhear...`, `note` and `ask` may be called from any thread."""

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
        """Start the threads, and begin to record what pacecar logs as a warning or worse."""
        self.writer.start()
        self.thread = WatchedThread("recorder", self._run, self._clock)
        self.thread.start()
        logging.getLogger("pacecar").addHandler(self._tap)

    def close(self) -> None:
        """Write what a trigger still wants, once; a disk that hangs is left behind."""
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
        """Take a tick, and wake the recorder's thread when TICKS_TOGETHER wait."""
        samples = sum(len(getattr(outcome, "samples", ())) for outcome in snapshot.outcomes.values())
        self._put(snapshot, SAMPLE_BYTES * samples)
        self._ticks += 1
        if self._ticks % TICKS_TOGETHER == 0:
            self._wake.set()

    def overhear_glance(self, samples: Sequence[Sample]) -> None:
        """Take what a collector read between two ticks."""
        self._put(samples, SAMPLE_BYTES * len(samples))

    def record_rank(self, record: JobRecord, payload: bytes, hello: JobHello, uid: int | None = None) -> None:
        """Take a record that the daemon accepted, its encoding, whose it is, and of which user."""
        hang = record if isinstance(record, HangSuspicion) else None
        entry = _Record(payload, JobKey.of(hello), hang, isinstance(record, Goodbye), uid)
        self._put(entry, RECORD_BYTES + len(payload), uid)

    def note(self, kind: str, text: str) -> None:
        """Take an event in words."""
        text = text[:TEXT_CHARACTERS_MAX]
        self._put(RecordingEvent(self._clock.monotonic_ns(), kind, text), len(text))

    def ask(self, uid: int, note: str, answer: Answerer) -> None:
        """Write a file now and tell `answer`; the caller has checked that `uid` may."""
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
        """Yield what is kept in memory, what was dropped, what triggered, and what became of the files."""
        buffers, writer = self._buffers, self.writer
        yield sample("pacecar_recorder_memory_bytes", buffers.memory_bytes)
        yield sample("pacecar_recorder_span_seconds", buffers.span_ns(self._clock.monotonic_ns()))
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
                _log.exception("the recorder lost a moment to a bug")

    def step(self) -> None:
        """Put into the ring buffers what is in the queue, and begin a file if it is time."""
        for at_ns, _, entry, _ in self._queue.drain():
            self._take(at_ns, entry)
        self._trigger(self._triggers.paces(self._paces(), self._clock.wall_ns()))
        now = self._clock.monotonic_ns()
        self._buffers.expire(now)
        due = None if self.writer.is_busy else self._pending.due(now)
        if due is not None:
            self._capture(due)

    def _take(self, at_ns: int, entry: _Entry) -> None:
        match entry:
            case Snapshot():
                self._buffers.tick(entry, at_ns)
                self._trigger(self._triggers.tick(entry))
            case _Record():
                self._buffers.record(entry.uid, entry.payload, at_ns)
                if entry.hang is not None:
                    self._trigger(self._triggers.hang(str(entry.job), entry.hang, self._clock.wall_ns(), entry.uid))
                if entry.is_over:
                    self._triggers.over(str(entry.job))
            case RecordingEvent():
                self._buffers.event(entry)
            case _Ask():
                self._ask(entry)
            case _:
                self._buffers.glance(entry, at_ns)

    def _ask(self, ask: _Ask) -> None:
        if len(self._askers) >= ASKERS_MAX:
            ask.answer(False, f"{ASKERS_MAX} others wait for a recording; try again")
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
            if trigger.kind in ("hang", "stall"):
                self._buffers.event_of(trigger.uid, event)
            else:
                self._buffers.event(event)
            # Once for each file: a storm of triggers is not a storm of lines.
            if self._pending.add(trigger, now) and trigger.kind != "request":
                said = "will write a recording: %s"
                self._notices.warn("trigger", said, trigger.detail, of=owner_of(trigger))

    def _capture(self, due: Due) -> None:
        """Hand over what the ring buffers hold, with the triggers of `due`, to be written."""
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
    """Records the daemon's own warnings."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning; one that cannot be formatted must not raise where it was logged."""
        try:
            self._note(f"log {record.levelname.lower()}", f"{record.name}: {record.getMessage()}")
        except (TypeError, ValueError, KeyError):
            self.handleError(record)
