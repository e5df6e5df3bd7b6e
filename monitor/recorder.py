"""What happened before it went wrong?  The last minutes at full rate in memory, and in a file when something happens.

Prometheus has a sample every 15 s and keeps it for weeks; of the ten seconds before an Xid that is none or one.  To
keep everything on disk costs the job its disk.  So everything is kept in memory for minutes and written when it is
wanted.

    tick, glances, inbox --overhear--> queue --> recorder's thread: tape, triggers --capture--> writer's thread: shelf

Whoever is overheard appends to a queue and goes on: no encoding, no file, no waiting.  What does not fit into the
queue is dropped and counted.  The recorder's thread puts it on the tape; the writer is a thread of its own, because a
disk may hang for minutes and what happens meanwhile must be kept too.

A file is written AFTER_SECONDS after its trigger, so that it has what followed; what else happens until then is in
the same file.  Between two files of triggers lie INTERVAL_SECONDS: a storm of Xids is one file, and the
next.  Somebody who asks gets one at once.  What cannot be written is tried again, from the same chunks, and given up
after ten minutes.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.jobkey import JobKey
from pacecar.monitor.scrivener import Capture, Scrivener
from pacecar.monitor.shelf import Shelf
from pacecar.monitor.tape import Tape
from pacecar.monitor.threads import WatchedThread
from pacecar.monitor.triggers import Pace, Triggers
from pacecar.recording import Event, Header, Trigger, TriggerKind
from pacecar.records import Goodbye, HangSuspicion, JobHello, JobRecord, Sample, Snapshot

__all__ = [
    "AFTER_SECONDS",
    "INTERVAL_SECONDS",
    "QUEUE_BYTES_MAX",
    "QUEUE_MAX",
    "Around",
    "Figures",
    "Limits",
    "Recorder",
]

AFTER_SECONDS = 10
INTERVAL_SECONDS = 60

QUEUE_MAX = 8192
QUEUE_BYTES_MAX = 16 << 20
"""What may wait for the recorder's thread: with both, some seconds of the heaviest flood that the inbox takes in."""

SAMPLE_BYTES = 64
"""What a sample in the queue counts: most of it is shared with the board."""

TRIGGERS_MAX = 64
"""Triggers named in one file; the others are counted."""

ASKERS_MAX = 16
IDLE_SECONDS = 1.0
CLOSE_SECONDS = 5.0
TEXT_CHARACTERS_MAX = 1024

_log = logging.getLogger(__name__)

Answerer = Callable[[bool, str], None]
"""Told once whether the file was written, and where or why not."""


class Limits(NamedTuple):
    """How much is kept."""

    window_ns: int
    memory_bytes: int
    folder: str
    folder_bytes: int
    stall_ns: int


class Around(NamedTuple):
    """What the daemon knows and no entry says: asked when a file is made, by the recorder's thread."""

    hellos: tuple[JobHello, ...]
    identity: tuple[Sample, ...]


class Figures(NamedTuple):
    """What the recorder serves about itself."""

    memory_bytes: int
    span_ns: int
    entries: int
    dropped: dict[str, int]
    triggers: dict[str, int]
    files: int
    failures: int
    lost: int
    files_bytes: int | None


class _Record(NamedTuple):
    payload: bytes
    job: JobKey
    hang: HangSuspicion | None
    is_over: bool


class _Ask(NamedTuple):
    uid: int
    note: str
    answer: Answerer


_Entry = Snapshot | Sequence[Sample] | _Record | Event | _Ask

_KINDS: tuple[TriggerKind, ...] = ("xid", "gpu_lost", "hang", "stall", "request")


class Recorder:
    """The flight recorder.  Everything called `overhear...`, `note` and `ask` may be called from any thread."""

    def __init__(
        self,
        clock: Clock,
        limits: Limits,
        *,
        host: str,
        version: str,
        around: Callable[[], Around] = lambda: Around((), ()),
        paces: Callable[[], Sequence[Pace]] = tuple,
    ) -> None:
        self._clock = clock
        self._limits = limits
        self._host, self._version = host, version
        self._around, self._paces = around, paces
        offset = clock.wall_ns() - clock.monotonic_ns()
        self._tape = Tape(window_ns=limits.window_ns, bytes_max=limits.memory_bytes, wall_offset_ns=offset)
        self._triggers = Triggers(stall_ns=limits.stall_ns)
        self.scrivener = Scrivener(clock, Shelf(limits.folder, bytes_max=limits.folder_bytes))
        self._lock = threading.Lock()
        self._queue: list[tuple[int, _Entry]] = []
        self._queued_bytes = 0
        self._dropped_queue = 0
        self._counts: Counter[str] = Counter()
        self._pending: list[Trigger] = []
        self._pending_since_ns: int | None = None
        self._left_out = 0
        self._captured_ns: int | None = None
        self._askers: list[Answerer] = []
        self._wake = threading.Event()
        self._closing = False
        self._tap = _LogTap(self.note)
        self.thread: WatchedThread | None = None
        """The thread that keeps the tape; None before `start` and after `close`."""

    def start(self) -> None:
        """Start the threads, and hear what pacecar logs as a warning or worse."""
        self.scrivener.start()
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
        self.scrivener.close(CLOSE_SECONDS)

    # --- any thread -----------------------------------------------------------------------------

    def overhear_tick(self, snapshot: Snapshot) -> None:
        """Take a tick, and have the thread look at what came since the last."""
        samples = sum(len(getattr(outcome, "samples", ())) for outcome in snapshot.outcomes.values())
        self._put(snapshot, SAMPLE_BYTES * samples)
        self._wake.set()

    def overhear_glance(self, samples: Sequence[Sample]) -> None:
        """Take what a collector read between two ticks."""
        self._put(samples, SAMPLE_BYTES * len(samples))

    def overhear_record(self, record: JobRecord, payload: bytes, hello: JobHello) -> None:
        """Take a record that the board took, its encoding, and whose it is."""
        hang = record if isinstance(record, HangSuspicion) else None
        self._put(_Record(payload, JobKey.of(hello), hang, isinstance(record, Goodbye)), len(payload))

    def note(self, kind: str, text: str) -> None:
        """Take something worth remembering, in words."""
        text = text[:TEXT_CHARACTERS_MAX]
        self._put(Event(self._clock.monotonic_ns(), kind, text), len(text))

    def ask(self, uid: int, note: str, answer: Answerer) -> None:
        """Write a file now and tell `answer`; the caller has checked that `uid` may."""
        if self._put(_Ask(uid, note, answer), len(note)):
            self._wake.set()
        else:
            answer(False, "the recorder is too busy; try again")

    def _put(self, entry: _Entry, size: int) -> bool:
        at_ns = self._clock.monotonic_ns()
        with self._lock:  # held for an append, here and by the thread that takes all of it away
            fits = len(self._queue) < QUEUE_MAX and self._queued_bytes + size <= QUEUE_BYTES_MAX
            if fits:
                self._queue.append((at_ns, entry))
                self._queued_bytes += size
            else:
                self._dropped_queue += 1
            is_filling = 2 * len(self._queue) > QUEUE_MAX or 2 * self._queued_bytes > QUEUE_BYTES_MAX
        if is_filling:
            self._wake.set()
        return fits

    def figures(self) -> Figures:
        """Return the recorder's own numbers."""
        tape, scrivener = self._tape, self.scrivener
        return Figures(
            memory_bytes=tape.memory_bytes,
            span_ns=tape.span_ns(self._clock.monotonic_ns()),
            entries=tape.entries,
            dropped=self._dropped(),
            triggers={kind: self._counts[kind] for kind in _KINDS},
            files=scrivener.files,
            failures=scrivener.failures,
            lost=scrivener.lost,
            files_bytes=scrivener.files_bytes,
        )

    def _dropped(self) -> dict[str, int]:
        return {"queue": self._dropped_queue, "memory": self._tape.dropped}

    # --- the recorder's thread ------------------------------------------------------------------

    def _run(self) -> None:
        is_over = False
        while not is_over:
            self._wake.wait(IDLE_SECONDS)
            self._wake.clear()
            is_over = self._closing
            try:
                self.step()
                if is_over and self._pending:
                    self._capture()
            except Exception:  # noqa: BLE001  the outer boundary: a bug costs a moment of the recording only
                _log.exception("the recorder lost a moment to a bug")

    def step(self) -> None:
        """Put on the tape what is in the queue, and begin a file if it is time."""
        with self._lock:
            batch, self._queue = self._queue, []
            self._queued_bytes = 0
        for at_ns, entry in batch:
            self._take(at_ns, entry)
        self._trigger(self._triggers.paces(self._paces(), self._clock.wall_ns()))
        if self._is_due():
            self._capture()

    def _take(self, at_ns: int, entry: _Entry) -> None:
        match entry:
            case Snapshot():
                self._tape.tick(entry, at_ns)
                self._trigger(self._triggers.tick(entry))
            case _Record():
                self._tape.record(entry.payload, at_ns)
                if entry.hang is not None:
                    self._trigger(self._triggers.hang(str(entry.job), entry.hang, self._clock.wall_ns()))
                if entry.is_over:
                    self._triggers.over(str(entry.job))
            case Event():
                self._tape.event(entry)
            case _Ask():
                self._ask(entry)
            case _:
                self._tape.glance(entry, at_ns)

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
            self._tape.event(Event(now, f"trigger {trigger.kind}", trigger.detail[:TEXT_CHARACTERS_MAX]))
            if len(self._pending) >= TRIGGERS_MAX:
                self._left_out += 1
                continue
            if not self._pending:  # the first of a file; a storm of them is not a storm of lines
                self._pending_since_ns = now
                if trigger.kind != "request":
                    _log.warning("will write a recording: %s", trigger.detail)
            self._pending.append(trigger)

    def _is_due(self) -> bool:
        if self._pending_since_ns is None or self.scrivener.is_busy:
            return False
        if self._askers:
            return True
        now = self._clock.monotonic_ns()
        has_rested = self._captured_ns is None or now - self._captured_ns >= INTERVAL_SECONDS * NS_PER_SECOND
        return has_rested and now - self._pending_since_ns >= AFTER_SECONDS * NS_PER_SECOND

    def _capture(self) -> None:
        """Hand over what there is, with all that is pending, to be written."""
        around = self._around()
        now = self._clock.monotonic_ns()
        header = Header(
            host=self._host,
            pacecar_version=self._version,
            written_wall_ns=self._clock.wall_ns(),
            window_ns=self._limits.window_ns,
            triggers=tuple(self._pending),
            triggers_left_out=self._left_out,
            hellos=around.hellos,
            identity=around.identity,
            dropped=self._dropped(),
        )
        self.scrivener.write(Capture(header, self._tape.seal(now), tuple(self._askers)))
        if any(trigger.kind != "request" for trigger in self._pending):
            self._captured_ns = now
        self._pending, self._askers = [], []
        self._pending_since_ns, self._left_out = None, 0


class _LogTap(logging.Handler):
    """Hears the daemon's own warnings."""

    def __init__(self, note: Callable[[str, str], None]) -> None:
        super().__init__(logging.WARNING)
        self._note = note

    def emit(self, record: logging.LogRecord) -> None:
        """Note a warning; one that cannot be written out is worth less than the caller's peace."""
        try:
            self._note(f"log {record.levelname.lower()}", f"{record.name}: {record.getMessage()}")
        except (TypeError, ValueError, KeyError):
            self.handleError(record)
