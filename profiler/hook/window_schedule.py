"""Decides when an exact window opens around a step, and charges its price to the profiled step.

A window is opened between two steps, so its opening, ending and reading fall into steps that are not the profiled one.
The price of the opening is kept until the window ends; then the price of all three goes to the budget with the profiled
step's record.  The budget is asked twice: before and after the waiting records are written, because it does not know
what they cost before.

Price.  Opening, ending and reading are wall time less what other programs had of the processor meanwhile
(`preemption`).  The profiled step itself is slower, and on a busy machine its wall time does not say by how much: it
varies by a third anyway.  On a CPU job all that a window adds is work of the training thread.  So there the thread's
processor time in that step is compared with its mean since the last window or switch of a knob, to within a boundary.
Either way the price is at most what the rows in the window can have cost.

The first window is part of what the attach costs, unless the job is expected to end soon (`job_length`).  Before it
its price is predicted (`window_price`).  Where the upper bound of the price cannot be afforded, slices of the step are
taken at this rank's next turns (`row_density_probe`), and the window waits until the prediction from them is earned.  A
window whose step takes OTHER_STEP_RATIO times the usual was opened around another kind of step
than predicted: it is cut off when the training thread next enters a phase, and is then not used as a calibration.

While collectives may be under way on threads of their group, a session must not end (`session_pause`).  It is
paused where its step ends, and ends at the first boundary by which each of those threads has rested: the next one,
nearly always.
Until then the record of the profiled step waits, for at most HOLD_SECONDS_MAX.

Left out: whose turn it is and what may be spent (`overhead_budget`), and what a window sees (`window_reader`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pacecar.torch_internals import find

from ..timing.overhead_budget import OverheadBudget, ThreadTime
from ..timing.preemption import Preemption
from ..timing.step_timer import RawStep, StepTimer, time_step
from ..windows.row_density_probe import RowDensityProbe
from ..windows.session_pause import may_collectives_be_out
from ..windows.window_price import OTHER_NODES_RATIO, SLICE_PRICE_NS, Part, StepShape, WindowPrice
from ..windows.window_reader import WindowReader
from .loading.job_length import JobLength
from .phase_hooks import PhaseHooks
from .step_records import FinishedStep, StepRecords

__all__ = ["WindowSchedule"]

OTHER_STEP_RATIO = 2.0
"""A step that takes this many times the usual is not the predicted one; the profiler itself adds half a step."""

OTHER_STEP_NS = 5_000_000
"""The least excess for cutting a window off, which itself costs more than a shorter excess."""

COUNT_FACTOR = 2
"""A count of FLOPs is charged at most this many times its predicted cost: more means another kind of step, and is the
job's own time."""

SLOWED_ROW_NS = 3_000
SLOWED_ROW_DEVICE_NS = 10_000
"""The most that the operator of a row can be slowed with cold caches; ten times what it is in a loop."""

CHANGED_STEPS = 2
"""After so many steps with another value of a knob a step's operators and processor time are known."""

HOLD_SECONDS_MAX = 2.0
"""The longest that a record waits for collectives to end.  The window is then dropped, as soon as they have ended: a
job that gathers something in the background all the time is measured without windows."""

_log = logging.getLogger(__name__)


class WindowSchedule:
    """Opens windows as the budget allows, and passes their results to the step records; called at boundaries."""

    def __init__(
        self,
        meter: WindowReader,
        budget: OverheadBudget,
        step_records: StepRecords,
        timer: StepTimer,
        phases: PhaseHooks,
        now_ns: Callable[[], int],
        preemption: Preemption,
        job_length: JobLength,
        *,
        on_device: bool,
    ) -> None:
        self._meter = meter
        self._budget = budget
        self._step_records = step_records
        self._timer = timer
        self._phases = phases
        self._now_ns = now_ns
        self._preemption = preemption
        self._job_length = job_length
        self._on_device = on_device
        self._price = WindowPrice(on_device=on_device)
        self._probe = RowDensityProbe(meter, self._charge)
        self._sequence: Callable[[], int] | None = find("torch._C._autograd._get_sequence_nr")
        self._wanted: Part | None = None
        self._changed_at: int | None = None
        self._window_nodes: int | None = None
        self._price_ns = 0
        self._mark: tuple[int, int, int | None] | None = None
        self._usual_ns: int | None = None
        self._thread_ns = 0
        self._cut_because: str | None = None
        self._has_passed_step = False
        self._held: FinishedStep | None = None
        self._held_until_ns = 0
        self._has_told = False
        self.count_max_ns: int | None = None
        """The most that the last allowed count of FLOPs can cost; a window has a limit of its own (`end`)."""
        self.last_raw: RawStep | None = None
        """The last measured step."""
        self.may_be_open = False
        """Whether a window may be open; False: none is.  A window also closes by itself."""
        self.has_aftermath = False
        """Whether the step under way is disturbed by the end of a window, or by a trace."""

    @property
    def is_probing(self) -> bool:
        """Whether a slice is taken of the step under way."""
        return self._probe.is_armed

    def wants(self, step: int) -> bool:
        """Return whether a window, or a slice, is to be taken of `step`."""
        if not self._budget.windows:
            self._budget.may_be_early = not self._job_length.is_short(step, self._budget.usual_ns or 0)
        if self._changed_at is not None:
            return step >= self._changed_at + CHANGED_STEPS and self._budget.is_due(step)
        return self._budget.wants_window(step) or (self._wanted is not None and self._budget.is_due(step))

    def next_look(self, step: int) -> int:
        """Return the first step from `step` on of which a window or a slice may be taken."""
        if self._changed_at is not None:
            return self._budget.next_turn(max(step, self._changed_at + CHANGED_STEPS))
        return self._budget.next_look(step) if self._wanted is None else self._budget.next_turn(step)

    def awaits_first_window(self) -> bool:
        """Return whether the first window is open, can be paid for, or is not priced yet."""
        is_priced = self._step_records.window_price_ns is not None and self._wanted is None
        return not self._budget.windows and (self.may_be_open or not is_priced or self._budget.earned_in_ns == 0)

    def request(self, step: int, *, on_credit: bool) -> None:
        """Request a window soon: from `step` on a knob has another value.

        Where no window was taken yet, its price is predicted anew after CHANGED_STEPS: steps may be much smaller now.
        """
        self._budget.request(on_credit=on_credit)
        if not self._budget.has_prices:
            self.mark(step)
            self._changed_at = step

    def try_to_open(self, step: int) -> None:
        """Open a window for `step`, or continue the one that was opened a step earlier so that the device drains."""
        if not self._meter.is_open:
            self.may_be_open = False
            if not (self._budget.is_due(step) and self._meter.is_installed):
                return
            if not self.wants(step) and (self._step_records.is_fresh or self._changed_at is not None):
                return
            self._preemption.begin()
            self._step_records.settle()  # the budget needs what was spent so far
            self._preemption.end()
            self._predict(step)
            if not self._meter.may_open():
                if self._meter.is_taken:
                    self._step_records.uncalibrated = "profiler"
                return
            if self._step_records.uncalibrated == "profiler":
                self._step_records.uncalibrated = "warming_up"
            if not self._budget.wants_window(step):
                self._take_slice()
                return
            begun = self._now_ns()
            self._preemption.begin()
            self._meter.open()
            self.may_be_open = True
            self._cut_because = None
            self._price_ns = self._now_ns() - begun - self._preemption.end()
            self.slows(step)
            self._phases.tell_phases(self._entered)
        self._timer.keep_marks()

    @property
    def must_stop(self) -> bool:
        """Whether windows make all steps slower, have not been stopped for that yet, and nobody else profiles."""
        return self._budget.lasting_ratio is not None and self._meter.may_open()

    def stop(self) -> None:
        """Take no more windows: steps stay slower after them."""
        ratio, is_undone = self._budget.lasting_ratio or 0.0, self._meter.stop()
        _log.warning(
            "pacecar: steps are %.0f %% slower since the first profiled one, so it profiles no more of them; %s",
            100 * ratio,
            "CUPTI, which slows each launch, is detached"
            if is_undone
            else "CUPTI, which slows each launch, stays attached (from CUDA 12.6 on TEARDOWN_CUPTI=1 in the job's"
            " environment detaches it), and windows = false in [hook] does without from the start",
        )

    def mark(self, step: int) -> None:
        """Compare slowed steps with those from `step` on; called where `step` begins."""
        self._mark = (step, time.thread_time_ns(), None if self._sequence is None else self._sequence())

    def slows(self, step: int) -> None:
        """Note that pacecar slows the step that begins: it is profiled, or its FLOPs are counted."""
        mark, now_ns = self._mark, time.thread_time_ns()
        is_known = mark is not None and not self._on_device and step > mark[0]
        self._usual_ns = (now_ns - mark[1]) // (step - mark[0]) if is_known and mark is not None else None
        self._thread_ns = now_ns

    def thread_time(self) -> ThreadTime | None:
        """Return the processor time of the slowed step, once, where it ends; None: unknown."""
        usual_ns, self._usual_ns = self._usual_ns, None
        return None if usual_ns is None else ThreadTime(time.thread_time_ns() - self._thread_ns, usual_ns)

    def end(self, finished: FinishedStep) -> None:
        """Read the window of the step that is over; ending and reading it falls into the next step.

        Where threads of a process group may still write to the session, it is paused here and read a step later.
        """
        held, begun = self._held, self._now_ns()
        if held is None and self._cut_because is None and self._meter.must_be_cut() and self._meter.pause():
            self._cut("the job's own collectives were under way on the host", has_passed_step=False)
        is_gone = self._cut_because is not None or not self._meter.is_open
        if is_gone:
            self.release()
            self._end_cut(finished)
            return
        if held is not None and not self._meter.may_end():
            self._phases.tell_phases(self._look)
            self._price_ns += max(0, self._now_ns() - begun)
            if begun >= self._held_until_ns:
                self.release()
                self._cut(f"collectives were under way for {HOLD_SECONDS_MAX:g} s after its step", has_passed_step=True)
            return
        self._preemption.begin()
        if held is None:
            finished.thread_time = finished.thread_time or self.thread_time()
            finished.was_profiled = True
            finished.timed = self._step_records.time(finished)
            self._window_nodes = self._shape(finished.step + 1).nodes
        finished.disturbed = self.has_aftermath = True
        if held is None and not self._on_device and may_collectives_be_out() and self._meter.pause():
            self._phases.tell_phases(None if self._meter.may_end() else self._look)
            self._held, self._step_records.held_from = finished, finished.step
            self._held_until_ns = begun + int(HOLD_SECONDS_MAX * 1e9)
            self._price_ns += max(0, self._now_ns() - begun - self._preemption.end())
            return
        self._read(held or finished, finished)
        if not self._meter.is_open:
            self.may_be_open = False
            self._phases.tell_phases(None)
            told_by = self._told_by(held or finished, finished)
            told_by.price_ns = self._price_ns + max(0, self._now_ns() - begun - self._preemption.end())
            self._price_ns = 0
            self.mark(finished.step + 1)
            self.release()
        else:
            self._preemption.end()

    def _look(self, phase: str) -> None:
        """Look whether the threads of groups rest: at a boundary they may have new work each time; never raises."""
        begun = self._now_ns()
        if self._meter.may_end():
            self._phases.tell_phases(None)
        self._price_ns += self._now_ns() - begun
        self._charge(self._now_ns() - begun)

    def release(self) -> None:
        """Allow the record of a step to be written although its window is not read yet."""
        self._held = self._step_records.held_from = None

    def _read(self, profiled: FinishedStep, finished: FinishedStep) -> None:
        assert profiled.timed is not None, "noted when it ended"
        stops = [stop.stretch for stop in profiled.stops]
        measurement = self._meter.close(profiled.timed, stops)
        if not self._meter.is_installed:
            self._step_records.uncalibrated = "unavailable"  # too many told nothing
        told_by = self._told_by(profiled, finished)
        self._step_records.learn(profiled, profiled.timed, measurement, told_by=told_by)
        if not self._meter.is_open:
            rows, row_ns = self._meter.row_count, SLOWED_ROW_DEVICE_NS if self._on_device else SLOWED_ROW_NS
            profiled.slowed_max_ns = None if rows is None else rows * row_ns

    @staticmethod
    def _told_by(profiled: FinishedStep, finished: FinishedStep) -> FinishedStep:
        """Return the step whose record is not written yet: `profiled`, unless its record was asked for."""
        return profiled if profiled.record is None else finished

    def end_slice(self, finished: FinishedStep) -> None:
        """Learn from the slice of the step that is over."""
        self._phases.tell_phases(None)
        shape = self._shape(finished.step + 1)
        taken = self._probe.next_part()
        self._wanted = None
        finished.disturbed = self.has_aftermath = True
        if taken is None:
            return
        part, found, cost_ns = taken
        self._price.learn(part, found, shape.nodes)
        self._budget.probed(cost_ns)
        self._expect(shape)

    def may_count(self, step: int, price_ns: int | None) -> bool:
        """Return whether the FLOPs of `step` may be counted, which last cost `price_ns`; None: it is the first time."""
        is_first = price_ns is None
        if price_ns is None:
            price_ns = self._price.count_ns(self._shape(step))
        self.count_max_ns = COUNT_FACTOR * max(price_ns, OTHER_STEP_NS)
        return self._budget.can_afford(price_ns, on_credit=is_first)

    def abandon(self) -> None:
        """End a slice and restore torch's and python's state; an open window is not read."""
        self.release()
        self._probe.abandon()
        self._phases.tell_phases(None)

    def _charge(self, cost_ns: int) -> None:
        self._timer.overhead_ns += cost_ns

    def _shape(self, step: int) -> StepShape:
        """Return what is known of the steps before `step`, which begins."""
        mark, usual_ns = self._mark, self._budget.usual_ns or 0
        nodes, cpu_ns = None, usual_ns
        if mark is not None and step > mark[0]:
            if not self._on_device:
                cpu_ns = (time.thread_time_ns() - mark[1]) // (step - mark[0])
            if self._sequence is not None and mark[2] is not None:
                nodes = (self._sequence() - mark[2]) // (step - mark[0])
        if self.last_raw is None:
            return StepShape(cpu_ns, None, nodes)
        timed = time_step(self.last_raw)
        return StepShape(cpu_ns, timed.phases, nodes, timed.micro_batches, self._phases.parameter_count)

    def _predict(self, step: int) -> None:
        """Predict for the budget what a window of `step` will cost, where no window of such a step was taken."""
        self._wanted = self._changed_at = None
        if self._budget.is_unlimited:
            return
        shape = self._shape(step)
        if self._budget.has_prices:
            known = self._window_nodes
            if known is None or shape.nodes is None or shape.nodes <= OTHER_NODES_RATIO * max(1, known):
                return
            self._budget.forget_prices()
        self._expect(shape)

    def _expect(self, shape: StepShape) -> None:
        self._budget.expect(self._price.predict_ns(shape))
        self._step_records.uncalibrated, self._step_records.window_price_ns = "price", self._budget.predicted_ns
        if self._budget.earned_in_ns == 0:
            self._wanted = None
            return
        part = self._price.wanted_slice(shape)
        if part is not None and self._budget.can_afford(SLICE_PRICE_NS, on_credit=not self._budget.windows):
            self._wanted = part
        elif not self._has_told:
            self._has_told = True
            _log.info(
                "pacecar does not calibrate its ledger yet: an exact window would cost %.0f ms of a step, which"
                " overhead_budget has not earned",
                self._budget.predicted_ns / 1e6,
            )

    def _take_slice(self) -> None:
        if self._wanted is None or not self._probe.is_possible:
            self._wanted = None
            return
        self._probe.arm(self._wanted)
        self._phases.tell_phases(self._probe.entered)
        self.has_aftermath = True

    def _entered(self, phase: str) -> None:
        """Cut an open window off where its step turns out not to be the predicted one; never raises."""
        usual_ns = self._usual_ns
        if usual_ns is None or self._cut_because is not None or self._budget.is_unlimited or self._probe.is_in_backward:
            return
        if time.thread_time_ns() - self._thread_ns < OTHER_STEP_RATIO * usual_ns + OTHER_STEP_NS:
            return
        begun, thread_ns = self._now_ns(), time.thread_time_ns()
        try:
            if not may_collectives_be_out():
                self._meter.cut()
            elif not self._meter.pause():
                return
        except Exception:  # noqa: BLE001  inside the job's forward
            _log.debug("a window could not be cut off", exc_info=True)
        self._cut("its step was not like those before it", has_passed_step=False)
        self._price_ns += self._now_ns() - begun
        self._charge(self._now_ns() - begun)
        self._thread_ns += time.thread_time_ns() - thread_ns  # cutting is not a slow-down of the step

    def _cut(self, reason: str, *, has_passed_step: bool) -> None:
        """Note that the rows of the window are dropped, when it ends at a boundary; says whether its step is over."""
        self._cut_because, self._has_passed_step = reason, has_passed_step

    def _end_cut(self, finished: FinishedStep) -> None:
        self._phases.tell_phases(None)
        self.thread_time()  # dropped: the step itself was longer, not slowed
        begun = self._now_ns()
        if self._meter.is_open:  # paused
            if not self._has_passed_step:
                self._has_passed_step = finished.disturbed = self.has_aftermath = True
                return
            may_end = self._meter.may_end()
            if may_end:
                self._meter.cut()
            self._price_ns += self._now_ns() - begun
            if not may_end:
                return
        finished.disturbed = self.has_aftermath = True
        reason, self._cut_because, self.may_be_open = self._cut_because, None, False
        self._budget.probed(self._price_ns)
        self._price_ns = 0
        self.mark(finished.step + 1)
        if reason is not None:
            _log.info("an exact window was cut off: %s", reason)
