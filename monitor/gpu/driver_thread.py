"""Runs driver calls, which may take 45 s, on other threads, so that the caller decides how long to wait.

ctypes releases the GIL during a call, so a hung call blocks only its own thread.  A thread does one job at a time and
gets no other until that is done.  A hung thread is left alone: it cannot be ended, and a second one for the same GPU
would hang too.

Jobs of every tick share threads (`worker_pool`): one serves all GPUs while their calls return.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Generic, TypeVar

from pacecar.clock import NS_PER_SECOND, Clock

from ..worker_pool import LONG_SECONDS, WorkerPool

__all__ = ["DriverThread"]

T = TypeVar("T")


class DriverThread(Generic[T]):
    """A thread with one job.  The condition `returned` guards all fields but the thread's own."""

    def __init__(
        self,
        name: str,
        job: Callable[[], T],
        clock: Clock,
        returned: threading.Condition,
        pool: WorkerPool | None = None,
    ) -> None:
        """With a `pool` it has no thread of its own; callers wait for the result through the pool."""
        self._pool = pool
        self._took_ns = 0
        self.busy_since_ns: int | None = None
        self._result: T | Exception | None = None
        self._job = job
        self._clock = clock
        self._returned = returned
        self._asked: SimpleQueue[Callable[[], T] | None] = (
            SimpleQueue()
        )  # at most one job and one stop: bounded by its user
        self._thread = threading.Thread(target=self._work, name=f"pacecar-{name}", daemon=True)
        self._is_started = False

    def ask(self, job: Callable[[], T] | None = None) -> None:
        """Run the job, or `job` this once; the thread must be idle, and its last result is dropped."""
        with self._returned:
            assert self.busy_since_ns is None, "a busy worker cannot take a job"
            self._result, self.busy_since_ns = None, self._clock.monotonic_ns()
        if self._pool is not None:
            is_long = self._took_ns > LONG_SECONDS * NS_PER_SECOND
            self._pool.submit(partial(self._run, job or self._job), at_once=is_long)
            return
        if not self._is_started:
            self._is_started = True
            self._thread.start()
        self._asked.put(job or self._job)

    def result(self) -> T | Exception | None:
        """Return the result of the last job, once; None if there is none yet."""
        with self._returned:
            result, self._result = self._result, None
            return result

    def stop(self, timeout_seconds: float) -> bool:
        """End the thread; return whether it has ended.  No job may follow."""
        if self._pool is not None:
            with self._returned:
                return self._returned.wait_for(lambda: self.busy_since_ns is None, timeout_seconds)
        if not self._is_started:
            return True
        self._asked.put(None)
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._asked.get()) is not None:
            self._run(job)

    def _run(self, job: Callable[[], T]) -> None:
        begun_ns = time.monotonic_ns()
        result: T | Exception
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  the thread's outer boundary: the caller decides
            result = error
        self._took_ns = time.monotonic_ns() - begun_ns
        with self._returned:
            self._result, self.busy_since_ns = result, None
            if self._pool is None or not self._pool.has_waiting:  # else the next job notifies
                self._returned.notify_all()
