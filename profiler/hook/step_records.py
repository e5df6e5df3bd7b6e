"""Builds the records of finished steps later and off the step path: ledger, totals, overhead and StepRecord.

An estimate, the sums and a record of 27 fields take 12 us of Python when run back to back.  At the end of each step
they took 100 us, because by then the job had evicted all of it from the processor's caches.  So the training thread
queues a `FinishedStep`, and the records of waiting steps are written (*flushed*) together: every FLUSH_SECONDS by a
record queue or the rank monitor, or by the training thread when it needs them (a window is due, a listener asks for
the record).

    training thread   append(step) ... append(step) ... append(step)     a microsecond each
    another thread    flush_in_background() -> budget, ledger, totals, record, sinks    of each, in order

A flush holds a lock.  The time another thread spends here is charged to the budget as if the job had waited for it,
which the GIL may have made it do.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec
from msgspec import structs

from pacecar.records import (
    BackwardWindow,
    CollectiveWindow,
    EstimateCheck,
    Goodbye,
    JobHello,
    JobRecord,
    Knobs,
    ProcessStop,
    StepRecord,
    Uncalibrated,
)

from ..timing.cuda_timer import STEPS_MAX
from ..timing.failure_guard import FailureGuard
from ..timing.garbage_collections import GarbageCollections
from ..timing.hook_cost import HookCost, call_price
from ..timing.overhead_budget import RECENT_STEPS, OverheadBudget, ThreadTime
from ..timing.process_stops import LATE_NS_MIN, Stop, StopDetector
from ..timing.sample_counts import Totals
from ..timing.step_sampling import StepSampling
from ..timing.step_timer import STOPPED, RawStep, TimedStep, phase_of, time_step
from ..timing.torch_compile import Compilations
from ..transport.record_queue import RecordSink
from ..utilization.model_flops_utilization import UtilizationMeter
from ..windows.estimate import Calibrations, capped, estimate_step
from ..windows.estimate_check import EstimateChecker
from ..windows.window_reader import Measurement
from .step_boundary import WAITING_MAX, CountedSteps, CountedSums, Like, PlainStep, StepBoundary, raw_step

__all__ = ["FLUSH_SECONDS", "WAITING_MAX", "FinishedStep", "MeasuringLimits", "StepRecords"]

FLUSH_SECONDS = 1.0
"""How often waiting steps are written: often enough for a live view, rarely enough to be cheap."""

DEVICE_WAIT_NS = 10_000_000_000
"""The longest a step's record waits for its device times, which later boundaries read, if there are any."""

CHUNK_STEPS = 16
"""Another thread writes this many steps before it releases the GIL and the lock to the training thread."""

FRESH_STEPS = 128
"""With fewer steps waiting, the budget is up to date enough to refuse a window.

So few steps can only make a window affordable that nearly is, and its next turn is soon enough.
"""

CAP_NS_MIN = 1_000_000_000
"""The shortest step whose compute is capped: the processor clock, read five times a second, is too coarse for less."""

LOCK_SECONDS = 1.0
"""The longest the training thread waits for the lock, which may never be released in a forked child."""


class FinishedStep(msgspec.Struct, eq=False):
    """A finished step, as the training thread saw it.

    `listener_ns`: the listener's time at the boundaries since the last measured step, part of pacecar's own time.
    `last_listener_ns`: its time at the last of these boundaries, which lies in this step.
    `waited_ns`: how long the listener waited for other ranks in this step; included in neither of the two.
    `delay_ns`: the thread's run delay since the last full boundary.
    `price_ns`: the cost of opening and reading a window beside the step itself; None if no window ended with the step.
    `thread_time`: the training thread's processor time in a profiled step; None where it is not meaningful.
    `slowed_max_ns`: the most that the profiler can have slowed the step.
    `elements`: those of the first tensor of each forward.

    A Struct because its constructor runs no Python frame: it is made on the step path, with positional arguments.
    """

    step_records: StepRecords
    step: int
    raw: RawStep
    ended_wall_ns: int
    knobs: Knobs
    samples: int | None
    tokens: int | None
    flops: int | None
    samples_guessed: bool = False
    disturbed: bool = False
    was_counted: bool = False
    passed: CountedSums | None = None
    listener_ns: int = 0
    last_listener_ns: int = 0
    waited_ns: int = 0
    delay_ns: int = 0
    was_profiled: bool = False
    timed: TimedStep | None = None
    measurement: Measurement | None = None
    price_ns: int | None = None
    thread_time: ThreadTime | None = None
    slowed_max_ns: int | None = None
    record: StepRecord | None = None
    check: EstimateCheck | None = None
    stops: list[Stop] = []
    collectives: CollectiveWindow | None = None
    elements: int | None = None

    @property
    def wall_ns(self) -> int:
        """Its wall time."""
        return self.raw.end_ns - self.raw.start_ns

    @property
    def pace_ns(self) -> int:
        """Its wall time, less the cost of measuring if other steps are only counted and do not have that cost."""
        if self.step_records.measures_all:
            return self.wall_ns
        return max(1, self.wall_ns - max(0, self.raw.overhead_ns - self.last_listener_ns))

    @property
    def is_held(self) -> bool:
        """Whether its record waits for a window that is not read yet, its own or an earlier step's."""
        held_from = self.step_records.held_from
        return held_from is not None and self.step >= held_from

    @property
    def source(self) -> Literal["exact", "estimate"]:
        """Whether its ledger is exact or estimated."""
        return "exact" if self.measurement is not None else "estimate"

    @property
    def backward(self) -> BackwardWindow | None:
        """Its last backward and the all-reduces in it; None if no window recorded them."""
        return None if self.measurement is None else self.measurement.backward

    def settled(self) -> StepRecord:
        """Return the record, writing it now if necessary; a record that is held back becomes an estimate.

        Raises:
            RuntimeError: the record could not be written; the log says why.
        """
        if self.record is None:
            if self.is_held:
                self.step_records.held_from = None
            self.step_records.flush()
        if self.record is None:
            raise RuntimeError(f"step {self.step} has no record")
        return self.record


class MeasuringLimits(NamedTuple):
    """The limits of measuring: the overhead budget, how many steps are measured, and when the hook gives up."""

    budget: OverheadBudget
    sampling: StepSampling
    failure_guard: FailureGuard


class StepRecords:
    """The steps of one rank: queued by the training thread, written in order by the first thread to flush."""

    def __init__(
        self,
        hello: JobHello,
        sinks: Sequence[RecordSink],
        limits: MeasuringLimits,
        calibrations: Calibrations,
        utilization: UtilizationMeter,
        boundary: StepBoundary,
        stops: StopDetector,
        collections: GarbageCollections,
        compilations: Compilations,
    ) -> None:
        budget = limits.budget
        self._sampling = limits.sampling
        self._stop_detector = stops
        self._collections = collections
        self._compilations = compilations
        self._on_device = utilization.on_device
        self._hello = hello
        self._sinks = tuple(sinks)
        self._budget = budget
        self._calibrations = calibrations
        self._checker = EstimateChecker(hello, calibrations)
        self._utilization = utilization
        self._guard = limits.failure_guard
        self._totals = Totals()
        self._counted = CountedSteps(self._totals, budget, calibrations, stops)
        self._boundary = boundary
        self._waiting = boundary.waiting
        self._lock = threading.Lock()
        self._flushed = 0.0
        self._window_price_ns = 0
        self._hooks_ns: deque[int] = deque(maxlen=RECENT_STEPS)
        self.held_from: int | None = None
        """The step whose window is not read yet, which holds back its own and later records; None: no such step."""
        self.call_price = HookCost()
        """The time torch spends around the hooks, which the hooks do not see."""
        self.updates_before: int | None = None
        """How many updates the training had before the first step here, in earlier starts; None: unknown."""
        self.uncalibrated: Uncalibrated = "warming_up"
        """Why there is no exact window yet, while there is none."""
        self.window_price_ns: int | None = None
        """The expected cost of the first exact window; None: not predicted yet."""
        self.on_timed: Callable[[TimedStep, StepRecord], None] | None = None
        """Called with every measured step and its timers, on any thread; None: nobody listens."""

    def learn_prices(self) -> None:
        """Measure the time torch spends around the hooks: about 5 ms, on the training thread, before the first step."""
        self.call_price = call_price()

    def enter(self, step: FinishedStep) -> None:
        """Queue a finished step that was not plain."""
        self._waiting.append(step)
        # The first is written at once: its record makes the sinks start their threads, which flush from then on.
        if len(self._waiting) >= WAITING_MAX or step.step == 0:
            self.flush()

    @property
    def measures_all(self) -> bool:
        """Whether every step is measured, rather than only counted."""
        return self._sampling.every == 1

    @property
    def is_fresh(self) -> bool:
        """Whether the budget includes all but the last few steps, so that its refusal is reliable."""
        return len(self._waiting) < FRESH_STEPS

    def unwritten(self) -> tuple[int, int]:
        """Return wall time and cost of the steps waiting for their records, which the budget does not include yet."""
        wall_ns = cost_ns = 0
        for step in list(self._waiting):
            raw = step.raw if isinstance(step, FinishedStep) else raw_step(step)
            wall_ns += raw.end_ns - raw.start_ns
            cost_ns += raw.overhead_ns + (step.waited_ns if isinstance(step, FinishedStep) else 0)
        return wall_ns, cost_ns

    def flush(self) -> None:
        """Write all waiting records; call on the training thread."""
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                while self._waiting and not self._is_held():
                    self._write_next()
            finally:
                self._lock.release()

    def learn(
        self, step: FinishedStep, timed: TimedStep, measurement: Measurement | None, *, sent_with: FinishedStep
    ) -> None:
        """Calibrate from the window of `step`, if any; the check of the estimate is sent with `sent_with`."""
        self.flush()
        step.measurement = measurement
        # A step in which the process was stopped is unlike any other: do not learn from it.
        if measurement is not None and not step.stops:
            sent_with.check = self._known(
                self._checker.learn(step.step, step.knobs, timed, measurement, step.ended_wall_ns)
            )
            job, rank, ended_wall_ns = self._hello.job, self._hello.rank, step.ended_wall_ns
            sent_with.collectives = CollectiveWindow(
                job=job, rank=rank, step=step.step, ended_wall_ns=ended_wall_ns, sums=measurement.collectives
            )

    def _known(self, check: EstimateCheck | None) -> EstimateCheck | None:
        """Return the check without waits for data that cannot be observed, as in the step records."""
        known = self._totals.known
        return check and structs.replace(check, exact=known(check.exact), estimate=known(check.estimate))

    def flush_in_background(self, after_seconds: float = FLUSH_SECONDS) -> None:
        """Write waiting records unless that happened in the last `after_seconds`; call on any other thread."""
        now = time.monotonic()
        if not self._waiting or now - self._flushed < after_seconds:
            return
        self._flushed = now
        while self._waiting and not self._waits_for_device() and self._lock.acquire(blocking=False):
            begun = time.thread_time_ns()
            try:
                for _ in range(min(CHUNK_STEPS, len(self._waiting))):
                    if self._waits_for_device():
                        break
                    self._write_next()
                self.charge(time.thread_time_ns() - begun)
            finally:
                self._lock.release()
            time.sleep(0)

    def time(self, step: FinishedStep) -> TimedStep:
        """Return the summed phases of `step`; sets `step.stops` to the stops of the process in it."""
        raw = step.raw
        if step.wall_ns >= LATE_NS_MIN:
            self._stop_detector.look()  # its own thread may not have run since
            step.stops = self._stop_detector.stops(raw.start_ns, raw.end_ns)
        return time_step(raw, [stop.stretch for stop in step.stops], elements=step.elements)

    def charge(self, cost_ns: int) -> None:
        """Charge the time a thread spent on records, sending them included."""
        self._budget.charge(cost_ns)
        self._sampling.charged(cost_ns)

    def report_vitals(self) -> None:
        """Put a utilization record into the sinks if one is due; on the training thread, as it reads the model."""
        if self._lock.acquire(timeout=LOCK_SECONDS):
            try:
                record = self._utilization.report()
            finally:
                self._lock.release()
            self._send(record)

    def report_last_vitals(self) -> None:
        """Put the utilization record of the last steps and any later checkpoint into the sinks; never raises."""
        try:
            vitals = self._utilization.finish()
        except Exception:  # noqa: BLE001  as in the guard, which is inert by now
            self._guard.failed(self.report_last_vitals)
            return
        if vitals is not None:
            self._send(vitals)

    def goodbye(self, reason: str, wall_ns: int) -> Goodbye:
        """Return the last record, with the totals of all steps, including those after the last measured one.

        Never raises; if it fails, the record has no totals.
        """
        try:
            if self._lock.acquire(timeout=LOCK_SECONDS):
                try:
                    stops = self._counted.add_rest(self._boundary, self.call_price.passed_ns)
                finally:
                    self._lock.release()
                now_ns = time.monotonic_ns()
                self._send(*(
                    self._process_stop(stop, self._boundary.step - 1, "outside", wall_ns - (now_ns - stop.start_ns))
                    for stop in stops
                ))  # fmt: skip
            return self._counted.goodbye(self._hello, reason, wall_ns)
        except Exception:  # noqa: BLE001  as in the guard, which is inert by now
            self._guard.failed(self.goodbye)
            return Goodbye(job=self._hello.job, rank=self._hello.rank, reason=reason, wall_ns=wall_ns)

    def _is_held(self) -> bool:
        held_from, first = self.held_from, self._waiting[0]
        return held_from is not None and (first.step if isinstance(first, FinishedStep) else first[0]) >= held_from

    def _waits_for_device(self) -> bool:
        """Return whether the next step may still get its device times; bounded in steps and in time."""
        try:
            if self._is_held():
                return True
            step = self._waiting[0]
        except IndexError:  # another thread has written it in the meantime
            return False
        if isinstance(step, FinishedStep):
            device, ended_wall_ns = step.raw.device, step.ended_wall_ns
        else:
            _, _, _, ended_wall_ns, _, _, _, _, device = step
        if device is None or device.is_settled or len(self._waiting) > STEPS_MAX:
            return False
        return time.time_ns() - ended_wall_ns < DEVICE_WAIT_NS

    def _write_next(self) -> None:
        step = self._waiting.popleft()
        try:
            self._write(step if isinstance(step, FinishedStep) else self._finished(step))
        except Exception:  # noqa: BLE001  as in the guard: it must not end a record queue's thread either
            self._guard.failed(self._write)

    def _finished(self, plain: PlainStep) -> FinishedStep:
        step, _, _, ended_wall_ns, _, _, knobs, inputs, _ = plain
        return FinishedStep(
            self, step, raw_step(plain), ended_wall_ns, knobs, inputs.samples, None, inputs.flops, inputs.is_guess,
            elements=inputs.elements,
        )  # fmt: skip

    def _write(self, step: FinishedStep) -> None:
        timed = step.timed or self.time(step)
        self._totals.sees_data |= "data_wait" in timed.phases
        price = self.call_price
        ran_ns = step.wall_ns - timed.phases.get(STOPPED, 0)
        hooks_ns = self._without_delay(step, timed.overhead_ns)
        own_ns = min(hooks_ns + price.measured_ns(timed.micro_batches), ran_ns)
        like = self._counted.last = Like(step.wall_ns, timed.phases, step.samples, step.knobs)
        passed, every = step.passed, self._sampling.every
        if passed is not None and passed.steps:
            step.stops = [*self._counted.add(passed, like, step.raw.start_ns, price.passed_ns), *step.stops]
        if not step.disturbed and not step.stops:
            self._take_cadence(step, own_ns)
            self._checker.undisturbed(timed, step.knobs)
        is_slowed = step.was_profiled or step.was_counted
        overhead_ns = self._budget.step(
            ran_ns,
            own_ns,
            profiled=is_slowed,
            thread_time=step.thread_time,
            micro_batches=timed.micro_batches,
            slowed_max_ns=step.slowed_max_ns,
            waited_ns=step.waited_ns,
            delay_ns=step.delay_ns,
        )
        if step.was_counted:
            self._utilization.count_cost(overhead_ns - own_ns)
        if step.was_profiled:
            self._window_price_ns += overhead_ns - own_ns
        if step.price_ns is not None:
            self._budget.window_taken(step.step, self._window_price_ns + step.price_ns)
            self._window_price_ns = 0
        self._budget.charge(self._collections.take_cost_ns())
        self._compilations.watch()
        record = self._record(step, timed, overhead_ns)
        step.record = record
        on_timed = self.on_timed
        if on_timed is not None:  # the training thread may take it away meanwhile
            on_timed(timed, record)
        self._utilization.add(record, step.flops)
        if self._sampling.every != every or self._utilization.is_due:
            self._boundary.is_plain = False
        self._send(record, step.check, step.collectives, *self._stop_records(step))

    def _without_delay(self, step: FinishedStep, own_ns: int) -> int:
        """Return `own_ns` of pacecar's time in `step` without the run delay that fell into the hooks.

        It is unknown how much of a step's run delay did.  The hooks' excess over their usual time is used, up to the
        step's run delay.  Steps with a window or a trace are left alone: their hooks do more.
        """
        if step.disturbed:
            return own_ns
        hooks_ns = max(0, own_ns - step.listener_ns)
        usual_ns = int(median(self._hooks_ns)) if self._hooks_ns else hooks_ns
        self._hooks_ns.append(hooks_ns)
        return own_ns - min(step.delay_ns, max(0, hooks_ns - usual_ns))

    def _send(self, *records: JobRecord | None) -> None:
        for sink in self._sinks:
            for one in records:
                if one is not None:
                    sink.put(one)

    def _stop_records(self, step: FinishedStep) -> list[ProcessStop]:
        """Return a record of each stop of the process in `step`."""
        ended_ns, wall_ns = step.raw.end_ns, step.ended_wall_ns
        return [
            self._process_stop(stop, step.step, phase_of(step.raw, *stop.stretch), wall_ns - (ended_ns - stop.start_ns))
            for stop in step.stops
        ]

    def _process_stop(self, stop: Stop, step: int, phase: str, wall_ns: int) -> ProcessStop:
        return ProcessStop(
            job=self._hello.job,
            rank=self._hello.rank,
            step=step,
            phase=phase,
            wall_ns=wall_ns,
            stopped_ns=stop.end_ns - stop.start_ns,
            cause=stop.cause,
        )

    def _take_cadence(self, step: FinishedStep, own_ns: int) -> None:
        """Pass on the cost of measuring, without the listener, which is called whether or not a step is measured."""
        passed = step.passed
        if passed is None or not passed.steps:
            self._sampling.measured(step.wall_ns, own_ns - step.listener_ns, is_strained=self._budget.is_strained())
            return
        share_ns = step.listener_ns // (passed.steps + 1)
        self._sampling.measured(
            step.wall_ns,
            own_ns - share_ns,
            passed=passed.steps,
            passed_cost_ns=passed.cost_ns - share_ns * passed.steps,
            is_strained=self._budget.is_strained(),
        )

    def _record(self, step: FinishedStep, timed: TimedStep, overhead_ns: int) -> StepRecord:
        calibration = self._calibrations.find(step.knobs)
        measured = step.measurement
        ledger = (
            measured.ledger
            if measured is not None
            else estimate_step(
                step.wall_ns, timed.phases, None if step.raw.device is None else step.raw.device.phases, calibration
            )
        )
        if step.wall_ns >= CAP_NS_MIN and not self._on_device:
            taken_ns = self._stop_detector.processor_ns(step.raw.start_ns, step.raw.end_ns)
            ledger = ledger if taken_ns is None else capped(ledger, taken_ns)
        totals = self._totals
        ledger = totals.known(ledger)
        totals.add(ledger, step.samples, step.tokens)
        return StepRecord(
            job=self._hello.job,
            rank=self._hello.rank,
            step=step.step,
            ended_wall_ns=step.ended_wall_ns,
            wall_ns=step.wall_ns,
            data_wait_ns=timed.phases.get("data_wait"),
            forward_ns=timed.phases.get("forward"),
            backward_ns=timed.backward_ns,
            optimizer_ns=timed.phases.get("optimizer"),
            micro_batches=timed.micro_batches or None,
            samples=step.samples,
            tokens=step.tokens,
            ledger=ledger,
            source=step.source,
            calibration_age_steps=None if calibration is None else step.step - calibration.step,
            totals=totals.ledger,
            total_steps=totals.steps,
            total_samples=totals.samples,
            total_tokens=totals.tokens,
            overhead_ns=overhead_ns,
            total_overhead_ns=self._budget.cost_ns,
            total_windows=self._budget.windows,
            dropped_records=sum(sink.dropped for sink in self._sinks),
            knobs=step.knobs,
            disturbed=step.disturbed,
            measured_every=self._sampling.every,
            samples_guessed=step.samples_guessed,
            uncalibrated=self.uncalibrated if calibration is None else None,
            window_price_ns=self.window_price_ns if calibration is None else None,
            gc_ns=self._collections.within(step.raw.start_ns, step.raw.end_ns),
            total_gc_ns=self._collections.total_ns,
            global_step=None if self.updates_before is None else max(0, self.updates_before + step.step + 1),
            saved_steps=self._boundary.saved_steps,
            total_evaluation_ns=self._boundary.evaluation_ns,
            total_compile_ns=self._compilations.total_ns,
        )
