"""Runs calls that may hang on as few threads as possible: on one while they return, on more as soon as one takes long.

A thread for each GPU and each collector is simple, and is what a hang needs: it holds up its own thread only.  But
hangs are rare, and a thread for each costs two wake-ups and a change of the interpreter's lock for each at every tick,
which is as much as the reading.  So jobs wait in one queue, and one thread takes one after the other.  Who waits for
them calls `hasten` now and then, as long as any has not begun: if none was begun since the last time, the threads at
work are taken for stuck, and one more begins on what waits.  A job that is known to take long begins on a thread of its
own at once (`at_once`).

So any number of jobs may hang, and each delays those behind it by a call of `hasten`, the first by two.  A thread that
is not needed for IDLE_SECONDS ends; there are never more than jobs that are not done.

What is to be done between jobs, at times of its own, is done by the thread that waits for them (`between`): its timer
is the wake-up.  If that hangs, it is like a job that does.

Left out: results, and how long to wait; that is between a job and who gave it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import NamedTuple

__all__ = ["LONG_SECONDS", "STAGGER_SECONDS", "Between", "WorkerPool"]

STAGGER_SECONDS = 0.02
"""Time between two calls of `hasten` by who waits: all readings of a tick together take less."""

LONG_SECONDS = 0.05
"""A job that took so long the last time is begun at once the next time, beside the others."""

IDLE_SECONDS = 30.0

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class Between(NamedTuple):
    """What is done between jobs, by the thread that waits for them; while that hangs, by another one."""

    pause_seconds: Callable[[], float | None]
    """After how long without a job it is to be done; None: not before the next job."""

    run: Callable[[], None]


class _Worker:
    """One thread; its fields belong to the pool's lock."""

    __slots__ = ("is_moving", "is_running", "thread", "woken")

    def __init__(self) -> None:
        self.woken: SimpleQueue[None] = SimpleQueue()  # at most one wake-up: it is taken off the idle ones for it
        self.is_moving = True
        self.is_running = False
        self.thread: threading.Thread


class WorkerPool:
    """Threads that share one queue of jobs.  All methods may be called from any thread."""

    def __init__(self, name: str, between: Between | None = None) -> None:
        self._name = name
        self._between = between
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()  # bounded by its users: each gives a job when the one before is done
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._unfinished = self._begun = self._begun_before = self._started = 0
        self._is_closing = self._is_refused = self._is_gathering = False

    @property
    def has_waiting(self) -> bool:
        """Whether a job has not begun."""
        return bool(self._jobs)

    def submit(self, *jobs: Job, at_once: bool = False) -> None:
        """Have `jobs` run, which should not raise: after those that wait, or beside them.

        Raises:
            RuntimeError: the system gives no thread; the jobs wait for the next call of `submit` or `hasten`.
        """
        with self._lock:
            self._unfinished += len(jobs)
            self._jobs += jobs
            if at_once:
                self._engage()
            elif not self._is_gathering:
                self._engage_unless_moving()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have jobs that are submitted within begin at its end: who submits them is not held up by who runs them.

        Raises:
            RuntimeError: as `submit`.
        """
        self._is_gathering = True
        try:
            yield
        finally:
            self._is_gathering = False
            with self._lock:
                self._engage_unless_moving()

    def hasten(self) -> None:
        """Begin on what waits with one more thread, if none has begun a job since the last call.

        Raises:
            RuntimeError: the system gives no thread.
        """
        with self._lock:
            has_moved, self._begun_before = self._begun > self._begun_before, self._begun
            if self._jobs and not has_moved:
                self._begun_before += 1  # what the next thread begins with may hang as well: that alone is no progress
                for worker in self._workers:
                    worker.is_moving = False
                self._engage()

    def wait(
        self,
        returned: threading.Condition,
        is_over: Callable[[], bool],
        seconds: float,
        *,
        stagger_seconds: float = STAGGER_SECONDS,
    ) -> None:
        """Wait until it is over, or for `seconds`; meanwhile no job that hangs holds up those that wait for it.

        `returned`, which is held, is notified by jobs that change what `is_over` finds and have none behind them.  It
        is not over while a job of an earlier time waits behind those that hang: nobody else would see to it.
        """
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            pause = min(left, stagger_seconds) if self.has_waiting else left
            if returned.wait_for(lambda: is_over() and not self.has_waiting, pause):
                return
            try:
                self.hasten()
            except RuntimeError as error:
                if not self._is_refused:
                    _log.warning("the threads %s: what waits has to go on waiting: %s", self._name, error)
                self._is_refused = True

    def stop(self, timeout_seconds: float) -> bool:
        """End all threads that run no job; return whether all have ended.  No job may follow."""
        with self._lock:
            self._is_closing = True
            workers, idle = list(self._workers), list(self._idle)
            self._idle.clear()
        for worker in idle:
            worker.woken.put(None)
        for worker in workers:
            worker.thread.join(0.0 if worker.is_running else timeout_seconds)
        return not any(worker.thread.is_alive() for worker in workers)

    def _engage_unless_moving(self) -> None:
        """See to it that a thread takes what waits; the lock is held."""
        if self._jobs and not any(worker.is_moving for worker in self._workers):
            self._engage()

    def _engage(self) -> None:
        """Wake a thread, the one that was at work last, or start one; the lock is held."""
        if self._idle:
            worker = self._idle.pop()
            worker.is_moving = True
            worker.woken.put(None)
        elif len(self._workers) < self._unfinished:
            worker = _Worker()
            self._started += 1
            name = f"pacecar-{self._name}-{self._started}"
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            worker.thread.start()
            self._is_refused = False
            self._workers.append(worker)  # only now: one that the system refused must not count as at work

    def _work(self, worker: _Worker) -> None:
        while True:
            with self._lock:
                worker.is_running = worker.is_moving = bool(self._jobs)
                job = self._jobs.popleft() if self._jobs else None
                if job is not None:
                    self._begun += 1
                elif self._is_closing:
                    self._workers.remove(worker)
                    return
                else:
                    self._idle.append(worker)
            if job is None:
                if not self._rest(worker):
                    return
                continue
            try:
                job()
            except BaseException:  # noqa: BLE001  the outer boundary of the thread: others' jobs come after this one
                _log.exception("a job of the threads %s failed", self._name)
            with self._lock:
                self._unfinished -= 1

    def _rest(self, worker: _Worker) -> bool:
        """Wait to be woken, or until `between` was done; return False when that took so long that the thread is to end.

        Of several that wait only the one that is woken next does what is between.
        """
        while True:
            with self._lock:
                is_next = bool(self._idle) and self._idle[-1] is worker
            pause = self._between.pause_seconds() if self._between is not None and is_next else None
            try:
                worker.woken.get(timeout=IDLE_SECONDS if pause is None else pause)
            except Empty:
                with self._lock:
                    if worker not in self._idle:
                        continue  # a job has come just now, and with it the wake-up
                    if pause is None and len(self._workers) > 1:
                        self._idle.remove(worker)
                        self._workers.remove(worker)
                        return False
                    if pause is None or self._idle[-1] is not worker:
                        continue
                    self._idle.pop()
                    worker.is_running = worker.is_moving = True
                    self._unfinished += 1
                self._run_between()
            return True

    def _run_between(self) -> None:
        assert self._between is not None, "it gave the pause"
        try:
            self._between.run()
        except BaseException:  # noqa: BLE001  the outer boundary of the thread, as for a job
            _log.exception("what the threads %s do between jobs failed", self._name)
        with self._lock:
            self._unfinished -= 1
