"""Turns a profiled step into an exact ledger: opens a window, closes it, reads its rows and attributes them.

This is the one place where host time (monotonic) and trace time (kineto's nanoseconds since the epoch) meet.  The
offset between them is taken when the window opens and again when it closes.  When the two differ by more than
CLOCK_STEP_NS_MAX, the wall clock was set in between, and the window is discarded rather than attributed to the wrong
instants.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import structs

from pacecar.clock import Clock
from pacecar.records import BackwardWindow, CollectiveSum, Ledger

from ..ledger.attribution import REST, LossCause, attribute_phases
from ..ledger.intervals import EMPTY, Intervals, intervals, subtract, union
from ..timing.step_timer import PHASES, Stretch, TimedStep
from .collective_stats import backward_window, sum_collectives
from .device_phases import passed_stretches
from .kineto_window import WindowProfiler, WindowUnavailable
from .session_pause import without_sessions
from .trace_spans import SKEW_NS_MAX, Activity, TraceSpans, read_rows

__all__ = ["Measurement", "WindowReader"]

CLOCK_STEP_NS_MAX = 1_000_000
"""Slewing moves the clock by 0.5 ms a second at most; a step moves it at once."""

READING_NS_MAX = 20_000
"""A reading of both clocks takes less, unless another program has the processor meanwhile: an error of a millisecond
would leave nothing of a step as short."""

READINGS_MAX = 5
"""Whoever has the processor taken from him so often in a row has no better clock."""

FUNCTIONAL_COLLECTIVES = "torch.distributed._functional_collectives"
"""Whoever communicates inside an operator has loaded this module: a DTensor, or an asynchronous tensor that is waited
for when it is used.  `torch.distributed` and DDP alone do not load it."""

BLIND_WINDOWS_MAX = 3
"""So many windows in a row that told nothing are enough: they cost as much as others."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Measurement:
    """The exact ledger of one step and of each of its phases, `overhead` left out of the latter."""

    ledger: Ledger
    phases: Mapping[str, Ledger]
    row_count: int
    collectives: tuple[CollectiveSum, ...] = ()
    on_device: Mapping[str, Ledger] | None = None
    """The ledger of each phase as the device ran it; None for a CPU job and where the rows do not tell."""
    backward: BackwardWindow | None = None
    """The last backward and its all-reduces, on the device where there is one; None where the rows do not tell."""


class WindowReader:
    """Takes exact windows; every call comes from the training thread.

    `is_held` says whether somebody else is about to profile the job, so that no window may open.
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
        self._observed_from_ns: int | None = None
        self.row_count: int | None = None
        """Rows of the window that was closed last; None where it was cut off."""
        self._is_held = is_held

    @property
    def is_open(self) -> bool:
        """Whether a window is under way."""
        return self._profiler.is_open

    @property
    def is_settled(self) -> bool:
        """Whether no window is open, and none was closed at this boundary."""
        return self._profiler.is_settled

    def let_pass(self) -> None:
        """Note that a boundary passed while something waits for `is_settled`."""
        self._profiler.step_passed()

    def session_ended(self, profile: object) -> None:
        """Note that a `torch.autograd.profiler.profile` has ended; an installed profiler notices that by itself."""
        if not self._is_installed:
            self._profiler.session_ended(profile)

    @property
    def is_installed(self) -> bool:
        """Whether windows are possible: with this torch, and until too many were useless."""
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
        """Make windows possible, and take an empty one first, because the first costs much more than the others."""
        try:
            self._profiler.install()
        except WindowUnavailable as reason:
            _log.warning("pacecar estimates only: %s", reason)
            return
        self._is_installed = True
        if self._profiler.may_open():
            with without_sessions():  # kineto starts a thread of its own, which looks for a configuration for ever
                self._profiler.open()
            self._profiler.close()

    def uninstall(self) -> None:
        """Discard an open window and undo the patches of torch."""
        self._is_installed = False
        self._profiler.uninstall()

    def stop(self) -> bool:
        """Take no more windows, and undo what they do to the steps after them; False: that cannot be undone here."""
        self._is_installed = False
        with without_sessions():
            return self._profiler.detach()

    def may_open(self) -> bool:
        """Return whether a window can open: this torch has them, and no other profiler is on."""
        return self._is_installed and not self._is_held() and self._profiler.may_open()

    @property
    def is_taken(self) -> bool:
        """Whether another profiler than pacecar's is on."""
        return self._is_installed and self._profiler.is_taken

    def open(self) -> None:
        """Open a window over the step that begins."""
        self._warm_steps_left = 1 if self._on_device else 0
        self._warm_step = None
        self._observed_from_ns = None
        self._offset_ns = self._clock_offset_ns()
        self._profiler.open()

    def open_slice(self) -> None:
        """Open a session within a step, to count its rows only; `may_open()` holds."""
        self._observed_from_ns = None
        self._profiler.open(is_plain=True)

    def close_slice(self) -> int | None:
        """Return how many rows the session saw; None: another profiler has ended it."""
        if not self._profiler.is_open:
            return None
        return len(self._profiler.close()[0])

    def cut(self) -> None:
        """End an open window within its step and drop its rows."""
        self.row_count = None
        self._profiler.discard()

    def observed_from(self, now_ns: int) -> None:
        """Note the end of a boundary: from here on an open window sees everything."""
        self._profiler.step_passed()
        if self._profiler.is_open and self._observed_from_ns is None:
            self._observed_from_ns = now_ns

    def pause(self) -> bool:
        """Stop recording without ending the session, which is closed when `may_end`; False: close it now."""
        return self._profiler.pause()

    def may_end(self) -> bool:
        """Return whether a paused window may be closed or cut: no thread of a process group can write to it."""
        return self._profiler.may_end()

    def must_be_cut(self) -> bool:
        """Return whether closing a device's window now could crash the job; what it saw a step later is not its step's.

        A device job's own collectives are the device's, but a script may use gloo beside them.
        """
        return self._on_device and not self._warm_steps_left and self._profiler.are_collectives_under_way()

    def close(self, step: TimedStep, stops: Sequence[Stretch] = ()) -> Measurement | None:
        """Close the window at the end of `step`, or of one after it, and return what it saw of `step`.

        In `stops` the process did not run.

        None: the step only warmed the window, which stays open; or the clock was set; or the window was blind (see
        `why_blind` and `why_blind_on_host`) and not the device or the process idle.
        """
        if self._warm_steps_left:
            self._warm_steps_left -= 1
            self._warm_step = None if stops else step
            return None
        found, names_threads = self._profiler.close()
        self.row_count = len(found)
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
            _log.info("a window is thrown away: the wall clock was set while it was open")
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
        if self._is_blind(why):
            return None
        observed = (step.start_ns if self._observed_from_ns is None else self._observed_from_ns) + offset
        stopped = union(intervals(stops) + offset)
        # An operator that was under way has a row over all of the stop; what a device does meanwhile is work.
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
        if len(backwards) and not len(stopped):  # with a stop the collectives' times say nothing of a link
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
        """Return when the device passed the phases of `step`, and what filled them; None where the rows do not tell."""
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
            _log.info("a window is thrown away: %s", why)
        if self._blind_windows == BLIND_WINDOWS_MAX:
            self._is_installed = False
            _log.warning("pacecar takes no more windows, the last %d told nothing: %s", BLIND_WINDOWS_MAX, why)
        return why is not None

    def _clock_offset_ns(self) -> int:
        """Return wall minus monotonic time, by the closest of some readings: the processor may be taken amid one."""
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

    Kineto drops rows at the head of a session, the more the longer the process lives, as it compares the device's
    clock with the host's (pytorch issue 192021).  It does so silently, but the rows show it: a device that was busy
    through the step before has rows before this one began, and nothing begins before its launch.
    """
    if reading.first_device_ns is None:
        return "the profiler saw nothing on the device"
    if reading.skew_ns > SKEW_NS_MAX:
        return f"kernels begin {reading.skew_ns / 1e6:.1f} ms before they are launched: the device's clock is off"
    if reading.first_device_ns > start_ns:
        return "the kernels of its head are lost"
    return None


def why_blind_on_host(reading: TraceSpans, backwards: Intervals, row_count: int) -> str | None:
    """Return why `reading`, of `row_count` rows, tells nothing of a step of a CPU job; None: it does.

    Such a window would call the step idle.  A step may run no operator in truth, as that of a stand-in for a model.
    But then there is the record of its `Optimizer.step`, and the hooks saw no backward: in each of `backwards` (on the
    trace's clock) autograd has a row for each node.
    """
    if not row_count:
        return "the profiler recorded nothing at all"
    begun, ended = reading.operators.T
    if len(backwards) and not any(((begun < end) & (ended > start)).any() for start, end in backwards):
        return "the profiler recorded no operator of its backward"
    return None
