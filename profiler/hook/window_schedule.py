"""Decides when an exact window opens around a step, and charges its price to the profiled step.

A window opens between two steps, so opening, ending and reading it fall into other steps than the profiled one.  The
price of opening is kept until the window ends; then the price of all three goes to the budget with the profiled step's
record.  The budget is asked before and after the waiting records are written, because writing them has a cost too.

Price.  Opening, ending and reading cost wall time, less what other programs took of the processor meanwhile
(`preemption`).  The profiled step itself is slower, but on a busy machine its wall time varies by a third anyway and
does not show by how much.  On a CPU job everything that a window adds is work of the training thread, so the thread's
processor time in that step is compared with its mean since the last window or knob switch, to within a boundary.  In
either case the price is capped at what the rows in the window can have cost.

The first window is part of the cost of attaching, unless the job is expected to end soon (`loading`).  Its price is
predicted beforehand (`window_price`).  If the upper bound of the price is not affordable, slices of the step are taken
at this rank's next turns (`row_density_probe`), and the window waits until the price predicted from them is earned.  A
step that takes OTHER_STEP_RATIO times the usual is another kind of step than predicted: its window is cut off when the
training thread next enters a phase, and does not calibrate.

A session must not end while collectives may be running on threads of their process group (`session_pause`).  It is
paused when its step ends and ends at the first boundary by which each of those threads has been idle, nearly always the
next one.  Until then the profiled step's record waits, for at most HOLD_SECONDS_MAX.

`overhead_budget` decides whose turn it is and what may be spent; `window_reader` decides what a window sees.
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
from .loading import JobLength
from .phase_hooks import PhaseHooks
from .step_records import FinishedStep, StepRecords

__all__ = ["WindowSchedule"]

OTHER_STEP_RATIO = 2.0
"""A step this many times longer than usual is not the predicted one; the profiler itself adds half a step."""

OTHER_STEP_NS = 5_000_000
"""A window is cut off only for an excess of at least this, because cutting it off has a cost as well."""

COUNT_FACTOR = 2
"""A FLOP count is charged at most this many times its predicted cost: anything more is the job's own time in another
kind of step."""

SLOWED_ROW_NS = 3_000
SLOWED_ROW_DEVICE_NS = 10_000
"""The most that profiling slows the operator of a row when caches are cold; ten times the figure in a loop."""

CHANGED_STEPS = 2
"""A step's operators and processor time are known this many steps after a knob changes."""

HOLD_SECONDS_MAX = 2.0
"""The longest a record waits for collectives to end.  Later the window is dropped as soon as they have ended: a job
that gathers something in the background all the time is measured without windows."""

_log = logging.getLogger(__name__)


class WindowSchedule:
    """Opens windows as the budget allows, and passes their results to the step records; called at boundaries."""

    def __init__(
        self,
        reader: WindowReader,
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
        self._reader = reader
        self._budget = budget
        self._step_records = step_records
        self._timer = timer
        self._phases = phases
        self._now_ns = now_ns
        self._preemption = preemption
        self._job_length = job_length
        self._on_device = on_device
        self._price = WindowPrice(on_device=on_device)
        self._probe = RowDensityProbe(reader, self._charge)
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
        self._has_logged = False
        self.count_max_ns: int | None = None
        """The most that the last allowed FLOP count can cost; a window has its own limit (`end`)."""
        self.last_raw: RawStep | None = None
        """The last measured step."""
        self.may_be_open = False
        """Whether a window may be open; if False, none is.  A window can also close by itself."""
        self.has_aftermath = False
        """Whether the end of a window or a trace disturbs the current step."""

    @property
    def is_probing(self) -> bool:
        """Whether a slice of the current step is being taken."""
        return self._probe.is_armed

    def wants(self, step: int) -> bool:
        """Return whether to take a window or a slice of `step`."""
        if not self._budget.windows:
            self._budget.may_be_early = not self._job_length.is_short(step, self._budget.usual_ns or 0)
        if self._changed_at is not None:
            return step >= self._changed_at + CHANGED_STEPS and self._budget.is_due(step)
        return self._budget.wants_window(step) or (self._wanted is not None and self._budget.is_due(step))

    def next_look(self, step: int) -> int:
        """Return the first step, from `step` on, that may get a window or a slice."""
        if self._changed_at is not None:
            return self._budget.next_turn(max(step, self._changed_at + CHANGED_STEPS))
        return self._budget.next_look(step) if self._wanted is None else self._budget.next_turn(step)

    def awaits_first_window(self) -> bool:
        """Return whether the first window is open, affordable or not priced yet."""
        is_priced = self._step_records.window_price_ns is not None and self._wanted is None
        return not self._budget.windows and (self.may_be_open or not is_priced or self._budget.earned_in_ns == 0)

    def request(self, step: int, *, on_credit: bool) -> None:
        """Request a window soon because a knob has another value from `step` on.

        If there was no window yet, its price is predicted again after CHANGED_STEPS: steps may be much smaller now.
        """
        self._budget.request(on_credit=on_credit)
        if not self._budget.has_prices:
            self.mark(step)
            self._changed_at = step

    def try_to_open(self, step: int) -> None:
        """Open a window for `step`, or continue the one that was opened a step earlier so that the device drains."""
        if not self._reader.is_open:
            self.may_be_open = False
            if not (self._budget.is_due(step) and self._reader.is_installed):
                return
            if not self.wants(step) and (self._step_records.is_fresh or self._changed_at is not None):
                return
            self._preemption.begin()
            self._step_records.flush()  # the budget needs the costs so far
            self._preemption.end()
            self._predict(step)
            if not self._reader.may_open():
                if self._reader.is_taken:
                    self._step_records.uncalibrated = "profiler"
                return
            if self._step_records.uncalibrated == "profiler":
                self._step_records.uncalibrated = "warming_up"
            if not self._budget.wants_window(step):
                self._take_slice()
                return
            begun = self._now_ns()
            self._preemption.begin()
            self._reader.open()
            self.may_be_open = True
            self._cut_because = None
            self._price_ns = self._now_ns() - begun - self._preemption.end()
            self.slows(step)
            self._phases.tell_phases(self._entered)
        self._timer.keep_marks()

    @property
    def must_stop(self) -> bool:
        """Whether windows slow all steps down, are not stopped yet, and no other profiler is running."""
        return self._budget.lasting_ratio is not None and self._reader.may_open()

    def stop(self) -> None:
        """Take no more windows because steps stay slower after them."""
        ratio, is_undone = self._budget.lasting_ratio or 0.0, self._reader.stop()
        _log.warning(
            "pacecar: steps are %.0f %% slower since the first profiled one, so no more steps are profiled; %s",
            100 * ratio,
            "CUPTI, which slows every kernel launch, is detached"
            if is_undone
            else "CUPTI, which slows every kernel launch, stays attached (with CUDA 12.6 or later, set TEARDOWN_CUPTI=1"
            " in the job's environment to detach it); set windows = false in [hook] to never profile",
        )

    def mark(self, step: int) -> None:
        """Compare slowed steps with those from `step` on; call when `step` begins."""
        self._mark = (step, time.thread_time_ns(), None if self._sequence is None else self._sequence())

    def slows(self, step: int) -> None:
        """Record that pacecar slows the beginning step by profiling it or counting its FLOPs."""
        mark, now_ns = self._mark, time.thread_time_ns()
        is_known = mark is not None and not self._on_device and step > mark[0]
        self._usual_ns = (now_ns - mark[1]) // (step - mark[0]) if is_known and mark is not None else None
        self._thread_ns = now_ns

    def thread_time(self) -> ThreadTime | None:
        """Return the processor time of the slowed step, once, when it ends; None: unknown."""
        usual_ns, self._usual_ns = self._usual_ns, None
        return None if usual_ns is None else ThreadTime(time.thread_time_ns() - self._thread_ns, usual_ns)

    def end(self, finished: FinishedStep) -> None:
        """Read the window of the finished step; ending and reading it falls into the next step.

        If threads of a process group may still write to the session, pause it here and read it a step later.
        """
        held, begun = self._held, self._now_ns()
        if held is None and self._cut_because is None and self._reader.must_be_cut() and self._reader.pause():
            self._cut("the job's own collectives were under way on the host", has_passed_step=False)
        is_gone = self._cut_because is not None or not self._reader.is_open
        if is_gone:
            self.release()
            self._end_cut(finished)
            return
        if held is not None and not self._reader.may_end():
            self._phases.tell_phases(self._check_collectives)
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
        if held is None and not self._on_device and may_collectives_be_out() and self._reader.pause():
            self._phases.tell_phases(None if self._reader.may_end() else self._check_collectives)
            self._held, self._step_records.held_from = finished, finished.step
            self._held_until_ns = begun + int(HOLD_SECONDS_MAX * 1e9)
            self._price_ns += max(0, self._now_ns() - begun - self._preemption.end())
            return
        self._read(held or finished, finished)
        if not self._reader.is_open:
            self.may_be_open = False
            self._phases.tell_phases(None)
            sent_with = self._sent_with(held or finished, finished)
            sent_with.price_ns = self._price_ns + max(0, self._now_ns() - begun - self._preemption.end())
            self._price_ns = 0
            self.mark(finished.step + 1)
            self.release()
        else:
            self._preemption.end()

    def _check_collectives(self, phase: str) -> None:
        """Check whether the process groups' threads are idle; they may get new work at any boundary.  Never raises."""
        begun = self._now_ns()
        if self._reader.may_end():
            self._phases.tell_phases(None)
        self._price_ns += self._now_ns() - begun
        self._charge(self._now_ns() - begun)

    def release(self) -> None:
        """Allow a step's record to be written although its window is not read yet."""
        self._held = self._step_records.held_from = None

    def _read(self, profiled: FinishedStep, finished: FinishedStep) -> None:
        assert profiled.timed is not None, "noted when it ended"
        stops = [stop.stretch for stop in profiled.stops]
        device, marks = self._timer.device, profiled.raw.device
        has_begun = None if device is None or marks is None else device.has_begun(marks)
        measurement = self._reader.close(profiled.timed, stops, has_begun=has_begun)
        if not self._reader.is_installed:
            self._step_records.uncalibrated = "unavailable"  # too many windows showed nothing
        sent_with = self._sent_with(profiled, finished)
        self._step_records.learn(profiled, profiled.timed, measurement, sent_with=sent_with)
        if not self._reader.is_open:
            rows, row_ns = self._reader.row_count, SLOWED_ROW_DEVICE_NS if self._on_device else SLOWED_ROW_NS
            profiled.slowed_max_ns = None if rows is None else rows * row_ns

    @staticmethod
    def _sent_with(profiled: FinishedStep, finished: FinishedStep) -> FinishedStep:
        """Return the step whose record is still unwritten: `profiled`, unless its record was requested."""
        return profiled if profiled.record is None else finished

    def end_slice(self, finished: FinishedStep) -> None:
        """Learn from the slice of the finished step."""
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
        """Return whether the FLOPs of `step` may be counted, given their last price (None: first count)."""
        is_first = price_ns is None
        if price_ns is None:
            price_ns = self._price.count_ns(self._shape(step))
        self.count_max_ns = COUNT_FACTOR * max(price_ns, OTHER_STEP_NS)
        return self._budget.can_afford(price_ns, on_credit=is_first)

    def abandon(self) -> None:
        """End a slice and restore torch's and Python's state; an open window is not read."""
        self.release()
        self._probe.abandon()
        self._phases.tell_phases(None)

    def _charge(self, cost_ns: int) -> None:
        self._timer.overhead_ns += cost_ns

    def _shape(self, step: int) -> StepShape:
        """Return what is known about the steps before `step`, which is beginning."""
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
        """Predict the cost of a window of `step` for the budget if no such step was profiled yet."""
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
        elif not self._has_logged:
            self._has_logged = True
            _log.info(
                "pacecar has not calibrated its ledger yet: an exact window would cost %.0f ms of a step, more than"
                " overhead_budget allows so far",
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
        """Cut an open window off if its step turns out not to be the predicted one; never raises."""
        usual_ns = self._usual_ns
        if usual_ns is None or self._cut_because is not None or self._budget.is_unlimited or self._probe.is_in_backward:
            return
        if time.thread_time_ns() - self._thread_ns < OTHER_STEP_RATIO * usual_ns + OTHER_STEP_NS:
            return
        begun, thread_ns = self._now_ns(), time.thread_time_ns()
        try:
            if not may_collectives_be_out():
                self._reader.cut()
            elif not self._reader.pause():
                return
        except Exception:  # noqa: BLE001  inside the job's forward
            _log.debug("a window could not be cut off", exc_info=True)
        self._cut("its step was not like those before it", has_passed_step=False)
        self._price_ns += self._now_ns() - begun
        self._charge(self._now_ns() - begun)
        self._thread_ns += time.thread_time_ns() - thread_ns  # cutting off is not a slow-down of the step

    def _cut(self, reason: str, *, has_passed_step: bool) -> None:
        """Mark the window's rows to be dropped when it ends at a boundary; `has_passed_step`: its step is over."""
        self._cut_because, self._has_passed_step = reason, has_passed_step

    def _end_cut(self, finished: FinishedStep) -> None:
        self._phases.tell_phases(None)
        self.thread_time()  # dropped: the step itself was longer, not slowed by profiling
        begun = self._now_ns()
        if self._reader.is_open:  # paused
            if not self._has_passed_step:
                self._has_passed_step = finished.disturbed = self.has_aftermath = True
                return
            may_end = self._reader.may_end()
            if may_end:
                self._reader.cut()
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
