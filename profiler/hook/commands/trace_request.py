"""Executes the "trace" command: a full trace of the next steps by torch's own profiler, from boundary to boundary.

The hook's windows contain just enough for a ledger and are dropped afterwards.  A user who wants to inspect a step
needs shapes, launches and annotations, in a file that every viewer can read.  This has a cost: the traced steps are
slower, and ending and writing the trace hold up the loop for a moment; only the compression runs on its own thread.
The steps are marked as disturbed, so that no conclusions are drawn from their pace.

Traces of several ranks are comparable only if they contain the same steps.  So a rank that receives the command late
ends together with the others, and one that is too late says so and does not trace.

If collectives may be running on threads of their process group, the trace is paused after its last step and ends a step
later (see `session_pause`).

A job whose own script is profiling it is left alone: two sessions would empty each other.  There is always a whole step
between one of the hook's windows and a trace (see `kineto_window`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import stat
import tempfile
import threading
from pathlib import Path
from typing import Any, Protocol

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from pacecar.path_walk import UnsafePathError
from pacecar.profiler.windows.kineto_log import quiet
from pacecar.profiler.windows.session_pause import SessionPause, may_collectives_be_out
from pacecar.records import Command
from pacecar.records.commands import TOO_LATE
from pacecar.safe_files import open_folder, own_folder
from pacecar.torch_internals import lacking, need

from .daemon_messages import MessageRefusal, NotYet, Reply
from .trace_file import TraceFile

__all__ = ["STEPS_MAX", "TraceRequests", "TraceWindows", "TracedHook"]

STEPS_MAX = 100
"""The most steps in one trace: a large model has 10 MB and 50 000 events per step."""

PAUSED_STEPS_MAX = 20
"""A trace ends this many steps later even if collectives of the job are still running."""

CLOSE_SECONDS = 10.0
"""How long the end of a job waits for a trace to be compressed: 1 GB of JSON takes a few seconds."""


class TraceWindows(Protocol):
    """The hook's own windows, as seen by a trace."""

    @property
    def is_settled(self) -> bool:
        """Whether no window is open, and no profiler has ended at this boundary."""
        ...

    def let_pass(self) -> None:
        """Record that a boundary passed while something waits for `is_settled`."""
        ...

    @property
    def outlived_by(self) -> str | None:
        """The record that began in a session and may still be open; ending in a later one would kill the process."""
        ...

    def session_ended(self, profile: object) -> None:
        """Handle the end of a profiler and check which records were open then."""
        ...


class TracedHook(Protocol):
    """The hook, as seen by a trace."""

    is_traced: bool
    """Whether the next steps are traced."""

    @property
    def step(self) -> int:
        """The number of the beginning step."""
        ...

    @property
    def windows(self) -> TraceWindows:
        """The hook's own windows."""
        ...


class TraceRequests:
    """The "trace" action: `steps` steps (default 5) into a file in `directory` (default: the run folder)."""

    def __init__(
        self,
        job: str,
        rank: int,
        *,
        hook: TracedHook,
        on_device: bool,
        directory: str | None,
    ) -> None:
        self._name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)[:80]
        self._rank = rank
        self._on_device = on_device
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        self._directory = directory
        self._hook = hook
        self._windows = hook.windows
        self._profile: Any = None
        self._pause = SessionPause()
        self._answer: Reply | None = None
        self._end = 0
        self._file: TraceFile | None = None
        self._url: str | None = None
        self._writer: threading.Thread | None = None

    def trace(self, command: Command, answer: Reply) -> None:
        """Begin a trace; `boundary` ends it.

        Raises:
            NotYet: one of our windows was closed only just now.
            MessageRefusal: a trace is being taken, the job profiles itself, it is too late, or an argument is wrong.
        """
        arguments, now = command.arguments, self._hook.step
        steps = arguments.get("steps", 5)
        if not isinstance(steps, int) or not 1 <= steps <= STEPS_MAX:
            raise MessageRefusal(f"steps must be 1 to {STEPS_MAX}, not {steps!r}")
        first = command.at_step or now
        end = first + steps
        if now >= end:
            raise MessageRefusal(
                f"{TOO_LATE}: steps {first} to {end - 1} were asked for, and this rank is at {now} already"
            )
        if self._profile is not None:
            raise MessageRefusal(f"another trace is being taken, until step {self._end - 1}")
        if not self._windows.is_settled:
            self._windows.let_pass()
            raise NotYet
        if self._writer is not None and self._writer.is_alive():
            raise MessageRefusal("the trace before is being compressed")
        reason = lacking("traces")
        if reason is not None:
            raise MessageRefusal(reason)
        if need("torch._C._autograd._profiler_enabled")():
            raise MessageRefusal("the job is being profiled by its own script")
        if self._windows.outlived_by is not None:
            raise MessageRefusal(
                f"the record {self._windows.outlived_by!r} of the job is open across steps; torch would crash"
            )
        self._end = end
        session = profile(
            activities=self._activities,
            record_shapes=bool(arguments.get("shapes", 1)),
            with_stack=bool(arguments.get("stacks", 0)),
            schedule=_record,  # with a schedule torch marks the steps
        )
        wanted = str(arguments.get("directory") or "")
        is_url = "://" in wanted
        if is_url and importlib.util.find_spec("fsspec") is None:
            raise MessageRefusal("writing to a URL needs fsspec in the job: pip install 'pacecar[remote]'")
        self._file = file = self._place("" if is_url else wanted, first)
        self._url = f"{wanted.rstrip('/')}/{file.path.name}" if is_url else None
        self._profile = session
        self._profile.step_num = now  # so the marks in the file have the job's own step numbers
        self._answer = answer
        self._hook.is_traced = True
        try:
            with quiet():
                self._profile.start()
        except BaseException:
            self._profile = self._answer = None
            self._forget_file()
            self._hook.is_traced = False
            raise
        late = f" of {first} to {end - 1}: the order came late" if now > first else ""
        answer("accepted", f"tracing steps {now} to {end - 1}{late}, into {file.path}")

    @property
    def is_tracing(self) -> bool:
        """Whether `boundary` has something to do."""
        return self._profile is not None

    def boundary(self) -> None:
        """Handle the end of a step; after the last one end the trace, or pause it until it may end."""
        if self._profile is None:
            return
        is_last = self._hook.step >= self._end
        if self._pause.is_on:
            if self._hook.step >= self._end + PAUSED_STEPS_MAX or self._pause.is_over():
                self._finish()
            return
        if is_last and not self._may_collectives_be_out():
            self._finish()
            return
        if is_last:
            self._pause.begin()  # before the mark of the next step, which is not part of the trace
        try:
            with quiet():
                self._profile.step()
        except Exception as error:  # noqa: BLE001  errors of CUPTI: the job goes on, without a trace
            self._give_up(error)

    def _may_collectives_be_out(self) -> bool:
        """Return whether the trace must be paused; on a device only if that is certain, because its rows go on."""
        return may_collectives_be_out() and (not self._on_device or bool(self._pause.working()))

    def close(self) -> None:
        """Write what was traced so far and wait for it, because the job ends."""
        if self._profile is not None:
            self._finish()
        if self._writer is not None:
            self._writer.join(CLOSE_SECONDS)

    def _give_up(self, error: Exception) -> None:
        taken, self._profile = self._profile, None
        answer, self._answer = self._answer, None
        assert answer is not None, "set with the profile"
        self._forget_file()
        with contextlib.suppress(Exception):
            self._stop(taken)
        self._hook.is_traced = False
        answer("refused", f"the profiler failed: {type(error).__name__}: {error}")

    def _stop(self, taken: Any) -> None:  # noqa: ANN401  as `_profile`
        self._pause.wait()
        self._pause.end()
        with quiet():
            taken.stop()

    def _forget_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _finish(self) -> None:
        taken, self._profile = self._profile, None
        answer, self._answer = self._answer, None
        file, self._file = self._file, None
        assert answer is not None and file is not None, "set with the profile"  # noqa: PT018  one fact
        try:
            self._stop(taken)
            self._windows.session_ended(taken.profiler)
            taken.export_chrome_trace(file.plain())  # not as .gz: torch would compress on this thread, through /tmp
            file.check_whole()
        except Exception as error:  # noqa: BLE001  a full disk, a directory that went away: the job goes on
            file.close()
            answer("refused", f"{file.path}: {error}")
        else:
            self._writer = threading.Thread(
                target=_compress, args=(file, self._url, answer), name="pacecar-trace", daemon=True
            )
            self._writer.start()
        finally:
            self._hook.is_traced = False

    def _place(self, wanted: str, first: int) -> TraceFile:
        directory = wanted or self._directory
        folder = Path(directory) if directory else Path(tempfile.gettempdir()) / f"pacecar-traces-{os.getuid()}"
        try:
            descriptor = open_folder(folder, make_mode=0o700) if directory else _own(folder)
        except UnsafePathError as error:
            raise MessageRefusal(f"{folder} belongs to another user: {error.strerror}: name a directory") from error
        except OSError as error:
            raise MessageRefusal(f"{folder}: {error.strerror}") from error
        if not os.access(".", os.W_OK, dir_fd=descriptor):
            os.close(descriptor)
            raise MessageRefusal(f"{folder}: the job has no permission to write there")
        path = folder.absolute() / f"trace-{self._name}-step{first}-rank{self._rank}.json.gz"
        return TraceFile(descriptor, path)


def _own(folder: Path) -> int:
    """Open a folder whose name is predictable: another user may have made it, or a link in its place."""
    with contextlib.suppress(FileNotFoundError):
        if stat.S_ISLNK(os.lstat(folder).st_mode):
            raise UnsafePathError(folder, "it is a symbolic link")
    return own_folder(folder)


def _record(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def _compress(file: TraceFile, url: str | None, answer: Reply) -> None:
    try:
        file.compress()
    except OSError as error:
        answer("refused", f"{file.path}: {error.strerror or error}")
    else:
        if url is None:
            answer("done", str(file.path))
            return
        try:
            file.move_to(url)
        except Exception as error:  # noqa: BLE001  drivers raise their own library's classes
            answer("refused", f"{url}: {str(error) or type(error).__name__}; the trace stays at {file.path}")
        else:
            answer("done", url)
    finally:
        file.close()
