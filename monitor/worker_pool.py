"""Runs calls that may hang on as few threads as possible: on one while they return, on more as soon as one takes long.

A thread for each GPU and each collector is simple, and is what a hang needs: it holds up its own thread only.  But
hangs are rare, and a thread for each costs two wake-ups and a change of the interpreter's lock for each at every tick,
which is as much as the reading.  So jobs wait in one queue, and one thread takes one after the other.  Who waits for
them calls `hasten` now and then, as long as any has not begun: if none was begun since the last time, the threads at
work are taken for stuck, and one more begins on what waits.  A job that is known to take long begins on a thread of its
own at once (`at_once`).

So any number of jobs may hang, and each delays those behind it by a call of `hasten`, the first by two.  A thread that
is not needed for IDLE_SECONDS ends; there are never more than jobs that are not done.

Left out: results, and how long to wait; that is between a job and who gave it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["LONG_SECONDS", "STAGGER_SECONDS", "WorkerPool"]

STAGGER_SECONDS = 0.02
"""Time between two calls of `hasten` by who waits: all readings of a tick together take less."""

LONG_SECONDS = 0.05
"""A job that took so long the last time is begun at once the next time, beside the others."""

IDLE_SECONDS = 30.0

_log = logging.getLogger(__name__)

Job = Callable[[], None]


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

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()  # bounded by its users: each gives a job when the one before is done
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._unfinished = self._begun = self._begun_before = self._started = 0
        self._is_closing = False

    @property
    def has_waiting(self) -> bool:
        """Whether a job has not begun."""
        return bool(self._jobs)

    def submit(self, job: Job, *, at_once: bool = False) -> None:
        """Have `job` run, which should not raise: after those that wait, or beside them.

        Raises:
            RuntimeError: the system gives no thread; the job waits for the next call of `submit` or `hasten`.
        """
        with self._lock:
            self._unfinished += 1
            self._jobs.append(job)
            if at_once or not any(worker.is_moving for worker in self._workers):
                self._engage()

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
        """Wait to be woken; return False when that did not happen for so long that the thread is to end."""
        while True:
            try:
                worker.woken.get(timeout=IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if worker in self._idle and len(self._workers) > 1:
                        self._idle.remove(worker)
                        self._workers.remove(worker)
                        return False
            else:
                return True
