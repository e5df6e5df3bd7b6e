"""Runs calls that may hang on as few threads as possible: one while they return, more when a call takes long.

A hung call blocks only its own thread, so a thread for each GPU and collector would be safe.  But hangs are rare, and
two wake-ups and lock changes per thread and tick cost as much as the reading.  So jobs wait in one queue, and one
thread runs them in turn.  While jobs have not begun, their waiter repeatedly calls `help_if_stuck`: if no job has begun
since the last call, the busy threads count as stuck, and one more thread starts on the queue.  A job that is known to
take long gets its own thread at once (`at_once`).

So any number of jobs may hang, and each delays the next ones by one call of `help_if_stuck`, the first by two.  An idle
thread ends after IDLE_SECONDS; there are never more threads than unfinished jobs.

A task to run between jobs (`IdleTask`) is run by the thread that waits for the next one, so it costs no other wake-up.
If it hangs, it is treated like a hung job.

Left out: results, and how long to wait; that is up to a job and its submitter.
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

__all__ = ["LONG_SECONDS", "STAGGER_SECONDS", "IdleTask", "WorkerPool"]

STAGGER_SECONDS = 0.02
"""Time between two calls of `help_if_stuck` by a waiter: all readings of a tick together take less."""

LONG_SECONDS = 0.05
"""A job that took this long the last time gets its own thread the next time."""

IDLE_SECONDS = 30.0

_log = logging.getLogger(__name__)

Job = Callable[[], None]


class IdleTask(NamedTuple):
    """A task for the thread that waits for jobs; while it hangs, another thread takes over."""

    pause_seconds: Callable[[], float | None]
    """How long to wait for a job before running it; None: not before the next job."""

    run: Callable[[], None]


class _Worker:
    """One thread; the pool's lock guards its fields."""

    __slots__ = ("is_moving", "is_running", "thread", "woken")

    def __init__(self) -> None:
        self.woken: SimpleQueue[None] = SimpleQueue()  # at most one: a woken thread is no longer idle
        self.is_moving = True
        self.is_running = False
        self.thread: threading.Thread


class WorkerPool:
    """Threads that share one queue of jobs.  All methods may be called from any thread."""

    def __init__(self, name: str, idle_task: IdleTask | None = None) -> None:
        self._name = name
        self._idle_task = idle_task
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()  # bounded by its users: each submits a job when the previous one is done
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []
        self._unfinished = self._begun = self._begun_before = self._started = 0
        self._is_closing = self._is_refused = self._is_batching = False

    @property
    def has_waiting(self) -> bool:
        """Whether a job has not begun."""
        return bool(self._jobs)

    def submit(self, *jobs: Job, at_once: bool = False) -> None:
        """Queue `jobs`, which should not raise; with `at_once` start another thread for them.

        Raises:
            RuntimeError: no thread could be started; the jobs wait for the next `submit` or `help_if_stuck`.
        """
        with self._lock:
            self._unfinished += len(jobs)
            self._jobs += jobs
            if at_once:
                self._employ()
            elif not self._is_batching:
                self._employ_unless_moving()

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Delay jobs that are submitted inside to the end of the block, so that they do not slow the submitter down.

        Raises:
            RuntimeError: as `submit`.
        """
        self._is_batching = True
        try:
            yield
        finally:
            self._is_batching = False
            with self._lock:
                self._employ_unless_moving()

    def help_if_stuck(self) -> None:
        """Start one more thread on the queue, if no job has begun since the last call.

        Raises:
            RuntimeError: no thread could be started.
        """
        with self._lock:
            has_moved, self._begun_before = self._begun > self._begun_before, self._begun
            if self._jobs and not has_moved:
                self._begun_before += 1  # the next thread's first job may hang too: that alone is not progress
                for worker in self._workers:
                    worker.is_moving = False
                self._employ()

    def wait(
        self,
        returned: threading.Condition,
        is_over: Callable[[], bool],
        seconds: float,
        *,
        stagger_seconds: float = STAGGER_SECONDS,
    ) -> None:
        """Wait until it is over, or for `seconds`; meanwhile no hung job blocks those behind it.

        Jobs notify `returned`, which the caller holds, when they change the result of `is_over` and no job waits. It is
        not over while an earlier job waits behind hung ones, because nothing else would run it.
        """
        limit = time.monotonic() + seconds
        while (left := limit - time.monotonic()) > 0:
            pause = min(left, stagger_seconds) if self.has_waiting else left
            if returned.wait_for(lambda: is_over() and not self.has_waiting, pause):
                return
            try:
                self.help_if_stuck()
            except RuntimeError as error:
                if not self._is_refused:
                    _log.warning("no more %s threads can be started, so jobs must wait: %s", self._name, error)
                self._is_refused = True

    def stop(self, timeout_seconds: float) -> bool:
        """End all idle threads; return whether all have ended.  No job may follow."""
        with self._lock:
            self._is_closing = True
            workers, idle = list(self._workers), list(self._idle)
            self._idle.clear()
        for worker in idle:
            worker.woken.put(None)
        for worker in workers:
            worker.thread.join(0.0 if worker.is_running else timeout_seconds)
        return not any(worker.thread.is_alive() for worker in workers)

    def _employ_unless_moving(self) -> None:
        """Make sure that a thread takes the queued jobs; the lock is held."""
        if self._jobs and not any(worker.is_moving for worker in self._workers):
            self._employ()

    def _employ(self) -> None:
        """Wake the thread that was busy last, or start one; the lock is held."""
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
            self._workers.append(worker)  # only now: a thread that failed to start must not count

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
                if not self._wait_for_job(worker):
                    return
                continue
            try:
                job()
            except BaseException:  # noqa: BLE001  the thread's outer boundary: the other jobs must run
                _log.exception("a job of the %s threads failed", self._name)
            with self._lock:
                self._unfinished -= 1

    def _wait_for_job(self, worker: _Worker) -> bool:
        """Wait for a wake-up, or until the idle task has run; return False if the thread is no longer needed.

        Of several idle threads only the one that is woken next runs the idle task.
        """
        while True:
            with self._lock:
                is_next = bool(self._idle) and self._idle[-1] is worker
            pause = self._idle_task.pause_seconds() if self._idle_task is not None and is_next else None
            try:
                worker.woken.get(timeout=IDLE_SECONDS if pause is None else pause)
            except Empty:
                with self._lock:
                    if worker not in self._idle:
                        continue  # a job came just now, and with it the wake-up
                    if pause is None and len(self._workers) > 1:
                        self._idle.remove(worker)
                        self._workers.remove(worker)
                        return False
                    if pause is None or self._idle[-1] is not worker:
                        continue
                    self._idle.pop()
                    worker.is_running = worker.is_moving = True
                    self._unfinished += 1
                self._run_idle_task()
            return True

    def _run_idle_task(self) -> None:
        assert self._idle_task is not None, "it gave the pause"
        try:
            self._idle_task.run()
        except BaseException:  # noqa: BLE001  the thread's outer boundary, as for a job
            _log.exception("the idle task of the %s threads failed", self._name)
        with self._lock:
            self._unfinished -= 1
