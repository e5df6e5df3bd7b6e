"""Turns a profiled step into an exact ledger: opens a window, closes it, reads its rows and attributes them.

This is the only place where host time (monotonic) and trace time (Kineto's nanoseconds since the epoch) meet.  Their
offset is measured when the window opens and when it closes.  If the two differ by more than CLOCK_STEP_NS_MAX, the wall
clock was set in between, and the window is discarded rather than attributed to the wrong times.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from pacecar.clock import Clock
from pacecar.ledger.attribution import REST, SKEW_NS_MAX, LossCause, attribute_phases
from pacecar.ledger.intervals import EMPTY, Intervals, intervals, subtract, union
from pacecar.records import BackwardWindow, CollectiveSum, Ledger

from ..timing.step_timer import PHASES, Stretch, TimedStep
from .collective_stats import backward_window, sum_collectives
from .device_phases import passed_stretches
from .kineto_window import WindowProfiler, WindowUnavailable
from .session_pause import without_sessions
from .trace_spans import Activity, TraceSpans, read_rows

__all__ = ["Measurement", "WindowReader"]

CLOCK_STEP_NS_MAX = 1_000_000
"""Slewing moves the clock by at most 0.5 ms per second; setting it moves it at once."""

READING_NS_MAX = 20_000
"""Reading both clocks takes less than this unless another program takes the processor; an error of a millisecond would
leave nothing of a step that short."""

READINGS_MAX = 5
"""The most readings: a thread that loses the processor this often in a row cannot read its clocks any better."""

FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""Communication inside an operator (a DTensor, or an asynchronous tensor that is awaited on use) needs this module;
`torch.distributed` and DDP alone do not load it."""

BLIND_WINDOWS_MAX = 3
"""Windows stop after this many useless ones in a row, which cost as much as useful ones."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The exact ledger of one step and of each of its phases; the latter exclude `overhead`."""

    ledger: Ledger
    phases: Mapping[str, Ledger]
    row_count: int
    collectives: tuple[CollectiveSum, ...] = ()
    on_device: Mapping[str, Ledger] | None = None
    """The ledger of each phase as the device ran it; None for a CPU job or if the rows do not show it."""
    backward: BackwardWindow | None = None
    """The last backward and its all-reduces, on the device if there is one; None if the rows do not show it."""


class WindowReader:
    """Takes exact windows; all calls come from the training thread.

    `is_held` returns whether no window may open because something else is about to profile the job.
    """

    def __init__(
        self,
        clock: Clock,
        *,
        on_device: bool,
        is_held: Callable[[], bool] = lambda: False,
        profiler: WindowProfiler | None = None,
    ) -> None:
        self._clock = clock
        self._on_device = on_device
        self._profiler = profiler or WindowProfiler(on_device=on_device)
        self._is_installed = False
        self._blind_windows = 0
        self._offset_ns = 0
        self._warm_steps_left = 0
        self._warm_step: TimedStep | None = None
        self._is_behind = False
        """Whether the device was still running work from before the window when the window was warm."""
        self._observed_from_ns: int | None = None
        self.row_count: int | None = None
        """The number of rows of the last closed window; None if it was cut off."""
        self.ended_ns = 0
        """When that window ended, monotonic; 0: there was none."""
        self.ending_row_ns = 0
        """The processor time that ending it took by row."""
        self._is_held = is_held

    @property
    def is_open(self) -> bool:
        """Whether a window is open."""
        return self._profiler.is_open

    @property
    def is_settled(self) -> bool:
        """Whether no window is open, and none was closed at this boundary."""
        return self._profiler.is_settled

    def let_pass(self) -> None:
        """Record that a boundary passed while something waits for `is_settled`."""
        self._profiler.step_passed()

    def session_ended(self, profile: object) -> None:
        """Record that a `torch.autograd.profiler.profile` has ended; an installed profiler notices by itself."""
        if not self._is_installed:
            self._profiler.session_ended(profile)

    @property
    def is_installed(self) -> bool:
        """Whether windows are possible: this torch supports them and not too many were useless."""
        return self._is_installed

    @property
    def can_be_sliced(self) -> bool:
        """Whether slices are possible with this torch."""
        return self._profiler.can_be_plain

    @property
    def outlived_by(self) -> str | None:
        """The record that was open when a window was closed, if there was one."""
        return self._profiler.outlived_by

    def install(self) -> None:
        """Make windows possible and take an empty one now, because the first costs much more than the others."""
        try:
            self._profiler.install()
        except WindowUnavailable as reason:
            _log.warning("pacecar takes no exact windows, only estimates: %s", reason)
            return
        self._is_installed = True
        if self._profiler.may_open():
            with without_sessions():  # Kineto starts a thread that polls for a configuration forever
                self._profiler.open()
            self._profiler.close()

    def uninstall(self) -> None:
        """Discard an open window and undo the patches of torch."""
        self._is_installed = False
        self._profiler.uninstall()

    def stop(self) -> bool:
        """Take no more windows and undo their effect on later steps; False: it cannot be undone here."""
        self._is_installed = False
        with without_sessions():
            return self._profiler.detach()

    def may_open(self) -> bool:
        """Return whether a window can open: this torch supports windows, and no other profiler is on."""
        return self._is_installed and not self._is_held() and self._profiler.may_open()

    @property
    def is_taken(self) -> bool:
        """Whether another profiler than pacecar's is on."""
        return self._is_installed and self._profiler.is_taken

    def open(self) -> None:
        """Open a window over the beginning step."""
        self._warm_steps_left = 1 if self._on_device else 0
        self._warm_step = None
        self._is_behind = False
        self._observed_from_ns = None
        self._offset_ns = self._clock_offset_ns()
        self._profiler.open()

    def open_recording(self) -> None:
        """Open a session over several steps, to be written to a file; requires `may_open()`."""
        self._observed_from_ns = None
        self._profiler.open()

    def pause_recording(self) -> bool:
        """Stop recording after the last step; return whether the session may end."""
        return not self._profiler.pause() or self._profiler.may_end()

    def may_end_recording(self) -> bool:
        """Return whether a paused recording may end, because no process group's thread writes to it any more."""
        return self._profiler.may_end()

    def close_recording(self, path: str) -> int:
        """End the session and write it to `path`; return the number of its rows.

        Raises:
            WindowUnavailable: the training loop moved to another thread, where a session cannot be ended.
        """
        return len(self._profiler.close(path)[0])

    def discard_recording(self) -> None:
        """End the session, if there is one, and drop its rows."""
        self._profiler.discard()

    def open_slice(self) -> None:
        """Open a session within a step, only to count its rows; requires `may_open()`."""
        self._observed_from_ns = None
        self._profiler.open(is_plain=True)

    def close_slice(self) -> int | None:
        """Return the number of rows in the session; None: another profiler has ended it."""
        if not self._profiler.is_open:
            return None
        return len(self._profiler.close()[0])

    def cut(self) -> None:
        """End an open window within its step and drop its rows."""
        self.row_count = None
        self._profiler.discard()

    def observed_from(self, now_ns: int) -> None:
        """Record the end of a boundary: from now on an open window sees everything."""
        self._profiler.step_passed()
        if self._profiler.is_open and self._observed_from_ns is None:
            self._observed_from_ns = now_ns

    def pause(self) -> bool:
        """Stop recording without ending the session, which closes when `may_end`; False: close it now."""
        return self._profiler.pause()

    def may_end(self) -> bool:
        """Return whether a paused window may be closed or cut because no process group's thread can write to it."""
        return self._profiler.may_end()

    def must_be_cut(self) -> bool:
        """Return whether closing a device job's window now could crash the job; a step later its rows are too late.

        A device job's collectives run on the device, but a script may also use gloo.
        """
        return self._on_device and not self._warm_steps_left and self._profiler.are_collectives_under_way()

    def close(
        self, step: TimedStep, stops: Sequence[Stretch] = (), *, has_begun: bool | None = None
    ) -> Measurement | None:
        """Close the window at the end of `step`, or of a later one, and return what it saw of `step`.

        The process did not run during `stops`.  `has_begun` says whether the device has reached the beginning of
        `step`.  If it has not when the window is warm, the device spends the next step on kernels that were launched
        before the session and have no rows, whatever rows copies on another stream have.

        Return None if the step only warmed the window, which stays open; if the clock was set; or if the window was
        blind (see `why_blind` and `why_blind_on_host`), rather than the device or the process idle.
        """
        if self._warm_steps_left:
            self._warm_steps_left -= 1
            self._warm_step = None if stops else step
            self._is_behind = has_begun is False
            return None
        begun_ns = time.thread_time_ns()
        found, names_threads = self._profiler.close()
        self.row_count, self.ended_ns = len(found), self._clock.monotonic_ns()
        self.ending_row_ns = (time.thread_time_ns() - begun_ns) // max(1, len(found))
        try:
            return self._read(step, found, stops, names_threads=names_threads)
        except BaseException:
            self._profiler.bar_if_outlived(found)
            raise

    def _read(
        self, step: TimedStep, found: Sequence[Activity], stops: Sequence[Stretch], *, names_threads: bool
    ) -> Measurement | None:
        offset = self._offset_ns
        if abs(self._clock_offset_ns() - offset) > CLOCK_STEP_NS_MAX:
            _log.info("an exact window is discarded: the wall clock was set while it was open")
            self._profiler.bar_if_outlived(found)
            return None
        stretches = _stretches(step, offset)
        thread = threading.get_native_id() if names_threads else None
        tails = stretches["backward_tail"]
        reading = read_rows(
            found,
            training_thread=thread,
            on_device=self._on_device,
            data_wait=union(stretches["data_wait"]),
            backward_end_ns=int(tails[:, 1].max()) if len(tails) else None,
            may_communicate_inside=not self._on_device and FUNCTIONAL_COLLECTIVES in sys.modules,
        )
        self._profiler.bar_if_outlived(reading.annotations)
        start, end = step.start_ns + offset, step.end_ns + offset
        why = (
            why_blind(reading, start)
            if self._on_device
            else why_blind_on_host(reading, stretches["backward"], len(found))
        )
        if self._is_blind("the device is more than a step behind" if self._is_behind else why):
            return None
        observed = (step.start_ns if self._observed_from_ns is None else self._observed_from_ns) + offset
        stopped = union(intervals(stops) + offset)
        # A running operator has a row over all of the stop; what a device does in the meantime is work.
        work = reading.work if self._on_device else {k: subtract(union(v), stopped) for k, v in reading.work.items()}
        causes = {LossCause.STOPPED: stopped, **self._causes(stretches, reading)}
        phases = attribute_phases(
            work, (start, end), stretches, causes=causes, observed=(min(max(observed, start), end), end)
        )
        total = Ledger(wall_ns=0)
        for ledger in phases.values():
            total = total + ledger
        total = structs.replace(total, loop_host_ns=phases[REST].host_bound_ns)
        phases.pop("overhead")
        passed, on_device = self._on_device_of(step, reading)
        passed_until = end
        if passed is None and self._warm_step is not None:
            passed, on_device = self._on_device_of(self._warm_step, reading)
            passed_until = end if passed is None else passed[1][1]
        ran = stretches if not self._on_device else {} if passed is None else passed[0]
        backwards = ran.get("backward", EMPTY)
        backward = None
        if len(backwards) and not len(stopped):  # with a stop the collectives' times do not reflect the link
            first, last = (int(instant) for instant in backwards[backwards[:, 0].argmax()])
            rows, until = (
                reading.collectives,
                passed_until if self._on_device else max(last, int(tails.max(initial=last))),
            )
            backward = backward_window(rows, (first, last), until, on_device=self._on_device)
        return Measurement(
            ledger=total,
            phases=phases,
            row_count=len(found),
            collectives=() if len(stopped) else sum_collectives(reading.collectives, (start, end)),
            on_device=on_device,
            backward=backward,
        )

    def _causes(self, stretches: Mapping[str, Intervals], reading: TraceSpans) -> dict[LossCause, Intervals]:
        return {
            LossCause.DATA_WAIT: np.concatenate((stretches["data_wait"], reading.data_wait)),
            LossCause.CHECKPOINT: stretches["checkpoint"],
            LossCause.OPTIMIZER: stretches["optimizer"],
            LossCause.HOOK: EMPTY if self._on_device else stretches["overhead"],
        }

    def _on_device_of(
        self, step: TimedStep, reading: TraceSpans
    ) -> tuple[tuple[dict[str, Intervals], tuple[int, int]] | None, dict[str, Ledger] | None]:
        """Return when the device passed the phases of `step` and what filled them; None if the rows do not show it."""
        stretches, offset = _stretches(step, self._offset_ns), self._offset_ns
        window = (step.start_ns + offset, step.end_ns + offset)
        passed = passed_stretches(stretches, window, reading.launches, reading.device_rows, reading.launch_calls)
        if passed is None:
            return None, None
        ledgers = attribute_phases(reading.work, passed[1], passed[0], causes=self._causes(stretches, reading))
        ledgers.pop("overhead")
        return passed, ledgers

    def _is_blind(self, why: str | None) -> bool:
        self._blind_windows = 0 if why is None else self._blind_windows + 1
        if why is not None:
            _log.info("an exact window is discarded: %s", why)
        if self._blind_windows == BLIND_WINDOWS_MAX:
            self._is_installed = False
            _log.warning("pacecar takes no more windows because the last %d were useless: %s", BLIND_WINDOWS_MAX, why)
        return why is not None

    def _clock_offset_ns(self) -> int:
        """Return wall minus monotonic time from the closest of several readings, as one may be interrupted."""
        closest: tuple[int, int] | None = None
        for _ in range(READINGS_MAX):
            before = self._clock.monotonic_ns()
            wall = self._clock.wall_ns()
            gap = self._clock.monotonic_ns() - before
            if closest is None or gap < closest[0]:
                closest = gap, wall - before - gap // 2
            if gap <= READING_NS_MAX:
                break
        assert closest is not None, "READINGS_MAX is more than none"
        return closest[1]


def _stretches(step: TimedStep, offset_ns: int) -> dict[str, Intervals]:
    return {name: intervals(step.marks.get(name, ())) + offset_ns for name in PHASES}


def why_blind(reading: TraceSpans, start_ns: int) -> str | None:
    """Return why `reading` of a device job is useless for the step that began at `start_ns`; None: it is not.

    Kineto silently drops rows at the head of a session, more of them the longer the process lives, because of how it
    compares the device's clock with the host's (pytorch issue 192021).  The rows show it: a device that was busy
    through the previous step has rows from before this one, and nothing begins before its launch.
    """
    if reading.first_device_ns is None:
        return "the profiler saw nothing on the device"
    if reading.skew_ns > SKEW_NS_MAX:
        return f"kernels begin {reading.skew_ns / 1e6:.1f} ms before their launch: the device's clock is off"
    if reading.first_device_ns > start_ns:
        return "the kernels at its beginning are missing"
    return None


def why_blind_on_host(reading: TraceSpans, backwards: Intervals, row_count: int) -> str | None:
    """Return why `reading`, of `row_count` rows, is useless for a step of a CPU job; None: it is not.

    Such a window would call the step idle.  A step may really run no operators, as with a stand-in for a model.  But
    then there is the record of its `Optimizer.step`, and the hooks saw no backward: in each of `backwards` (on the
    trace's clock) autograd has a row for each node.
    """
    if not row_count:
        return "the profiler recorded nothing at all"
    begun, ended = reading.operators.T
    if len(backwards) and not any(((begun < end) & (ended > start)).any() for start, end in backwards):
        return "the profiler recorded no operator of its backward"
    return None
