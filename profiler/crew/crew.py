"""How does one rank take part in the crew?  A thread beside the training, fed by one append a step.

    training thread   note(step): an append to a bounded queue, a microsecond
    crew's thread     cuts ranges of steps, posts their rows, takes what came, judges it on rank 0, watches for hangs

Nothing waits for anything: a gather that is not complete is looked at again at the next tick.  All ranks cut their
ranges alike, `crew_period_steps` long, or longer where steps are so short that gathers would cost too much: every
rank computes the length from rows that all have seen, PENDING_MAX ranges ago.

Where there is no side road (one process, ranks that attach otherwise, a rank that does not come, a failure) the crew
says so in one line and is off; hangs are watched for all the same.

Left out: what is done about a straggler.  The records go to the caller's sinks, and to the log for a person.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from pacecar.clock import Clock, SystemClock
from pacecar.config import HookConfig
from pacecar.profiler.crew.collectives import last_collective, sequence
from pacecar.profiler.crew.diagnosis import Diagnosis
from pacecar.profiler.crew.report import Report
from pacecar.profiler.crew.road import GlooRoad, Road
from pacecar.profiler.crew.sockets import BusySockets
from pacecar.profiler.crew.watch import HangWatch, is_in_loader, where
from pacecar.profiler.crew.words import VERSION, RankRange, StepNote, decode, encode, gather_range
from pacecar.profiler.steptimer import TimedStep
from pacecar.records import JobHello, JobRecord, StepRecord

__all__ = ["Crew", "Watched"]

NOTES_MAX = 4096
"""Steps that wait for the thread.  It falls so far behind only if the other ranks do not answer, and then it is off."""

PENDING_MAX = 16
"""Ranges cut and not yet heard of from all ranks; ranks in lockstep are never more than two apart."""

RANGE_SECONDS_MIN = 0.05
"""A gather costs a rank 0.2 ms of processor and rank 0 another 0.3, aside from the training thread: 1 % at most."""

RANGE_STEPS_MAX = 64

TICK_STEPS = 1.5
TICK_SECONDS_MIN = 0.04
TICK_SECONDS_MAX = 0.25
"""The thread looks every 1.5 steps; with nothing to gather, four times a second."""

FAREWELL_SECONDS = 3.0
"""How much later than another rank this one may close without a word about it."""

JOIN_SECONDS = 1.0
"""Closing waits so long for the thread, which needs a tick and half a second at most; then it leaves it behind."""

_log = logging.getLogger(__name__)
_crews = itertools.count()
"""Crews of this process so far: ranks that attach equally often meet under the same name."""


class Watched(Protocol):
    """What the crew asks the hook, from its own thread."""

    @property
    def phase(self) -> str:
        """The phase that the training thread is in."""
        ...

    @property
    def evaluated_ns(self) -> int | None:
        """When a forward in evaluation was last seen, monotonic."""
        ...

    def look(self) -> None:
        """Tell of the steps that were finished, by `note`."""
        ...


class Crew:
    """One rank's part.  `emit` takes records; `throttled` says whether the device's clocks are held down.

    `road` None: as the process group offers.  Make and start it on the training thread.
    """

    def __init__(
        self,
        hello: JobHello,
        config: HookConfig,
        watched: Watched,
        *,
        emit: Callable[[JobRecord], None],
        clock: Clock | None = None,
        road: Road | None = None,
        throttled: Callable[[], bool | None] = lambda: None,
    ) -> None:
        self._hello = hello
        self._period = config.crew_period_steps
        self._watched = watched
        self._clock = clock or SystemClock()
        self._road = road
        self._throttled = throttled
        self._report = Report(hello, emit, self._clock)
        self._diagnosis = Diagnosis(hello.world_size, sockets_tell=hello.backend == "gloo")
        self._watch = HangWatch(round(config.hang_seconds * 1e9), self._clock.monotonic_ns())
        self._sockets = BusySockets(self._clock.monotonic_ns)
        self._notes: deque[tuple[StepNote, int]] = deque(maxlen=NOTES_MAX)
        self._cut: list[StepNote] = []
        self._range = 0
        self._next_step: int | None = None
        self._pending: deque[tuple[int, RankRange]] = deque()
        self._out: int | None = None
        self._walls: dict[int, int] = {}
        self._cpu_wait_ns: int | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._training = (0, 0)
        self.off_because: str | None = None
        """Why nothing is gathered; None while it is."""
        self.cpu_ns = 0
        """Processor time of the crew's thread so far."""

    # --- the training thread --------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; returns at once, the ranks meet behind the training's back."""
        self._training = (threading.get_ident(), threading.get_native_id())
        if self._road is None and self._hello.world_size > 1 and dist.is_available() and dist.is_initialized():
            self._road = GlooRoad(self._hello.rank, self._hello.world_size)
        self._name = f"crew/{next(_crews)}"
        self._thread = threading.Thread(target=self._run, name="pacecar-crew", daemon=True)
        self._thread.start()

    def note(self, step: TimedStep, record: StepRecord) -> None:
        """Take a finished step; on whatever thread, in order."""
        note = StepNote(record.step, step.wall_ns, step.phases, record.knobs.epoch, record.disturbed)
        self._notes.append((note, step.end_ns))

    def close(self) -> None:
        """End the thread; waits JOIN_SECONDS at most.  Harmless when repeated."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_SECONDS)
            self._thread = None

    # --- the crew's thread --------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._open()
            while not self._closing.wait(self._tick_seconds()):
                self._turn()
                self.cpu_ns = time.thread_time_ns()
            self._turn()
        except Exception:  # noqa: BLE001  a thread's own outer boundary: the job must not see a traceback it cannot act on
            _log.warning("pacecar no longer watches this rank after an error", exc_info=True)
        finally:
            if self._road is not None:
                self._road.close()

    def _open(self) -> None:
        if self._road is None:
            self.off_because = "there is one process, or no process group"
            _log.debug("pacecar does not compare ranks: %s", self.off_because)
            return
        try:
            self._road.open(f"crew {VERSION}, period {self._period}", self._name, self._rest)
        except Exception as error:  # noqa: BLE001  whatever store and gloo raise: the job goes on without a crew
            if not self._closing.is_set():
                self._off(str(error))

    def _rest(self, seconds: float) -> None:
        if self._closing.wait(seconds):
            raise RuntimeError("closed before the ranks met")
        self._look()

    def _off(self, reason: str) -> None:
        road, self._road = self._road, None
        self.off_because = reason
        _log.warning("pacecar does not compare the ranks of this job: %s", reason)
        if road is not None:
            road.close()

    def _tick_seconds(self) -> float:
        median = self._watch.median_ns
        if self._road is None or median is None:
            return TICK_SECONDS_MAX if self._road is None else TICK_SECONDS_MIN
        return min(TICK_SECONDS_MAX, max(TICK_SECONDS_MIN, TICK_STEPS * median / 1e9))

    def _turn(self) -> None:
        try:
            self._watched.look()
            self._exchange()
        except Exception as error:  # noqa: BLE001  as in _open
            # At a job's end another rank closes first now and then, and that looks like a failure for a moment.
            if not self._closing.wait(FAREWELL_SECONDS):
                self._off(f"{type(error).__name__}: {str(error)[:200]}")
        self._look()

    def _exchange(self) -> None:
        """Take and post until nothing more can be done now."""
        self._take()
        while self._notes and (self._road is None or len(self._pending) + (self._out is not None) < PENDING_MAX):
            if self._road is not None and len(self._notes) == NOTES_MAX:
                raise RuntimeError(f"{NOTES_MAX} steps went by and some rank did not answer")
            note, ended_ns = self._notes.popleft()
            self._watch.stepped(note.step, note.wall_ns, ended_ns)
            if self._road is not None:
                self._add(note)
        self._post()

    def _add(self, note: StepNote) -> None:
        if self._next_step is not None and note.step != self._next_step:
            raise RuntimeError(f"step {note.step} came where {self._next_step} was due")
        self._next_step = note.step + 1
        self._cut.append(note)
        if len(self._cut) < self._length(self._range):
            return
        row = gather_range(
            self._cut,
            on_device=self._hello.device.startswith("cuda"),
            busy_ratio=self._sockets.ratio(),
            cpu_wait_ns=self._cpu_wait(),
            sequence=sequence(),
            is_throttled=self._throttled(),
        )
        self._pending.append((self._range, row))
        self._range += 1
        self._cut = []

    def _length(self, number: int) -> int:
        """Return how many steps range `number` has: the same on all ranks, by what all heard PENDING_MAX ranges ago."""
        wall = self._walls.get(number - PENDING_MAX - 1)
        if wall is None:
            return self._period
        return max(self._period, min(RANGE_STEPS_MAX, -(-round(RANGE_SECONDS_MIN * 1e9) // max(1, wall))))

    def _post(self) -> None:
        if self._road is not None and self._pending and self._out is None:
            number, row = self._pending.popleft()
            self._road.post(encode(number, row))
            self._out = number

    def _take(self) -> None:
        words = self._road.take() if self._road is not None and self._out is not None else None
        if words is None or self._out is None:
            return
        number, self._out = self._out, None
        rows = [decode(number, mine) for mine in words]
        self._walls[number] = sorted(row.sums["wall"] // row.steps for row in rows)[len(rows) // 2]
        self._walls.pop(number - PENDING_MAX - 2, None)
        if self._hello.rank == 0 and len(rows) > 1:
            self._report.ledger(rows)
            for finding in self._diagnosis.hear(rows):
                self._report.straggler(finding)

    def _cpu_wait(self) -> int | None:
        """Return for how long the training thread waited for a processor since the last call (proc(5), schedstat)."""
        try:
            with open(f"/proc/self/task/{self._training[1]}/schedstat", "rb") as stream:
                total = int(stream.read(128).split()[1])
        except (OSError, IndexError, ValueError):
            return None
        before, self._cpu_wait_ns = self._cpu_wait_ns, total
        return None if before is None else total - before

    # --- hangs --------------------------------------------------------------------------------------

    def _look(self) -> None:
        now = self._clock.monotonic_ns()
        suspicion = self._watch.check(now, self._watched.phase, self._watched.evaluated_ns)
        if suspicion is None:
            return
        # Only now: to read another thread's stack is a thing to be done once a hang, not at every tick.
        if suspicion.phase == "outside" and is_in_loader(self._training[0]):
            suspicion = replace(suspicion, phase="data_wait")
        if suspicion.has_ended:
            self._report.hang(suspicion)
        else:
            self._report.hang(
                suspicion, collective=last_collective(), sequence=sequence(), stack=where(self._training[0])
            )
