"""Measures the steps of a training process and sends a record of each.

The `Hook` ties the parts together and holds no rules of its own.  `phase_hooks` records when things happen,
`step_timer` adds the times up, `window_reader` occasionally profiles a step exactly, within the `overhead_budget`, and
`step_records` turns it all into ledgers and StepRecords for the sinks, a fraction of a second later and off the step
path.

    boundary(N)   step N is over: its record is queued, then the listener's on_boundary runs, then a window for step
                  N+1 may open; all of this lies in step N+1's wall time and is charged there as overhead

On a device job a window opens one step early: the profiler never sees kernels launched before it, so the device must
drain first.  The sinks decide how records travel and belong to the caller; the listener decides what is tuned.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pacecar.clock import Clock, SystemClock
from pacecar.config import HookConfig
from pacecar.records import JobHello, Knobs, StepRecord

from ..ranks.data_parallel import find_ddp, is_one_group, meets_inside
from ..timing.failure_guard import FailureGuard
from ..timing.garbage_collections import GarbageCollections
from ..timing.overhead_budget import OverheadBudget
from ..timing.preemption import Preemption
from ..timing.process_stops import StopDetector
from ..timing.sample_counts import StepCounts
from ..timing.step_sampling import StepSampling, burst_end, next_measured
from ..timing.step_timer import StepTimer, TimedStep
from ..timing.torch_compile import Compilations, keep_out
from ..transport.record_queue import RecordSink
from ..utilization.allocator_memory import cuda_stats
from ..utilization.model_flops_utilization import UtilizationMeter
from ..windows.estimate import Calibrations
from ..windows.window_reader import WindowReader
from . import single_instance
from .identity import make_hello, model_device
from .loading import DataLoading, JobLength
from .optimizer_succession import OptimizerSuccession, updates_of
from .phase_hooks import PhaseHooks
from .single_instance import AlreadyAttachedError
from .step_boundary import UNUSUAL, CountedStep, CountedSums, StepBoundary, take_inputs
from .step_hooks import AnyStepHandle, after_step, before_any_step
from .step_records import FinishedStep, MeasuringLimits, StepRecords
from .window_schedule import WindowSchedule

__all__ = ["AlreadyAttachedError", "Hook", "StepListener", "make_hello"]

_log = logging.getLogger(__name__)


class StepListener(Protocol):
    """What a hook calls as steps end.  Everything but `on_timed` is called on the training thread.

    The defaults ignore every step; a subclass overrides what it needs.
    """

    def on_boundary(self, step: FinishedStep | CountedStep | None) -> None:
        """Handle the end of a step; an exception counts as a failure of the hook.

        Called at every wanted boundary until the hook is closed.  The argument is a CountedStep if the step was
        counted but not measured, and None if the hook could do neither or has turned itself off: the listener may have
        promised other ranks to be there.  Asking a step for its record writes the record.
        """

    def on_optimizer(self, optimizer: Optimizer) -> None:
        """Handle a change of the optimizer whose steps count; called before its first step."""
        return

    def wants_boundary(self) -> bool:
        """Return whether the next boundary must call `on_boundary`; call `Hook.wake` if that changes in between."""
        return False

    def holds_windows(self) -> bool:
        """Return whether no window may open because something else is about to profile the job."""
        return False

    def on_timed(self, timed: TimedStep, record: StepRecord) -> None:
        """Handle a measured step and its timers, on any thread; must return within a microsecond."""


class Hook:
    """Measures the steps of `model` trained by `optimizer`.

    `optimizer` is a torch.optim.Optimizer.  The end of its `step()` ends a step, and so does that of an optimizer that
    later replaces it (`optimizer_succession`); the hook keeps none of them alive.  `batch_samples` and `batch_tokens`
    count a batch that `data()` yields; without them, samples are the first dimension of the first tensor and tokens
    are unknown.  The sinks belong to the caller: `close()` puts a Goodbye into them and does not close them.

    Raises:
        TypeError: `optimizer` has no step hooks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        hello: JobHello,
        config: HookConfig | None = None,
        sinks: Sequence[RecordSink] = (),
        clock: Clock | None = None,
        batch_samples: Callable[[Any], int | None] | None = None,
        batch_tokens: Callable[[Any], int | None] | None = None,
    ) -> None:
        self._config = config or HookConfig()
        self._hello = hello
        self._sinks = tuple(sinks)
        self._listener: StepListener | None = None
        self._clock = clock or SystemClock()
        # The real clock's method would add a second Python frame to every callback.
        is_real = isinstance(self._clock, SystemClock)
        self._now_ns = time.monotonic_ns if is_real else self._clock.monotonic_ns
        self._wall_ns = time.time_ns if is_real else self._clock.wall_ns
        self.is_traced = False
        """Whether the next steps are traced, so that their pace does not represent the job; set at a boundary."""

        self._timer = StepTimer()
        self._guard = FailureGuard(self._now_ns, self._charge)
        device = model_device(model)
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else None
        self._utilization = UtilizationMeter(
            model, self._config, device=device, stats=cuda_stats(device), device_name=name
        )
        self._phases = PhaseHooks(
            model, optimizer, self._timer, self._guard,
            now_ns=self._now_ns, retire=self._retire, forward_begins=self._utilization.forward_begins,
        )  # fmt: skip
        self.windows = WindowReader(self._clock, on_device=is_cuda, is_held=self._is_held)
        """Opens and reads exact windows."""
        self.budget = OverheadBudget(
            self._config.overhead_budget, warmup_steps=self._config.window_warmup_steps,
            interval_steps=self._config.window_interval_steps,
            rank=hello.rank, world_size=hello.world_size, on_device=is_cuda,
        )  # fmt: skip
        """What pacecar costs and may cost; every other part that spends time charges it too."""
        self._calibrations = Calibrations()
        self._sampling = StepSampling(self._config.overhead_budget)
        self._counts = StepCounts()
        self._stops = StopDetector(charge=self.budget.charge)
        self.collections = GarbageCollections()
        """What Python's garbage collector takes of this process."""
        self._compilations = Compilations()
        self._boundary = StepBoundary(
            self._phases, self._timer, self._guard, self._counts,
            now_ns=self._now_ns, wall_ns=self._wall_ns, full_boundary=self._full_boundary,
        )  # fmt: skip
        job_length = JobLength(self._config.expected_seconds, self._config.expected_steps)
        self.loop = DataLoading(
            self._timer, self._guard, self._counts, self._phases, self._utilization, now_ns=self._now_ns,
            batch_samples=batch_samples, batch_tokens=batch_tokens, job_length=job_length, saved=self._boundary.saved,
        )  # fmt: skip
        """Data waits, batch sizes and checkpoints, as reported by the user's loop."""
        self.records = StepRecords(
            hello, self._sinks, MeasuringLimits(self.budget, self._sampling, self._guard), self._calibrations,
            self._utilization, self._boundary, self._stops, self.collections, self._compilations,
        )  # fmt: skip
        """The finished steps whose records are not written yet."""
        self.preemption = Preemption()
        """The run delay since a listener called `begin` before something that takes long."""
        parts = (self.windows, self.budget, self.records, self._timer, self._phases)
        self._window_schedule = WindowSchedule(*parts, self._now_ns, self.preemption, job_length, on_device=is_cuda)
        self._step_delay = Preemption()
        self._boundary.full_boundary_step = self.budget.next_look(0)
        self._boundary_handle: RemovableHandle | AnyStepHandle | None = None
        self._any_step: AnyStepHandle | None = None
        self._succession = OptimizerSuccession(model, optimizer)
        self._meets_inside, self._meets_others = meets_inside(model), not is_one_group(model, hello.world_size)
        self.is_ddp = find_ddp(model) is not None
        """Whether gradients are reduced by DDP, whose waits the timers see."""
        self._optimizer = self._succession.present
        self._is_started = self._is_closed = False

    # --- life -----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """Whether the hook is started, not closed and has not turned itself off."""
        return self._is_started and not self._is_closed and self._guard.is_alive

    @property
    def step(self) -> int:
        """The number of the current step, which is the number of finished ones."""
        return self._boundary.step

    def current_step(self) -> tuple[int, int | None]:
        """Return `step` and when it began (monotonic ns; None before the first); may be called from any thread."""
        return self._boundary.current_step()

    @property
    def knobs(self) -> Knobs:
        """The settings in force; the tuner sets them at a boundary for the steps after it."""
        return self._boundary.knobs

    @knobs.setter
    def knobs(self, knobs: Knobs) -> None:
        self._boundary.knobs = knobs
        self._window_schedule.mark(self._boundary.step)

    def resume(self, step: int) -> None:
        """Record that the training has had `step` updates up to now, over all its starts."""
        self.records.updates_before = step - self._boundary.step

    def headroom_ns(self) -> int | None:
        """Return what the overhead budget still allows, None if it has no limit; call on the training thread.

        Steps whose records are not written yet are counted, and so is an open window, at its predicted price.
        """
        wall_ns, cost_ns = self.records.unwritten()
        cost_ns += self._timer.overhead_ns + self._boundary.waited_ns
        passed = self._boundary.passed
        if passed is not None:
            wall_ns, cost_ns = wall_ns + passed.wall_ns, cost_ns + passed.cost_ns
        if self._window_schedule.may_be_open:
            cost_ns += self.budget.predicted_ns
        return self.budget.headroom_ns(wall_ns=wall_ns, cost_ns=cost_ns)

    def waited(self, duration_ns: int) -> None:
        """Record that a listener waited this long for other ranks.

        The job's next collective would have waited anyway, so the budget decides how much of it the job has lost.
        """
        self.preemption.leave_out(duration_ns)
        self._boundary.waited_ns += duration_ns

    def awaits_first_window(self) -> bool:
        """Return whether the first exact window is due: it is affordable, or has no price yet."""
        return self._config.windows and self.windows.is_installed and self._window_schedule.awaits_first_window()

    def meeting_phases(self) -> frozenset[str]:
        """Return which of forward, backward and rest may contain waits for other ranks, beside DDP's in the tail.

        Forward and backward where parameters are sharded, as a rank waits there only if another is late; else those in
        which windows under the current settings saw it.  Rest where a part of the ranks shares the model: in pipelines
        ranks wait for their neighbours between forward and backward.
        """
        found = {"rest"} if self._meets_others else set()
        calibration = self._calibrations.find(self.knobs)
        if self._meets_inside:
            found |= {"forward", "backward"}
        elif calibration is not None:
            # DDP's all-reduces run beside its backward, and are waited for at its end.
            found |= calibration.meeting_phases - ({"backward"} if self.is_ddp else frozenset())
        return frozenset(found)

    @property
    def phase(self) -> str:
        """The training thread's phase, "outside" between phases; may be read from any thread."""
        if self.loop.checkpoint_depth:
            return "checkpoint"
        return self._phases.phase or "outside"

    @property
    def evaluated_ns(self) -> int | None:
        """When a forward in evaluation was last seen, or the process resumed after a stop, monotonic; None: never."""
        self._stops.look()
        return max((at for at in (self._phases.evaluated_ns, self._stops.went_on_ns) if at is not None), default=None)

    @property
    def trained_ns(self) -> int | None:
        """When a forward in training was last seen, monotonic; None: never."""
        return self._phases.trained_ns

    def watch_calls(self) -> None:
        """Observe the model's calls even while steps are only counted; from any thread, once steps stop ending."""
        try:
            self._phases.watch_calls()
        except Exception:  # noqa: BLE001  as in the guard, which would charge a step of the training thread
            self._guard.failed(self._phases.watch_calls)

    def start(self, listener: StepListener | None = None) -> None:
        """Attach to model and optimizer; the first step begins with the job's first event after this.

        `listener` is called from the first step on.

        Raises:
            AlreadyAttachedError: another hook is active in this process.
        """
        single_instance.claim(self)
        self._is_started = True
        self._listener = listener
        if listener is not None:
            self.records.on_timed = listener.on_timed
        self._phases.tells_inputs = self._utilization.tells_inputs
        self._phases.install()
        keep_out(StepBoundary.optimizer_stepped)
        optimizer = self._optimizer()
        if optimizer is not None:
            self._boundary_handle = after_step(optimizer, self._boundary.optimizer_stepped)
        self._any_step = before_any_step(self._before_step)
        begun = self._now_ns()
        self.preemption.begin()
        if self._now_ns is time.monotonic_ns:  # prices are measured by the real clock
            self._guard.wrap(self.records.learn_prices)()
            self._guard.wrap(self._stops.start)()
            self._guard.wrap(self.collections.start)()
            self._guard.wrap(self._compilations.watch)()
        if self._config.windows:
            self._guard.wrap(self.windows.install)()
        if not self.windows.is_installed:
            self.records.uncalibrated = "unavailable" if self._config.windows else "off"
        self.preemption.end()
        self.budget.charge_start(self.preemption.own_ns(self._now_ns() - begun))
        self._timer.overhead_ns = 0  # the start is not part of the first step

    def close(self, reason: str = "detached") -> None:
        """Remove every hook, put a Goodbye with `reason` into the sinks, and let another hook attach.

        Inside `on_boundary` this makes the hook inert at once and removes it when the boundary is over.
        """
        if self._is_closed or not self._is_started:
            return
        self._is_closed = True
        self._guard.is_alive = False
        if not self._boundary.is_under_way:  # else the next forward removes the hooks, which are inert by then
            self._retire()
        self._window_schedule.release()
        self.records.flush()
        self.records.report_last_vitals()
        goodbye = self.records.goodbye(reason, self._clock.wall_ns())
        for sink in self._sinks:
            sink.put(goodbye)
        self.preemption.close()
        self._step_delay.close()
        self._stops.close()
        self.collections.close()
        self._compilations.close()
        single_instance.free(self)

    def wake(self) -> None:
        """Call the listener at the next boundary; may be called from any thread."""
        self._boundary.wake()

    def forked(self) -> None:
        """Become permanently inert and send nothing: this is a forked child of the measured process."""
        self._is_closed, self._guard.is_alive = True, False
        self._stops.forked()
        self.collections.close()
        self._compilations.close()

    def request_window(self) -> None:
        """Request an exact window soon, after a knob was switched; the budget decides when and grants it credit."""
        self._window_schedule.request(self._boundary.step, on_credit=not self._calibrations.knows(self.knobs))
        self._boundary.full_boundary_step = self._window_schedule.next_look(self._boundary.step)

    def watch_phases(self, listener: Callable[[str], None] | None) -> None:
        """Call `listener`, which must not raise, with each phase that the training thread enters; None: no longer.

        Only while no window can open.
        """
        self._phases.tell_phases(listener)

    # --- inside ---------------------------------------------------------------------------------

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Follow `optimizer` if the step it begins is the job's; called before every optimizer step of the process."""
        present = self._optimizer()
        if optimizer is present or not self._guard.is_alive:
            return
        begun = self._now_ns()
        try:
            # A closure runs the model inside the step.
            has_closure = len(args) > 1 or bool(kwargs)
            is_update = has_closure or self._phases.may_have_run or self._boundary.usual.inputs == []
            is_inside = present is not None and self._phases.optimizer_start_ns is not None
            if self._succession.takes_over(optimizer, self._boundary.step, is_update=is_update and not is_inside):
                self._follow(optimizer)
        except Exception:  # noqa: BLE001  as in the guard, without its second frame
            self._guard.failed(self._before_step)
        self._charge(self._now_ns() - begun)

    def _follow(self, optimizer: Optimizer) -> None:
        self._optimizer = self._succession.present
        if self._boundary_handle is not None:
            self._boundary_handle.remove()
        self._boundary_handle = after_step(optimizer, self._boundary.optimizer_stepped)
        self._phases.follow(optimizer)
        _log.info("pacecar: another %s trains the model from step %d on", type(optimizer).__name__, self._boundary.step)
        if self._listener is not None:
            self._listener.on_optimizer(optimizer)

    def _charge(self, duration_ns: int) -> None:
        self._timer.overhead_ns += duration_ns

    def _full_boundary(self, now_ns: int) -> None:
        """End a step that is not plain: queue its record, call the listener (at least with None), prepare the next."""
        if self._is_closed:
            return
        boundary = self._boundary
        finished: FinishedStep | CountedStep | None = None
        boundary.is_under_way = True
        try:
            if self._guard.is_alive:
                end_step = self._counted if self._phases.is_resting else self._finish
                try:
                    finished = end_step(now_ns)
                except Exception:  # noqa: BLE001  as in the guard, without its second frame
                    self._guard.failed(end_step)
            if self._listener is not None:
                begun = self._now_ns()
                self._call(self._listener, finished)
                taken_ns = self._now_ns() - begun
                if self.preemption.is_begun:
                    taken_ns = max(0, taken_ns - self.preemption.end())
                boundary.last_listener_ns = taken_ns
                boundary.listener_ns += taken_ns
            if self._guard.is_alive:
                try:
                    self._prepare(now_ns)
                except Exception:  # noqa: BLE001  as above
                    self.preemption.end()
                    self._guard.failed(self._prepare)
        finally:
            boundary.is_under_way = False
        # Set first, then check: another thread may make something pending at this moment.
        boundary.is_plain = True
        if self._is_pending():
            boundary.is_plain = False

    def _is_pending(self) -> bool:
        """Return whether the next boundary has more to do than record the end of a step."""
        is_heard = self._listener is not None and self._listener.wants_boundary()
        is_looked_at = self._window_schedule.may_be_open or self._window_schedule.has_aftermath or self.is_traced
        is_odd = self._sampling.every is None or self._boundary.passed is not None or self._boundary.step <= 1
        is_counted = self._phases.tells_inputs or self._utilization.wants_count or self._utilization.is_due
        return is_heard or is_looked_at or is_odd or is_counted

    def _call(self, listener: StepListener, finished: FinishedStep | CountedStep | None) -> None:
        try:
            listener.on_boundary(finished)
        except Exception:  # noqa: BLE001  as in the guard, which stops calling a listener once it is dead
            self._guard.failed(listener.on_boundary)
            if not self._guard.is_alive:
                self._listener = self.records.on_timed = None

    def _is_held(self) -> bool:
        return self._listener is not None and self._listener.holds_windows()

    def _counted(self, now_ns: int) -> CountedStep | None:
        """Count the finished step; return it if there is a listener."""
        boundary, start_ns = self._boundary, self._timer.start_ns
        self._step_delay.lap()
        boundary.count_step(now_ns).cost_ns += boundary.waited_ns
        boundary.waited_ns = 0
        if self._listener is None or start_ns is None:
            return None
        return CountedStep(boundary.step - 1, start_ns, now_ns, self._wall_ns(), boundary.knobs, self.is_traced)

    def _finish(self, now_ns: int) -> FinishedStep:
        """Queue the finished step for its record; the time this takes already belongs to the next step."""
        timer, phases, boundary, schedule = self._timer, self._phases, self._boundary, self._window_schedule
        phases.optimizer_ended(now_ns)
        timer.overhead_ns += phases.own_ns
        phases.own_ns = 0
        was_counted = False
        is_usual = phases.inputs == boundary.usual.inputs and phases.drawn_samples == boundary.usual.drawn
        if is_usual and not phases.has_looked:
            phases.inputs.clear()
            phases.drawn_samples = None
        else:
            boundary.usual, was_counted = take_inputs(phases, self._utilization)
        samples, tokens, is_guess = boundary.usual.samples, None, boundary.usual.is_guess
        if self._counts.has_news:
            samples, tokens, is_guess = self._counts.drain(samples, is_guess)
        phases.guesses_samples = True
        raw = schedule.last_raw = timer.finish(now_ns)
        now = self._wall_ns()
        finished = FinishedStep(
            self.records, boundary.step, raw, now, boundary.knobs, samples, tokens, boundary.usual.flops, is_guess,
            elements=boundary.usual.elements,
        )  # fmt: skip
        if was_counted or schedule.has_aftermath or self.is_traced:
            finished.was_counted, finished.disturbed = was_counted, True
            finished.thread_time, finished.slowed_max_ns = schedule.thread_time(), schedule.count_max_ns
            schedule.has_aftermath = self.is_traced
        finished.listener_ns, boundary.listener_ns = boundary.listener_ns, 0
        finished.last_listener_ns, boundary.last_listener_ns = boundary.last_listener_ns, 0
        finished.delay_ns = self._step_delay.lap()
        finished.waited_ns, boundary.waited_ns = boundary.waited_ns, 0
        if boundary.passed is not None:
            finished.passed, boundary.passed = boundary.passed, None
        if schedule.may_be_open:
            schedule.end(finished)
        elif schedule.is_probing:
            schedule.end_slice(finished)
        boundary.step += 1
        if boundary.step == 1 and self.records.updates_before is None:
            updates = updates_of(self._optimizer())
            self.records.updates_before = None if updates is None else max(0, updates - 1)
        self.records.enter(finished)
        if self._utilization.is_due:
            self.records.report_vitals()
            boundary.usual = UNUSUAL  # the report has checked which parameters are trained
        return finished

    def _turn_off(self) -> None:
        """Turn the hook off because even counting steps costs more than the user allows."""
        self.records.flush()
        _log.warning(
            "pacecar measures no more: its own time alone is over overhead_budget = %g of these short steps",
            self._config.overhead_budget,
        )
        if self._phases.is_resting:
            self._phases.resume()  # the next forward removes the hooks
        self._guard.is_alive = False

    def _prepare(self, now_ns: int) -> None:
        """Prepare for the step that began at `now_ns` and charge it for everything done since."""
        every = self._sampling.every
        if every is None:
            self._turn_off()
            return
        step, schedule = self._boundary.step, self._window_schedule
        is_turn = self._config.windows and step == self._boundary.full_boundary_step and schedule.wants(step)
        # A window's turn takes precedence over step sampling.
        measured = next_measured(step, every)
        if step < measured and not is_turn and not schedule.may_be_open:
            passed = self._boundary.passed = self._boundary.passed or CountedSums()
            # Boundaries that no listener wants can skip this until a step is measured or a window's turn comes.
            if step >= self._boundary.full_boundary_step:
                self._boundary.full_boundary_step = self._next_look(step)
            is_wanted = self.is_traced or (self._listener is not None and self._listener.wants_boundary())
            self._boundary.counted_until = 0 if is_wanted else min(measured, self._boundary.full_boundary_step)
            if self._phases.is_resting:
                passed.cost_ns += self.preemption.own_ns(self._now_ns() - now_ns)
            else:  # removing the hooks is a one-time cost, charged to the next measured step
                self._phases.rest()
                self._timer.overhead_ns += self.preemption.own_ns(self._now_ns() - now_ns)
            return
        if self._phases.is_resting:
            self._phases.resume()
        is_watched = schedule.may_be_open or schedule.has_aftermath or step == 1  # `install` has taken one too
        if step == 1:
            schedule.mark(step)
        if schedule.must_stop:
            schedule.stop()
        if step >= self._boundary.full_boundary_step:
            if self._config.windows:
                schedule.try_to_open(step)
            self._boundary.full_boundary_step = self._next_look(step)
            is_watched = True
        elif schedule.may_be_open:
            self._timer.keep_marks()
        if every > 1:
            self._boundary.full_boundary_step = min(self._boundary.full_boundary_step, burst_end(step, every))
        utilization = self._utilization
        if utilization.wants_count and not (
            schedule.may_be_open or schedule.is_probing or self.is_traced
        ):  # a window or trace would contain the dispatch mode's time
            self.records.flush()
            utilization.prepare(self._boundary.step, schedule.may_count)
            self._phases.tells_inputs = utilization.tells_inputs
            if self._phases.tells_inputs:
                schedule.slows(step)
        elif self._phases.tells_inputs:
            self._phases.tells_inputs = utilization.tells_inputs
        ended = self._now_ns()
        self._timer.events.append(("overhead", now_ns, ended))
        self._timer.overhead_ns += self.preemption.own_ns(ended - now_ns)
        if is_watched:
            self.windows.observed_from(ended)

    def _next_look(self, step: int) -> int:
        """Return the next step before which a window may be due."""
        return self._window_schedule.next_look(step + 1) if self._config.windows else sys.maxsize

    def _retire(self) -> None:
        """Remove all hooks and patches from torch; not from inside an optimizer hook."""
        self._window_schedule.abandon()
        self.windows.uninstall()
        self._utilization.retire()
        self.loop.close()
        self._phases.remove()
        if not self._is_closed:
            return
        for handle in (self._boundary_handle, self._any_step):
            if handle is not None:
                handle.remove()
        self._boundary_handle = self._any_step = None
