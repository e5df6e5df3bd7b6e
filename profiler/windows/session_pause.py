"""Pauses a profiler session until no thread of a process group can write to it any more, so that it may end.

Gloo runs each collective on a thread of its process group.  That thread writes into the session's memory after the
collective has ended and its caller been told, and on a busy machine it may lose the processor in between for longer
than a step.  A collective that the job does not wait for ends when the last rank arrives.  If the session has ended by
then, the memory is freed (torch 2.13 dies of signal 11).

An idle thread waits for work in `futex` without a timeout.  A thread working on a collective runs, waits in another
system call, or waits in `futex` with the group's timeout.  Linux shows which (`/proc/<pid>/task/<tid>/syscall`, see
proc(5)).  A group starts its works in order, and none of those started after the pause is recorded.  So a thread seen
idle once since then is done with the session, whatever it does later.  Threads of pacecar's own groups are ignored
(`without_sessions`): their collectives are never recorded, and a gather may be pending for hours.

Gloo's threads have names since torch 2.11.  If there are none, every thread that is not Python's may be gloo's; such a
thread also counts as idle while it sleeps or waits for others to send, as gloo's I/O threads do.  Threads of other
libraries may never be idle (OpenMP threads spin), so the session ends after BLIND_SECONDS at the latest.  If Linux does
not show what threads do, all that is left is to let time pass.

`window_schedule` and `trace_request` decide what the job does meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import platform
import threading
import time
from collections.abc import Collection, Iterator

import torch.distributed as dist

from . import recording_switch

__all__ = ["SessionPause", "may_collectives_be_out", "without_sessions"]

GLOO_THREAD = "pt_gloo_runloop"
"""The name of gloo's worker threads, of which the kernel keeps 15 characters."""

FUTEX_NUMBERS = {"x86_64": "202", "aarch64": "98"}
"""The number of the system call futex, by machine."""

OTHER_WAITS = {
    "x86_64": frozenset({"7", "23", "232", "270", "271", "281", "441", "0", "43", "45", "47", "288", "35", "230"}),
    "aarch64": frozenset({"73", "72", "22", "441", "63", "202", "207", "212", "242", "101", "115"}),
}
"""The numbers of the system calls that poll, read, accept, receive or sleep, by machine.  A thread working on a
collective is in none of them; threads of other libraries often are."""

TIME_LIMIT_AT = 4
"""The position of the fourth argument in a line of `syscall`, futex's pointer to its timeout."""

BLIND_SECONDS = 1.0
"""The longest pause of a session if it is uncertain what the threads do; no scheduler makes a thread wait this long."""

BLIND_WAIT_SECONDS = 0.1
"""The longest pause while the job waits: threads of CUDA or NCCL may never be idle."""

WAIT_SECONDS_MAX = 1.0
"""The longest that the job waits for collectives to end if a session must end at once."""

POLL_SECONDS = 0.001

TASKS = "/proc/self/task"

_own_tasks = set[str]()
"""Threads of pacecar's own groups, whose collectives are never recorded, and of Kineto."""


def may_collectives_be_out() -> bool:
    """Return whether this process may have threads that run collectives on tensors in host memory.

    Any group may be gloo's: the default group's backend is "undefined" if the job named none.
    """
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def without_sessions() -> Iterator[None]:
    """Register threads that start inside as pacecar's own, whose work no session records."""
    before = _tasks()
    try:
        yield
    finally:
        after = _tasks()
        _forget_ended(after)
        _own_tasks.update(after - before)


def _forget_ended(listed: Collection[str]) -> None:
    """Forget ended threads that are not `listed`, because a new thread may get an old number."""
    for task in _own_tasks.difference(listed):
        if not os.path.exists(f"{TASKS}/{task}"):  # another thread may have started it since
            _own_tasks.discard(task)


def _tasks() -> set[str]:
    try:
        return set(os.listdir(TASKS))
    except OSError:  # another system
        return set()


class SessionPause:
    """The pause before a session ends: this thread is no longer recorded, and running collectives end."""

    def __init__(self, tasks: str = TASKS) -> None:
        self._tasks = tasks
        self._thread: int | None = None
        self._begun_at = 0.0
        self._working: set[str] | None = None
        self._is_guess = False

    @property
    def is_on(self) -> bool:
        """Whether a session is paused."""
        return self._thread is not None

    def begin(self) -> None:
        """Stop recording this thread, so that no collective started from now on writes to the session."""
        if self._thread is None:
            recording_switch.pause()
            self._thread = threading.get_ident()
            self._begun_at = time.monotonic()
            self._working = self.working()
            self._is_guess = self._working is None
            if self._is_guess:
                self._working = self._unnamed()

    def end(self) -> None:
        """Record this thread again; has no effect on any other thread than that of `begin`."""
        if self._thread == threading.get_ident():
            self._thread = None
            recording_switch.resume()

    def is_over(self) -> bool:
        """Return whether the paused session may end; checks each thread that was working at the last check."""
        if self._is_guess and time.monotonic() - self._begun_at >= BLIND_SECONDS:
            return True
        if self._working:
            is_idle = self._may_rest if self._is_guess else self._is_idle
            self._working = {task for task in self._working if not is_idle(task)}
        return self._working is not None and not self._working

    def wait(self) -> None:
        """Block until a session that must end now may do so, for at most WAIT_SECONDS_MAX."""
        if not may_collectives_be_out():
            return
        self.begin()
        if self._working is None:
            time.sleep(BLIND_WAIT_SECONDS)
            return
        until = time.monotonic() + (BLIND_WAIT_SECONDS if self._is_guess else WAIT_SECONDS_MAX)
        while not self.is_over() and time.monotonic() < until:
            time.sleep(POLL_SECONDS)

    def working(self) -> set[str] | None:
        """Return the gloo threads that are working on a collective; None if that is unknown on this system."""
        try:
            listed = os.listdir(self._tasks)
            _forget_ended(listed)
            tasks = [task for task in listed if self._is_gloos(task)]
            if not tasks or not all(self._read(task, "syscall") for task in tasks):
                return None
        except OSError:  # another system, or another kernel
            return None
        if platform.machine() not in FUTEX_NUMBERS:
            return None
        return {task for task in tasks if task not in _own_tasks and not self._is_idle(task)}

    def _unnamed(self) -> set[str] | None:
        """Return the threads that may be a group's and are not known to be idle, if none has a name; None: unknown."""
        others = {str(thread.native_id) for thread in threading.enumerate()} | _own_tasks
        try:
            tasks = os.listdir(self._tasks)
        except OSError:
            return None
        if platform.machine() not in FUTEX_NUMBERS or not any(self._call(task) for task in tasks):
            return None
        return {task for task in tasks if task not in others and not self._may_rest(task)}

    def _may_rest(self, task: str) -> bool:
        """Return whether a thread that may be a group's is idle: it waits for work, or is not a group's."""
        return self._is_idle(task) or not OTHER_WAITS[platform.machine()].isdisjoint(self._call(task)[:1])

    def _is_gloos(self, task: str) -> bool:
        try:
            return self._read(task, "comm") == GLOO_THREAD
        except OSError:
            return not os.path.exists(f"{self._tasks}/{task}")

    def _is_idle(self, task: str) -> bool:
        """Return whether a thread waits for work, or has ended."""
        call = self._call(task)
        if not call:
            return not os.path.exists(f"{self._tasks}/{task}")
        if call[0] != FUTEX_NUMBERS[platform.machine()]:
            return False
        return len(call) > TIME_LIMIT_AT and int(call[TIME_LIMIT_AT], 16) == 0

    def _call(self, task: str) -> list[str]:
        """Return the number and arguments of the system call that a thread is in; [] if that cannot be read."""
        try:
            return self._read(task, "syscall").split()
        except OSError:
            return []

    def _read(self, task: str, name: str) -> str:
        with open(f"{self._tasks}/{task}/{name}", encoding="utf-8", errors="replace") as stream:
            return stream.read().strip()
