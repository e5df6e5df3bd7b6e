"""How does a running job give a full trace of its next steps?  With torch's own profiler, from boundary to boundary.

The hook's windows see just enough for a ledger and are gone when it is made.  When a person wants to look for himself,
all of it is needed: shapes, launches, annotations, in the file that every viewer reads.  That costs what it costs:
the traced steps are slower, and writing the file holds the loop up for a moment.  The steps are marked as disturbed, so
that nothing is concluded from their pace, and starting and writing are charged to pacecar's overhead.

A job that is being profiled by its own script is left alone: two sessions would empty each other.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from pacecar.profiler.orders import Refusal
from pacecar.records import Command

__all__ = ["STEPS_MAX", "Tracing"]

STEPS_MAX = 100
"""A trace of a large model has 10 MB and 50 000 events a step."""

Answer = Callable[[Literal["accepted", "done", "refused"], str], None]


class Tracing:
    """The action "trace": `steps` steps (default 5) into a file in `directory` (default the run folder).

    `step` is the number of the step that begins; `mark` is told when steps begin and cease to be traced.
    """

    def __init__(
        self,
        job: str,
        rank: int,
        *,
        on_device: bool,
        directory: str | None,
        step: Callable[[], int],
        mark: Callable[[bool], None],
    ) -> None:
        self._name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)[:80]
        self._rank = rank
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
        self._directory = directory
        self._step = step
        self._mark = mark
        self._profile: Any = None
        self._answer: Answer | None = None
        self._first = self._end = 0
        self._path = Path()

    def trace(self, command: Command, answer: Answer) -> None:
        """Begin; `boundary` ends it.

        Raises:
            Refusal: a trace is being taken, the job profiles itself, or an argument is wrong.
        """
        arguments = command.arguments
        steps = arguments.get("steps", 5)
        if not isinstance(steps, int) or not 1 <= steps <= STEPS_MAX:
            raise Refusal(f"steps must be 1 to {STEPS_MAX}, not {steps!r}")
        if self._profile is not None:
            raise Refusal("a trace of this job is being taken")
        if torch._C._autograd._profiler_enabled():
            raise Refusal("the job is being profiled by its own script")
        self._first, self._end = self._step(), self._step() + steps
        self._path = self._place(arguments.get("directory"))
        self._profile = profile(
            activities=self._activities,
            record_shapes=bool(arguments.get("shapes", 1)),
            with_stack=bool(arguments.get("stacks", 0)),
            schedule=_record,  # with a schedule torch marks the steps
        )
        self._profile.step_num = self._first  # the marks in the file bear the job's own numbers
        self._answer = answer
        self._mark(True)
        self._profile.start()
        answer("accepted", f"tracing steps {self._first} to {self._end - 1}")

    @property
    def is_tracing(self) -> bool:
        """Whether `boundary` has something to do."""
        return self._profile is not None

    def boundary(self) -> None:
        """Note the end of a step; ends the trace when it was the last."""
        if self._profile is None:
            return
        if self._step() < self._end:
            self._profile.step()
        else:
            self._finish()

    def close(self) -> None:
        """Write what there is: the job ends."""
        if self._profile is not None:
            self._finish()

    def _finish(self) -> None:
        taken, self._profile = self._profile, None
        answer, self._answer = self._answer, None
        assert answer is not None, "set with the profile"
        try:
            taken.stop()
            taken.export_chrome_trace(str(self._path))
        except Exception as error:  # noqa: BLE001  a full disk, a directory that went away: the job goes on
            answer("refused", f"{self._path}: {error}")
        else:
            answer("done", str(self._path))
        finally:
            self._mark(False)

    def _place(self, wanted: object) -> Path:
        directory = str(wanted) if wanted else self._directory
        folder = Path(directory) if directory else Path(tempfile.gettempdir()) / f"pacecar-traces-{os.getuid()}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # In a directory that all may write to, somebody else may have made it first, or a link in its place.
            if not directory and (folder.is_symlink() or folder.stat().st_uid != os.getuid()):
                raise Refusal(f"{folder} belongs to somebody else: name a directory")
        except OSError as error:
            raise Refusal(f"{folder}: {error.strerror}") from error
        if not os.access(folder, os.W_OK):
            raise Refusal(f"{folder}: the job may not write there")
        return folder / f"trace-{self._name}-step{self._first}-rank{self._rank}.json.gz"


def _record(step: int) -> ProfilerAction:
    return ProfilerAction.RECORD
