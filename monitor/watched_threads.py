"""Runs the daemon's threads so that none of them ends or hangs unnoticed.

Python prints the traceback of a thread that raises and goes on without it, so a daemon whose tick ended would serve its
last numbers for ever.  So a `WatchedThread` runs each loop: it counts and logs an exception and enters the loop again
after a pause.  A thread that fails RESTARTS_MAX times within RESTART_WINDOW_SECONDS has ended.  Loops report progress
at each turn, so that a hung one differs from an idle one.

`ThreadWatch` checks all of them.  The main thread asks it, and ends the process for its supervisor if a vital thread
ends or hangs.  Pages ask it too, and then answer 503 instead of old numbers.  A process that was stopped as a whole
(SIGSTOP, a frozen control group, a closed laptop) does not hang: `StallConfirmation` needs several equal checks.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pacecar.clock import NS_PER_SECOND, Clock
from pacecar.records import Sample

from .catalog_sample import sample

__all__ = [
    "CHECKS",
    "CLOSE_SECONDS",
    "LIMIT_SECONDS",
    "TURN_SECONDS",
    "StallConfirmation",
    "ThreadWatch",
    "WatchedThread",
]  # fmt: skip

TURN_SECONDS = 3.0
"""A watched loop that waits takes at least one turn in this time, to report progress: a third of LIMIT_SECONDS."""

LIMIT_SECONDS = 10.0
"""A loop without a turn for this long hangs: turns take milliseconds, or a second on a busy machine."""

CLOSE_SECONDS = 5.0
"""How long closing waits for a thread; one that hangs is left behind."""

RESTARTS_MAX = 5
RESTART_WINDOW_SECONDS = 60.0
"""A thread that fails this often within this time has ended: the cause does not pass."""

RESTART_PAUSE_SECONDS = 0.1
"""Pause before the first restart in a row; each further one takes twice as long."""

CHECKS = 3
"""Consecutive checks that must find a thread without progress before the process ends."""

_log = logging.getLogger(__name__)


class WatchedThread:
    """A daemon thread that runs `run` until it returns, and again if it raises."""

    def __init__(self, name: str, run: Callable[[], None], clock: Clock, *, limit_seconds: float | None = None) -> None:
        """`limit_seconds` is the longest time between two calls of `progress`; None: `run` does not call it."""
        self.name = name
        self.restarts = 0
        self._run = run
        self._clock = clock
        self._limit_ns = None if limit_seconds is None else int(limit_seconds * NS_PER_SECOND)
        self._moved_ns = clock.monotonic_ns()
        self._is_closing = False
        self._pause = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"pacecar-{name}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self.progress()
        self._thread.start()

    def progress(self) -> None:
        """Record that the loop takes another turn; called by the loop."""
        self._moved_ns = self._clock.monotonic_ns()

    def expect_end(self) -> None:
        """Announce that `run` will return soon: that is not a failure, and it is not entered again."""
        self._is_closing = True
        self._pause.set()

    def join(self, timeout_seconds: float | None = None) -> bool:
        """Wait for the end; return whether it came."""
        self.expect_end()
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def is_alive(self) -> bool:
        """Return whether the thread is alive."""
        return self._thread.is_alive()

    def trouble(self) -> str | None:
        """Return what is wrong, in words; None if nothing is, or the thread was told to end."""
        if self._is_closing or self._thread.ident is None:
            return None
        if not self._thread.is_alive():
            return f"the thread {self.name} has ended"
        still_ns = self._clock.monotonic_ns() - self._moved_ns
        if self._limit_ns is not None and still_ns > self._limit_ns:
            return f"the thread {self.name} has made no progress for {still_ns / NS_PER_SECOND:.0f} s"
        return None

    def _work(self) -> None:
        failures: deque[int] = deque(maxlen=RESTARTS_MAX)
        while not self._is_closing:
            try:
                self._run()
            except BaseException:  # noqa: BLE001  even after SystemExit the loop must go on
                now = self._clock.monotonic_ns()
                failures.append(now)
                is_over = len(failures) == RESTARTS_MAX and now - failures[0] < RESTART_WINDOW_SECONDS * NS_PER_SECOND
                _log.exception(
                    "the thread %s failed: %s", self.name, "it is not started again" if is_over else "started again"
                )
                if is_over:
                    return
                self.restarts += 1
                self._pause.wait(RESTART_PAUSE_SECONDS * 2 ** len(failures))
            else:
                return


_Get = Callable[[], WatchedThread | None]


class ThreadWatch:
    """The threads of a daemon: vital ones, without which it serves old or wrong data, and others."""

    def __init__(self) -> None:
        self._vital: list[_Get] = []
        self._others: list[_Get] = []

    def add(self, *threads: _Get, is_vital: bool = True) -> None:
        """Watch the threads that `threads` return; None: not started."""
        (self._vital if is_vital else self._others).extend(threads)

    def troubles(self) -> list[str]:
        """Return what is wrong with the vital threads, in words."""
        return [trouble for thread in _started(self._vital) if (trouble := thread.trouble()) is not None]

    def own_samples(self) -> Iterator[Sample]:
        """Yield whether each thread lives and makes progress, and how often its loop was restarted."""
        for thread in _started([*self._vital, *self._others]):
            yield sample("pacecar_daemon_thread_up", int(thread.trouble() is None), thread.name)
            yield sample("pacecar_daemon_thread_restarts_total", thread.restarts, thread.name)


def _started(threads: Sequence[_Get]) -> list[WatchedThread]:
    return [thread for get in threads if (thread := get()) is not None]


class StallConfirmation:
    """Tells a hung thread from a stopped process: a problem counts once it is seen CHECKS times in a row."""

    def __init__(self) -> None:
        self._count = 0

    def update(self, troubles: Sequence[str]) -> str | None:
        """Record the current problems; return them in words once they count."""
        self._count = self._count + 1 if troubles else 0
        return "; ".join(troubles) if self._count >= CHECKS else None
