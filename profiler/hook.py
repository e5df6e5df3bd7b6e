"""Where did each step of this job go?  The hook: the one object of this room that lives in the training process.

It ties the parts together and holds no rule of its own: `phases` says what happens when, `steptimer` adds it up,
`measurement` looks exactly now and then within the `budget`, `estimate` does for the steps between, and a StepRecord
goes to the sinks and to `on_boundary`.

    boundary(N)   step N is over: its ledger, its record, on_boundary; then perhaps a window for step N+1
                  all of that lies inside step N+1's wall time, and is charged there as overhead

`on_boundary` is called at every boundary until `close`, with None where the hook could not measure the step or has
turned itself off: who listens may have promised other ranks to be there.

On a device job a window opens one step early: kernels that were launched before it are never seen, so the device must
first run dry of them.  Left out: how records travel (sinks, which belong to the caller), what is tuned (on_boundary).
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from pacecar.clock import Clock, SystemClock
from pacecar.config import HookConfig
from pacecar.profiler.budget import Budget
from pacecar.profiler.counts import StepCounts, Totals
from pacecar.profiler.estimate import Calibration, Calibrations, estimate
from pacecar.profiler.guard import Guard
from pacecar.profiler.identity import make_hello, model_device
from pacecar.profiler.loader import TimedLoader, guess_samples
from pacecar.profiler.measurement import WindowMeter
from pacecar.profiler.memory import cuda_stats
from pacecar.profiler.phases import PhaseHooks
from pacecar.profiler.sink import RecordSink
from pacecar.profiler.steptimer import StepTimer, TimedStep
from pacecar.profiler.vitals import VitalsMeter
from pacecar.records import Goodbye, JobHello, Knobs, Ledger, StepRecord

__all__ = ["AlreadyAttachedError", "Hook", "make_hello"]

T = TypeVar("T")


class AlreadyAttachedError(RuntimeError):
    """Another hook is active in this process; the message says where it was started."""


_slot = threading.Lock()
_attached: list[tuple[object, str]] = []
"""The process's one active hook and where it was started; guarded by `_slot`."""


class Hook:
    """Measures the steps of `model` trained by `optimizer`.

    `optimizer` is a torch.optim.Optimizer: the end of its `step()` ends a step.  `batch_samples` and `batch_tokens`
    count a batch that `data()` yields; without them the samples are the first dimension of the first tensor and
    tokens are unknown.  `on_boundary` gets every record on the training thread, None for a step that was not
    measured; what it raises counts as a failure of the hook.
    The sinks are the caller's: `close()` puts a Goodbye into them and does not close them.

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
        on_boundary: Callable[[StepRecord | None], None] | None = None,
        clock: Clock | None = None,
        batch_samples: Callable[[Any], int | None] | None = None,
        batch_tokens: Callable[[Any], int | None] | None = None,
    ) -> None:
        self._config = config or HookConfig()
        self._hello = hello
        self._sinks = tuple(sinks)
        self._on_boundary = on_boundary
        self._clock = clock or SystemClock()
        # The method of the real clock is a second python frame around this very function, in every callback.
        self._now_ns = time.monotonic_ns if isinstance(self._clock, SystemClock) else self._clock.monotonic_ns
        self._batch_samples = batch_samples or guess_samples
        self._batch_tokens = batch_tokens
        self.knobs = Knobs()
        """The settings in force; the tuner sets them at a boundary, for the steps that follow."""
        self.on_timed: Callable[[TimedStep, StepRecord], None] | None = None
        """Gets every measured step with its timers, on the training thread; must return in a microsecond."""
        self.is_traced = False
        """Somebody traces the steps that follow; their pace says nothing about the job."""

        self._timer = StepTimer()
        self._guard = Guard(self._now_ns, self._charge)
        device = model_device(model)
        is_cuda = device.type == "cuda"
        name = torch.cuda.get_device_name(device) if is_cuda else None
        self._vitals = VitalsMeter(model, self._config, device=device, stats=cuda_stats(device), device_name=name)
        self._phases = PhaseHooks(
            model,
            optimizer,
            self._timer,
            self._guard,
            now_ns=self._now_ns,
            boundary=self._boundary,
            retire=self._retire,
            forward_begins=self._vitals.forward_begins,
        )
        self._prepare = self._guard.wrap(self._prepare_next)
        self._meter = WindowMeter(self._clock, on_device=is_cuda)
        self._budget = Budget(
            self._config.overhead_budget,
            warmup_steps=self._config.window_warmup_steps,
            interval_steps=self._config.window_interval_steps,
            rank=hello.rank,
        )
        self._calibrations = Calibrations()
        self._counts = StepCounts()
        self._totals = Totals()
        self._step = 0
        self._window_price_ns = 0
        self._has_aftermath = False
        self._fresh: StepRecord | None = None
        self._boundary_ns: int | None = None
        self._beat_handle: RemovableHandle | None = None
        self._optimizer = optimizer
        self._in_boundary = False
        self._checkpoint_depth = 0
        self._is_started = False
        self._is_closed = False

    # --- life -----------------------------------------------------------------------------------

    @property
    def is_alive(self) -> bool:
        """The hook is started, not closed and has not turned itself off."""
        return self._is_started and not self._is_closed and self._guard.is_alive

    @property
    def step(self) -> int:
        """The number of the step under way: how many were finished."""
        return self._step

    @property
    def overhead_ratio(self) -> float | None:
        """What pacecar cost over the job's wall time so far (0..1); None before the first step."""
        return self._budget.ratio

    @property
    def phase(self) -> str:
        """The phase that the training thread is in, "outside" of all; may be asked from any thread."""
        if self._checkpoint_depth:
            return "checkpoint"
        return self._phases.phase or "outside"

    @property
    def evaluated_ns(self) -> int | None:
        """When a forward in evaluation was last seen, monotonic; None: never."""
        return self._phases.evaluated_ns

    def start(self) -> None:
        """Attach to model and optimizer; the first step counts from the job's first sign of life after this.

        Raises:
            AlreadyAttachedError: another hook is active in this process.
        """
        with _slot:
            if _attached:
                raise AlreadyAttachedError(f"pacecar is already attached in this process, at {_attached[0][1]}")
            _attached.append((self, _caller()))
        self._is_started = True
        self._phases.install()
        # Registered after the phases' own hook, so that it runs after it, and apart from it, so that it outlives it.
        self._beat_handle = self._optimizer.register_step_post_hook(self._beat)
        begun = self._now_ns()
        if self._config.windows:
            self._guard.wrap(self._meter.install)()
        self._budget.charge(self._now_ns() - begun)

    def close(self, reason: str = "detached") -> None:
        """Remove every hook, put a Goodbye with `reason` into the sinks, and free the process's slot.

        From inside `on_boundary` the hook is inert at once and removed when the boundary is over.
        """
        if self._is_closed or not self._is_started:
            return
        self._is_closed = True
        self._guard.is_alive = False
        if not self._in_boundary:  # else the next forward retires what is inert by then
            self._retire()
        self._last_words()
        goodbye = Goodbye(job=self._hello.job, rank=self._hello.rank, reason=reason, wall_ns=self._clock.wall_ns())
        for sink in self._sinks:
            sink.put(goodbye)
        with _slot:
            _attached[:] = [entry for entry in _attached if entry[0] is not self]

    # --- what the user's loop calls -------------------------------------------------------------

    def data(self, loader: Iterable[T]) -> Iterable[T]:
        """Return `loader` with its waits timed and its batches counted; iterate it as often as the loader."""
        return TimedLoader(
            loader,
            now_ns=self._now_ns,
            waited=self._guard.wrap(self._waited),
            drawn=self._guard.wrap(self._drawn),
        )

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Add to this step's samples and tokens; overrides what the hook would guess."""
        self._counts.say(samples, tokens)

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Charge the time of the body, saving a checkpoint, to the ledger's `checkpoint`; one inside another is its."""
        start, self._checkpoint_depth = self._now_ns(), self._checkpoint_depth + 1
        try:
            yield
        finally:
            self._checkpoint_depth -= 1
            if not self._checkpoint_depth:
                self._guard.wrap(self._checkpointed)(start, self._now_ns())

    def request_window(self) -> None:
        """Ask for an exact window soon, as a knob was switched; the budget decides when, a new setting has credit."""
        self._budget.request(on_credit=not self._calibrations.knows(self.knobs))

    # --- inside ---------------------------------------------------------------------------------

    def _charge(self, duration_ns: int) -> None:
        self._timer.overhead_ns += duration_ns

    def _checkpointed(self, start_ns: int, end_ns: int) -> None:
        self._timer.begin(start_ns)  # it may come before the first step
        self._timer.add("checkpoint", start_ns, end_ns)
        self._vitals.checkpointed(end_ns - start_ns)

    def _waited(self, start_ns: int, end_ns: int) -> None:
        self._timer.begin(start_ns)
        self._timer.add("data_wait", start_ns, end_ns)

    def _drawn(self, batch: object) -> None:
        samples = self._batch_samples(batch)
        if samples is not None:
            self._phases.guesses_samples = False
        self._counts.draw(samples, None if self._batch_tokens is None else self._batch_tokens(batch))

    def _boundary(self, now_ns: int) -> None:
        """Step over: account for it and tell the sinks, in what is already the next step's time."""
        self._boundary_ns = now_ns
        step = self._timer.finish(now_ns)
        self._fresh = self._account(step)
        if self.on_timed is not None:
            self.on_timed(step, self._fresh)
        vitals = self._vitals.step_over(self._fresh)
        for sink in self._sinks:
            sink.put(self._fresh)
            if vitals is not None:
                sink.put(vitals)

    def _beat(self, *_: object) -> None:
        """Tell the listener, whether or not there is a record, and prepare the next step."""
        if self._is_closed:
            return
        record, self._fresh = self._fresh, None
        self._in_boundary = True
        try:
            if self._on_boundary is not None:
                self._tell(self._on_boundary, record)
            self._prepare()
        finally:
            self._in_boundary = False

    def _tell(self, listener: Callable[[StepRecord | None], None], record: StepRecord | None) -> None:
        begun = self._now_ns()
        try:
            listener(record)
        except Exception:  # noqa: BLE001  as in the guard, which would not call a listener once it is dead
            self._guard.failed(listener)
            if not self._guard.is_alive:
                self._on_boundary = None
        self._charge(self._now_ns() - begun)

    def _prepare_next(self) -> None:
        if self._boundary_ns is None:
            return
        if self._config.windows:
            self._open_window()
        if not (self._meter.is_open or self.is_traced):  # they would see the dispatch mode's own time
            self._vitals.prepare(self._step, self._may_count)
        ended = self._now_ns()
        self._timer.add("overhead", self._boundary_ns, ended)
        self._meter.observed_from(ended)
        self._boundary_ns = None

    def _account(self, step: TimedStep) -> StepRecord:
        """Return the record of `step`, the ledger exact when a window saw it."""
        is_profiled = self._meter.is_open
        is_counted = self._vitals.is_counted
        is_disturbed = is_profiled or is_counted or self._has_aftermath or self.is_traced
        self._has_aftermath = is_profiled or self.is_traced  # ending and reading the window falls into the next step
        measurement = self._meter.close(step) if is_profiled else None
        if measurement is not None:
            self._calibrations.add(self.knobs, Calibration(self._step, measurement.phases))
        own_ns = min(step.overhead_ns, step.wall_ns)
        overhead_ns = self._budget.step(step.wall_ns, own_ns, profiled=is_profiled or is_counted)
        if is_counted:
            self._vitals.count_cost(overhead_ns - own_ns)
        if is_profiled:
            self._window_price_ns += overhead_ns - own_ns
            if not self._meter.is_open:
                self._budget.window_taken(self._step, self._window_price_ns + self._now_ns() - step.end_ns)
        calibration = self._calibrations.find(self.knobs)
        ledger = measurement.ledger if measurement else estimate(step.wall_ns, step.phases, calibration)
        samples, tokens = self._take_counts()
        self._totals.add(ledger, samples, tokens)
        source: Literal["exact", "estimate"] = "exact" if measurement else "estimate"
        record = self._record(step, ledger, source, calibration, overhead_ns, samples, tokens, is_disturbed)
        self._step += 1
        return record

    def _record(
        self,
        step: TimedStep,
        ledger: Ledger,
        source: Literal["exact", "estimate"],
        calibration: Calibration | None,
        overhead_ns: int,
        samples: int | None,
        tokens: int | None,
        is_disturbed: bool,
    ) -> StepRecord:
        return StepRecord(
            job=self._hello.job,
            rank=self._hello.rank,
            step=self._step,
            ended_wall_ns=self._clock.wall_ns(),
            wall_ns=step.wall_ns,
            data_wait_ns=step.phases.get("data_wait"),
            forward_ns=step.phases.get("forward"),
            backward_ns=step.backward_ns,
            optimizer_ns=step.phases.get("optimizer"),
            micro_batches=step.micro_batches or None,
            samples=samples,
            tokens=tokens,
            ledger=ledger,
            source=source,
            calibration_age_steps=None if calibration is None else self._step - calibration.step,
            totals=self._totals.ledger,
            total_steps=self._totals.steps,
            total_samples=self._totals.samples,
            total_tokens=self._totals.tokens,
            overhead_ns=overhead_ns,
            total_overhead_ns=self._budget.cost_ns,
            total_windows=self._budget.windows,
            dropped_records=sum(sink.dropped for sink in self._sinks),
            knobs=self.knobs,
            disturbed=is_disturbed,
        )

    def _take_counts(self) -> tuple[int | None, int | None]:
        """Return this step's samples and tokens by the best source there is, and begin the next step's."""
        samples, tokens = self._counts.take(self._phases.forward_samples)
        self._phases.forward_samples = None
        self._phases.guesses_samples = True
        return samples, tokens

    def _may_count(self, price_ns: int) -> bool:
        return self._budget.can_afford(price_ns, on_credit=not self._vitals.was_ever_counted)

    def _open_window(self) -> None:
        if not self._meter.is_open:
            if not self._budget.wants_window(self._step) or not self._meter.may_open():
                return
            begun = self._now_ns()
            self._meter.open()
            self._window_price_ns = self._now_ns() - begun
        self._timer.keep_marks()

    def _last_words(self) -> None:
        """Put what the last steps and a checkpoint after them have to say into the sinks; never raises."""
        try:
            vitals = self._vitals.finish()
        except Exception:  # noqa: BLE001  as in the guard, which is inert by now
            self._guard.failed(self._last_words)
            return
        if vitals is not None:
            for sink in self._sinks:
                sink.put(vitals)

    def _retire(self) -> None:
        """Leave torch as it was; not from inside an optimizer hook."""
        self._meter.uninstall()
        self._vitals.retire()
        self._phases.remove()
        if self._is_closed and self._beat_handle is not None:
            self._beat_handle.remove()
            self._beat_handle = None


def _caller() -> str:
    """Return file:line of the first frame outside pacecar's own hook and facade."""
    for frame in reversed(traceback.extract_stack(limit=12)[:-2]):
        if not frame.filename.endswith(("profiler/hook.py", "pacecar/pacer.py")):
            return f"{frame.filename}:{frame.lineno}"
    return "an unknown place"
