"""Reads many files in parallel, one process for each file, at most `jobs` at a time.

A pool of long-lived workers would be wrong: a worker that the kernel kills for memory breaks the pool and loses all its
files, and one that survives keeps the memory of its largest file.  A process for one file returns its memory, and its
death costs one file.  Starting it is cheap: it is forked from a server without threads that has the libraries loaded.

A file whose process was killed while others ran is retried alone, when it may have enough memory.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

from ..trace.columns import TraceWarning
from .one_file import FileTask, WorkerAnswer, read_one
from .trace_paths import printable

__all__ = ["Advance", "run_in_processes"]

Advance = Callable[[int, int, int | None], None]
"""Called with a task's index, bytes done and bytes in all."""

PROGRESS_SECONDS = 0.1
"""How often a worker reports its progress."""

JOIN_SECONDS_MAX = 5.0
"""How long a process may take to end after its answer; it only frees memory."""

SOCKET_FOLDER_BYTES_MAX = 107 - len("/pymp-12345678/listener-12345678")
"""A socket's path has at most 107 bytes (unix(7)); the TMPDIR of a batch job may be longer."""

_PRELOADED = [
    "pacecar.analysis.reading.workers",
    "pacecar.analysis.one_rank.one_trace",
    "pacecar.analysis.trace.reader",
]


@dataclass(slots=True)
class _Running:
    index: int
    process: ForkServerProcess
    pipe: Connection
    had_company: bool


def run_in_processes(
    tasks: Sequence[FileTask],
    order: Sequence[int],
    jobs: int,
    advance: Advance,
    work: Callable[..., WorkerAnswer] = read_one,
) -> Iterator[tuple[int, WorkerAnswer]]:
    """Yield each task's index and answer as they arrive, at most `jobs` at a time, started in `order`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    _start_server()
    waiting = deque(order)
    alone: deque[int] = deque()
    running: dict[Connection, _Running] = {}

    def start(index: int) -> None:
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(tasks[index], theirs, work), daemon=True)
        process.start()
        theirs.close()
        running[ours] = _Running(index, process, ours, bool(running))
        for other in running.values():
            other.had_company |= len(running) > 1

    try:
        while waiting or alone or running:
            while waiting and len(running) < jobs:
                start(waiting.popleft())
            if not running:
                start(alone.popleft())
            for pipe in wait(list(running)):
                assert isinstance(pipe, Connection)
                message = _receive(pipe)
                one = running[pipe]
                if isinstance(message, tuple):
                    advance(one.index, *message)
                    continue
                del running[pipe]
                code = _end(one)
                if message is None and code == -signal.SIGKILL and one.had_company:
                    alone.append(one.index)
                    continue
                yield one.index, message or WorkerAnswer(error=_obituary(tasks[one.index], code))
    finally:
        for one in running.values():
            one.process.kill()
        for one in running.values():
            _end(one)


def _start_server() -> None:
    """Start the server of processes, whose socket lies in /tmp if its path in TMPDIR would be too long.

    It ignores Ctrl-C once it has imported `_PRELOADED`; before, it would print a traceback, so it is started deaf.
    """
    before = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > SOCKET_FOLDER_BYTES_MAX:
        tempfile.tempdir = "/tmp"
    resource_tracker.ensure_running()  # which unblocks signals
    heard = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, heard)
        tempfile.tempdir = before


def _work(task: FileTask, pipe: Connection, work: Callable[..., WorkerAnswer]) -> None:
    # Ctrl-C goes to the whole process group; the parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    last = time.monotonic()

    def progress(done: int, total: int | None) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            pipe.send((done, total))

    with contextlib.suppress(BrokenPipeError):  # the parent is gone and needs no answer
        pipe.send(work(task, progress))


def _receive(pipe: Connection) -> WorkerAnswer | tuple[int, int | None] | None:
    """Return the worker's message, None if it died before the message was complete."""
    try:
        message: WorkerAnswer | tuple[int, int | None] = pipe.recv()
    except (EOFError, OSError):
        return None
    return message


def _end(one: _Running) -> int | None:
    """Close a process's pipe and handle, and return its exit code."""
    one.pipe.close()
    one.process.join(JOIN_SECONDS_MAX)
    if one.process.exitcode is None:
        one.process.kill()
        one.process.join()
    code = one.process.exitcode
    one.process.close()
    return code


def _obituary(task: FileTask, code: int | None) -> TraceWarning:
    if code == -signal.SIGKILL:
        how = "its process was killed, probably out of memory"
    elif code is not None and code < 0:
        how = f"its process died of {signal.Signals(-code).name}"
    else:
        how = f"its process ended with exit code {code} and without an answer"
    return TraceWarning("worker_died", f"{printable(task.path)}: {how}")
