"""Says what this rank is doing: its process groups, the Python stacks of its threads, and its process.

It needs no collective and no call of the training thread, and any thread of this process may ask for it.  A Python
thread does not run while another one holds the GIL, so a rank that is stuck in a C call with the GIL says nothing.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple, TypeVar

from pacecar.formatting.plain_text import clean
from pacecar.process_state import ProcessIdentity, read_process
from pacecar.records import JobHello
from pacecar.records.hangs import (
    FRAMES_MAX,
    THREADS_MAX,
    CallOrder,
    GroupState,
    ProcessState,
    RankAccount,
    ThreadStack,
)
from pacecar.records.ranges import LABEL_CHARACTERS_MAX

from .torch_flight_recorder import group_counters, group_states

T = TypeVar("T")

__all__ = ["RankSpeaker", "TrainingProgress", "thread_stacks"]

OWN_THREADS = "pacecar-"
"""How the names of pacecar's threads begin."""


class TrainingProgress(NamedTuple):
    """How far the training thread is: no step has ended for `silent_ns`, of which `patience_ns` would be usual.

    `is_in_step` is that of a `RankAccount`.
    """

    step: int
    phase: str
    silent_ns: int
    patience_ns: int
    is_in_step: bool | None = None


class RankSpeaker:
    """Makes the accounts of this rank; `training_thread` is the ident of the training thread.

    `progress` returns None if it is not known.
    """

    def __init__(
        self,
        hello: JobHello,
        process: ProcessIdentity,
        training_thread: int,
        progress: Callable[[], TrainingProgress | None],
    ) -> None:
        self._hello = hello
        self._process = process
        self._training_thread = training_thread
        self._progress = progress
        self.problems: Callable[[], tuple[str, ...]] = tuple
        """What else the others should know, as of refused connections."""

    def account(self) -> RankAccount:
        """Return what this rank is doing now; what cannot be read is missing and named."""
        problems = list(self.problems())

        def read(what: str, reader: Callable[[], T], instead: T) -> T:
            try:
                return reader()
            except Exception as error:  # noqa: BLE001  private parts of torch and of python: the rest still counts
                problems.append(f"{what} cannot be read: {type(error).__name__}: {error}")
                return instead

        progress = read("its progress", self._own_progress, None)
        nothing: tuple[tuple[GroupState, ...], CallOrder | None] = (), None
        groups, order = read("its process groups", group_states, nothing)
        return RankAccount(
            rank=self._hello.rank,
            world_size=self._hello.world_size,
            host=self._hello.host,
            wall_ns=time.time_ns(),
            step=None if progress is None else progress.step,
            phase=None if progress is None else progress.phase,
            silent_ns=None if progress is None else progress.silent_ns,
            patience_ns=None if progress is None else progress.patience_ns,
            is_in_step=None if progress is None else progress.is_in_step,
            groups=groups,
            order=order,
            stacks=read("its stacks", lambda: thread_stacks(self._training_thread), ()),
            process=read("its process", self._own_process, None),
            problems=tuple(problems),
        )

    def counters(self) -> RankAccount:
        """Return how many operations this rank has begun on each process group, and nothing that costs more."""
        return RankAccount(
            rank=self._hello.rank, world_size=self._hello.world_size, host=self._hello.host, groups=group_counters()
        )

    def _own_progress(self) -> TrainingProgress | None:
        return self._progress()

    def _own_process(self) -> ProcessState | None:
        return read_process(self._process)


def thread_stacks(training_thread: int) -> tuple[ThreadStack, ...]:
    """Return the Python stacks of this process's threads without pacecar's, the training thread's first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    try:
        shown = (ident for ident in frames if not names.get(ident, "").startswith(OWN_THREADS))
        return tuple(
            ThreadStack(
                name=clean(names.get(ident, f"thread {ident}"), LABEL_CHARACTERS_MAX),
                frames=_frames(frames[ident]),
                is_training=ident == training_thread,
            )
            for ident in sorted(shown, key=lambda ident: ident != training_thread)[:THREADS_MAX]
        )
    finally:
        frames.clear()  # with this thread's frame in it a circle, which keeps all threads' locals for the collector


def _frames(frame: FrameType | None) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None and len(found) < FRAMES_MAX:
        code = frame.f_code
        name = f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
        found.append(clean(name, LABEL_CHARACTERS_MAX))  # a file's name need not be UTF-8
        frame = frame.f_back
    return tuple(found)
