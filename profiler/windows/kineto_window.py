"""Opens and closes Kineto profiler sessions over single steps (windows) without disturbing the job.

torch.profiler's public interface turns every event into a Python object (50 us each) and synchronizes the device when
it stops; neither is acceptable in a user's training loop.  So this module uses the three calls beneath it, with
`trace_only`, and reads Kineto's own rows (about 1 us each).  `trace_spans` interprets the rows.

The user's profiler takes precedence.  A second session silently empties the first, and Kineto does not refuse it, so a
window never starts while a profiler is on.  While a `WindowProfiler` is installed, preparing any other
`torch.autograd.profiler.profile` (torch.profiler does this too) first discards an open window and bars new ones until
that profiler ends.

A `record_function` that begins in one session and ends in a later one writes into the first session's freed memory and
kills the process (torch 2.13: SIGSEGV in the second session's stop).  `Optimizer.step` is always open at a boundary, so
there is always a whole step between two sessions.  If a closed window, or the job's own profiler, shows any other
record still open (a user's `record_function("epoch")`), no more windows are opened in this process.

On a CUDA device Kineto leaves CUPTI attached after a session, which slows every launch on the host (from 6 us to 8 to
12 us on an H200, docs/measurements/gpu.md).  With TEARDOWN_CUPTI=1 in the environment Kineto detaches it during one of
the next CUDA calls, from its own thread, and a session that begins in the meantime records nothing.  So detaching is
only the last resort: if steps stay slower, `detach` ends windows for good.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.autograd.profiler as torch_profiler
from torch.profiler import ProfilerActivity

from pacecar.ledger.classification import METADATA_ROW
from pacecar.torch_internals import find, lacking, need
from pacecar.version_numbers import major_minor

from ..timing.fork_safety import keep_exit_short
from .kineto_log import quiet
from .session_pause import SessionPause, may_collectives_be_out
from .trace_spans import Activity

__all__ = ["WindowProfiler", "WindowUnavailable"]

_log = logging.getLogger(__name__)

TEARDOWN_VARIABLE = "TEARDOWN_CUPTI"
LAZY_VARIABLE = "DISABLE_CUPTI_LAZY_REINIT"
TEARDOWN_CUDA_MIN = (12, 6)
"""The last CUDA version with which torch itself keeps CUPTI attached beside CUDA graphs (torch.profiler)."""

_MAY_BE_OPEN = ("Optimizer.step#", "gloo:", "ucc:", "mpi:", "nccl:")
"""Records that may be open when a session ends.  A collective's record is not ended by a later session's thread;
`session_pause` waits for it."""


class WindowUnavailable(RuntimeError):  # noqa: N818  it is a state of this torch, not a failure of the call
    """This torch lacks what a window needs; the message names it."""


class WindowProfiler:
    """A profiler session that can be opened, closed and discarded, always on the thread that opened it."""

    def __init__(self, *, on_device: bool) -> None:
        self._activities = {ProfilerActivity.CPU}
        if on_device:
            self._activities.add(ProfilerActivity.CUDA)
        self._open = False
        self._thread: int | None = None
        self._is_foreign = False
        self._rest_steps = 0
        self._is_barred = False
        self.outlived_by: str | None = None
        """The record that was open when a window was closed; no window is opened after that."""
        self._patched: list[tuple[str, Any, Any]] = []
        self._is_trace_only = False
        self._pause = SessionPause()

    @property
    def is_open(self) -> bool:
        """Whether one of our sessions is running."""
        return self._open

    @property
    def is_settled(self) -> bool:
        """Whether none of our sessions is running or has ended at this boundary."""
        return not (self._open or self._rest_steps)

    def install(self) -> None:
        """Patch torch's profiler to notice other sessions.

        Raises:
            WindowUnavailable: the private parts of this torch's profiler differ, so a window could harm the user's.
        """
        reason = lacking("windows")
        if reason is not None:
            raise WindowUnavailable(reason)
        experimental: Any = need("torch._C._profiler._ExperimentalConfig")
        self._is_trace_only = "trace_only" in (experimental.__init__.__doc__ or "")
        # Looked up once: these run at step boundaries.
        self._prepare: Callable[..., None] = need("torch._C._autograd._prepare_profiler")
        self._enable: Callable[..., None] = need("torch._C._autograd._enable_profiler")
        self._disable: Callable[[], Any] = need("torch._C._autograd._disable_profiler")
        self._is_enabled: Callable[[], bool] = need("torch._C._autograd._profiler_enabled")
        keep_exit_short()
        self._patch("_prepare_trace", before=self._yield_to_foreign)
        self._patch("_start_trace", before=self._yield_to_foreign)
        self._patch("__exit__", after=self._foreign_ended)

    def uninstall(self) -> None:
        """Discard an open window and undo the patches."""
        self.discard()
        for name, ours, original in reversed(self._patched):
            # A later patch by someone else holds our function; removing it would break theirs.
            if getattr(torch_profiler.profile, name) is ours:
                setattr(torch_profiler.profile, name, original)
        self._patched.clear()

    def may_open(self) -> bool:
        """Return whether no profiler runs or is being prepared, and no open record could outlive two sessions.

        False while the job captures a CUDA graph: CUPTI may allocate when it starts to record, which CUDA then forbids.
        """
        is_ours_to_take = not (self._open or self._is_foreign or self._is_barred or self._rest_steps)
        return is_ours_to_take and not self._is_enabled() and not self._is_captured()

    def _is_captured(self) -> bool:
        return ProfilerActivity.CUDA in self._activities and torch.cuda.is_current_stream_capturing()

    @property
    def is_taken(self) -> bool:
        """Whether another profiler than ours runs or is being prepared."""
        return self._is_foreign or (not self._open and self._is_enabled())

    def step_passed(self) -> None:
        """Record the end of a boundary."""
        self._rest_steps = max(0, self._rest_steps - 1)

    @property
    def can_be_plain(self) -> bool:
        """Whether this torch supports `open(is_plain=True)`."""
        return find("torch._C._profiler.RecordScope") is not None

    def open(self, *, is_plain: bool = False) -> None:
        """Start a session on this thread; requires `may_open()`.

        `is_plain`: record only operators and no annotations, so that the session may end at any time (`pause`).
        """
        assert self.may_open(), "a second session would empty the first"
        config = self._config()
        with quiet():  # separate, because Kineto reads the job's own level in it the first time
            self._prepare(config, self._activities)
        with quiet():
            if is_plain:
                scope: Any = need("torch._C._profiler.RecordScope")
                self._enable(config, self._activities, {scope.FUNCTION, scope.BACKWARD_FUNCTION})
            else:
                self._enable(config, self._activities)
        self._open = True
        self._thread = threading.get_ident()

    def pause(self) -> bool:
        """Stop recording this thread while the session goes on; False: the session belongs to another thread.

        Threads of process groups may write to the session until `may_end`.
        """
        if not (self._open and self._thread == threading.get_ident()):
            return False
        self._pause.begin()
        return True

    def may_end(self) -> bool:
        """Return whether a paused session may end because no process group's thread can write to it any more."""
        return not (self._open and self._pause.is_on) or self._pause.is_over()

    def are_collectives_under_way(self) -> bool:
        """Return whether a process group's thread is known to be working right now."""
        return may_collectives_be_out() and bool(self._pause.working())

    def close(self, path: str | None = None) -> tuple[Sequence[Activity], bool]:
        """End the session without waiting for the device, and write it to `path` as a trace, if there is one.

        Return its rows, read in the cheapest way this torch has, and whether their thread numbers are the system's.

        Raises:
            WindowUnavailable: the training loop moved to another thread, where a session cannot be ended.
        """
        assert self._open, "no window is open"
        self._open = False
        self._rest_steps = 1
        if self._thread != threading.get_ident():
            self._is_barred = True
            raise WindowUnavailable("the window was opened on another thread: the training loop changed threads")
        self._pause.end()
        with quiet():
            results: Any = self._disable()
        on_device = ProfilerActivity.CUDA in self._activities
        rows = _rows_of(results, on_device=on_device)
        if path is not None:
            self.bar_if_outlived(rows)
            with quiet():
                results.save(path)
        return rows, hasattr(results, "trace_activities")

    def discard(self) -> None:
        """End an open session, if any, and drop its rows.

        If collectives of the job may be running, this waits for them (`SessionPause.wait`).
        """
        if self._open and self._thread == threading.get_ident():
            self._pause.wait()
            self.bar_if_outlived(self.close()[0])
        self._pause.end()  # also if the session was abandoned because the loop changed threads

    def detach(self) -> bool:
        """Stop opening windows and make Kineto detach CUPTI; False: the job or an older CUDA keeps it attached.

        The variable stays set: Kineto reads it again after detaching, and when the job's own profiler attaches CUPTI.
        """
        self._is_barred = True
        is_decided = TEARDOWN_VARIABLE in os.environ or LAZY_VARIABLE in os.environ
        is_possible = not is_decided and (major_minor(torch.version.cuda or "") or (0, 0)) >= TEARDOWN_CUDA_MIN
        if not is_possible or self._open or self._is_foreign or self._is_enabled():
            return False
        os.environ[TEARDOWN_VARIABLE] = "1"
        self._is_barred = False
        self.open()  # Kineto detaches when a session ends
        self._is_barred = True
        self.close()
        return True

    def bar_if_outlived(self, rows: Iterable[Activity]) -> None:
        """Open no more windows if one of the `rows` from `close` was still open then; call this for every window."""
        # An unfinished row ends with the trace, as `Optimizer.step` always does here: operators need no check.
        annotations = [row for row in rows if row.type() == "user_annotation"]
        last = max((row.timestamp() + row.duration() for row in annotations), default=0)
        for row in annotations:
            if row.timestamp() + row.duration() < last:
                continue
            if row.name().startswith(_MAY_BE_OPEN):
                continue
            if '"finished": false' in row.metadata_json():
                self._is_barred, self.outlived_by = True, row.name()
                _log.info("pacecar takes no more exact windows because the record %r outlives them", self.outlived_by)
                return

    def _config(self) -> Any:  # noqa: ANN401  torch's ProfilerConfig, which is private
        options = {"trace_only": True} if self._is_trace_only else {}
        experimental = need("torch._C._profiler._ExperimentalConfig")(**options)
        profile = torch_profiler.profile(use_cpu=True, use_kineto=True, experimental_config=experimental)
        return profile.config()  # type: ignore[no-untyped-call]

    def _patch(
        self, name: str, *, before: Callable[[], None] | None = None, after: Callable[[object], None] | None = None
    ) -> None:
        original = getattr(torch_profiler.profile, name)

        def watched(profile: object, *args: object, **kwargs: object) -> object:
            if before is not None:
                before()
            try:
                result: object = original(profile, *args, **kwargs)
                return result
            finally:
                if after is not None:
                    after(profile)

        setattr(torch_profiler.profile, name, watched)
        self._patched.append((name, watched, original))

    def _yield_to_foreign(self) -> None:
        self._is_foreign = True
        self.discard()

    def _foreign_ended(self, profile: object) -> None:
        self._is_foreign = False
        self.session_ended(profile)

    def session_ended(self, profile: object) -> None:
        """Handle the end of a `torch.autograd.profiler.profile` that is not ours; never raises.

        A record of the job that is open now would end in our next session, as it would in any other profiler's.
        """
        self._rest_steps = 1
        results = getattr(profile, "kineto_results", None)
        if self._is_barred or results is None:
            return
        try:
            self.bar_if_outlived(_rows_of(results))
        except Exception:  # noqa: BLE001  this runs where the job ends its own profiler
            self._is_barred = True
            _log.debug("a profiler's events cannot be read: no more windows", exc_info=True)


class _KinetoEventRow:
    """A row of torch < 2.13, which lacks `trace_activities()`: the same interface over a `_KinetoEvent`.

    Its thread number is torch's, not the system's, so the reader must take every thread and recognize communication by
    name alone.  `launched_by` maps correlation ids, which device rows refer to, to operators.
    """

    __slots__ = ("_event", "_is_on_device", "_launched_by")

    def __init__(self, event: Any, launched_by: Mapping[int, _KinetoEventRow]) -> None:  # noqa: ANN401  a C++ object
        self._event = event
        self._launched_by = launched_by
        self._is_on_device = event.device_type() != need("torch._C._autograd.DeviceType").CPU

    def name(self) -> str:
        return str(self._event.name())

    def type(self) -> str:
        name = self.name()
        if self._is_on_device:
            if getattr(self._event, "is_user_annotation", bool)():
                return "gpu_user_annotation"
            return (
                "gpu_memcpy" if name.startswith("Memcpy") else "gpu_memset" if name.startswith("Memset") else "kernel"
            )
        if getattr(self._event, "is_user_annotation", bool)() or "#" in name or name.startswith("gloo:"):
            return "user_annotation"
        return "cuda_runtime" if name.startswith(("cuda", "cu")) and "::" not in name else "cpu_op"

    def timestamp(self) -> int:
        return int(self._event.start_ns())

    def duration(self) -> int:
        return int(self._event.duration_ns())

    def resource_id(self) -> int:
        """Return the stream of a device row, the thread of any other row."""
        return int(self._event.device_resource_id() if self._is_on_device else self._event.start_thread_id())

    def linked_activity(self) -> _KinetoEventRow | None:
        return self._launched_by.get(self._event.linked_correlation_id())

    def metadata_json(self) -> str:
        if self.name() == METADATA_ROW:
            return str(getattr(self._event, "metadata_json", str)())
        # These rows do not show whether they are finished; the last one probably is not.
        return '"finished": false'

    def operator_id(self) -> int | None:
        """Return the correlation id of an operator; None for device rows and for calls that launch them."""
        if self._is_on_device or self._event.linked_correlation_id():
            return None
        return int(self._event.correlation_id())


def _rows_of(results: Any, *, on_device: bool = False) -> Sequence[Activity]:  # noqa: ANN401  as above
    if hasattr(results, "trace_activities"):
        rows: Sequence[Activity] = results.trace_activities()
        return rows
    launched_by: dict[int, _KinetoEventRow] = {}
    found = [_KinetoEventRow(event, launched_by) for event in results.events()]
    if on_device:  # a microsecond a row
        launched_by.update((operator, row) for row in found if (operator := row.operator_id()))
    return found
