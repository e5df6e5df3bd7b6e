"""Ends a step in ten microseconds: a plain boundary only records that the step ended, any other is a full boundary.

Between two boundaries the job evicts our code and data from the processor's caches.  So the cost of a boundary depends
on how many objects it touches, not on the work it does: a call takes a microsecond or two, an attribute of another
object half a microsecond.  Most steps are *plain*: their inputs match the last step's, and no listener, window, trace,
FLOP count or record is due.  For these `optimizer_stepped` appends one tuple and does a few stores, which
`step_records` evaluates later.  All other steps, and all doubtful ones, go through the hook's full boundary, which has
all the rules.

    is_plain               set by the full boundary when nothing is pending, cleared by anything, on any thread, that
                           becomes pending
    full_boundary_step     a step that the full boundary must see before it begins: a window may be due

A step that is not measured is only counted (`step_sampling` decides which).  `CountedSteps` adds it to the totals
later: its own wall time, split in the proportions of a measured step.  Normally that is the next one, whose record
carries the totals.  If the job ends first, it is the last one, and the Goodbye carries the totals.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from pacecar.records import Goodbye, JobHello, Knobs

from ..timing.cuda_timer import DeviceStep
from ..timing.failure_guard import FailureGuard
from ..timing.overhead_budget import OverheadBudget
from ..timing.process_stops import LATE_NS_MIN, Stop, StopDetector
from ..timing.sample_counts import StepCounts, Totals, plus
from ..timing.step_timer import STOPPED, Event, RawStep, StepTimer
from ..timing.torch_compile import is_tracing, step_out_of_graph
from ..utilization.model_flops_utilization import UtilizationMeter
from ..windows.estimate import Calibrations, estimate
from .phase_hooks import InputKey, PhaseHooks

__all__ = [
    "UNUSUAL",
    "WAITING_MAX",
    "CountedStep",
    "CountedSteps",
    "CountedSums",
    "Like",
    "PlainStep",
    "StepBoundary",
    "StepInputs",
    "raw_step",
    "take_inputs",
]

WAITING_MAX = 512
"""The most steps that may wait for their records; beyond this, the training thread writes the records itself."""

PlainStep = tuple[int, int, int, int, list[Event], int, Knobs, "StepInputs", DeviceStep | None]
"""Step, start, end, wall clock at the end, events, pacecar's own time, knobs, inputs, device."""


class StepInputs(msgspec.Struct, frozen=True):
    """Samples and FLOPs of a step with these inputs; with `inputs` None they hold for no other step.

    `elements` are those of the first tensor of each forward.  `drawn` counts the samples that the step drew from
    observed loaders.  `is_guess`: `samples` is the first dimension of a tensor.
    """

    inputs: list[InputKey] | None
    drawn: int | None
    samples: int | None
    is_guess: bool
    flops: int | None
    elements: int | None = None


UNUSUAL = StepInputs(None, None, None, False, None)


class CountedStep(msgspec.Struct, frozen=True):
    """A step that was counted but not measured: its time and the settings in force.

    `disturbed`: it was traced, so its pace does not represent the settings.
    """

    step: int
    start_ns: int
    end_ns: int
    ended_wall_ns: int
    knobs: Knobs
    disturbed: bool = False

    @property
    def wall_ns(self) -> int:
        """Its wall time."""
        return self.end_ns - self.start_ns


class CountedSums:
    """The sums over steps that were counted but not measured."""

    def __init__(self) -> None:
        self.steps = 0
        self.wall_ns = 0
        self.cost_ns = 0
        self.samples: int | None = None
        self.tokens: int | None = None

    def said(self, samples: int | None, tokens: int | None) -> None:
        """Add what the user or the loader reported for one step."""
        self.samples = plus(self.samples, samples)
        self.tokens = plus(self.tokens, tokens)


class StepBoundary:
    """The optimizer's post-hook with everything that a plain step needs, in one object."""

    __slots__ = (
        "_counts",
        "_full_boundary",
        "_guard",
        "_now_ns",
        "_phases",
        "_timer",
        "_wall_ns",
        "counted_until",
        "full_boundary_step",
        "is_plain",
        "is_under_way",
        "knobs",
        "last_listener_ns",
        "listener_ns",
        "passed",
        "saved_steps",
        "step",
        "usual",
        "waited_ns",
        "waiting",
    )

    def __init__(
        self,
        phases: PhaseHooks,
        timer: StepTimer,
        guard: FailureGuard,
        counts: StepCounts,
        *,
        now_ns: Callable[[], int],
        wall_ns: Callable[[], int],
        full_boundary: Callable[[int], None],
    ) -> None:
        self._phases = phases
        self._timer = timer
        self._guard = guard
        self._counts = counts
        self._now_ns = now_ns
        self._wall_ns = wall_ns
        self._full_boundary = full_boundary
        self.is_plain = False
        self.is_under_way = False
        """Whether the training thread is in the full boundary."""
        self.full_boundary_step = 0
        self.counted_until = 0
        """Boundaries before that of this step are only counted."""
        self.passed: CountedSums | None = None
        """The steps counted since the last measured one."""
        self.step = 0
        """The number of the current step, which is the number of finished ones."""
        self.saved_steps: int | None = None
        """How many finished steps the last checkpoint holds; None: there was none."""
        self.usual = UNUSUAL
        """The inputs of the last step, with its samples and FLOPs."""
        self.knobs = Knobs()
        self.listener_ns = self.last_listener_ns = self.waited_ns = 0
        """The listener's time since the last measured step and at the last boundary; how long it waited for ranks."""
        self.waiting: deque[Any] = deque()
        """Finished steps without a record, each a PlainStep or queued by the full boundary: at most WAITING_MAX + 1."""

    def optimizer_stepped(self, *_: object) -> None:
        """End a step."""
        if is_tracing():
            step_out_of_graph()
            return
        now_ns = self._now_ns()
        phases, usual, waiting = self._phases, self.usual, self.waiting
        if (
            not self.is_plain
            or self.step + 1 >= self.full_boundary_step
            or phases.inputs != usual.inputs
            or phases.drawn_samples != usual.drawn
            or phases.has_looked
            or self._counts.has_news
            or not self._guard.is_alive
            or len(waiting) >= WAITING_MAX
        ):
            passed = self.passed
            if self.step + 1 < self.counted_until and passed is not None and self._guard.is_alive:
                # Inline instead of a call of `count_step`: the shorter the steps, the larger the share of this.
                timer = self._timer
                if timer.start_ns is not None and not self._counts.has_news and timer.device is None:
                    passed.steps += 1
                    passed.wall_ns += now_ns - timer.start_ns
                    timer.start_ns = now_ns
                    timer.events.clear()
                    self.step += 1
                    passed.cost_ns += self._now_ns() - now_ns
                else:
                    self.count_step(now_ns).cost_ns += self._now_ns() - now_ns
            else:
                self._full_boundary(now_ns)
            return
        timer = self._timer
        events = timer.events
        start_ns = phases.optimizer_start_ns
        if start_ns is not None:
            phases.optimizer_start_ns = None
            events.append(("optimizer", start_ns, now_ns))
        own_ns = timer.overhead_ns + phases.own_ns
        phases.own_ns = 0
        phases.inputs.clear()
        phases.drawn_samples = None
        device = None if timer.device is None else timer.device.finish()
        step = self.step
        self.step = step + 1
        waiting.append((step, timer.start_ns, now_ns, self._wall_ns(), events[:], own_ns, self.knobs, usual, device))
        events.clear()  # clear the same list: others hold it
        timer.start_ns = now_ns
        ended_ns = self._now_ns()
        events.append(("overhead", now_ns, ended_ns))
        timer.overhead_ns = ended_ns - now_ns

    def count_step(self, now_ns: int) -> CountedSums:
        """Count the finished step and return the sums; the next measured step passes them to the records."""
        passed = self.passed
        if passed is None:
            passed = self.passed = CountedSums()
        passed.steps += 1
        passed.wall_ns += self._timer.skip(now_ns)
        if self._counts.has_news:
            samples, tokens, _ = self._counts.drain(None, False)
            passed.said(samples, tokens)
            self._phases.guesses_samples = True
        self.step += 1
        return passed

    @property
    def evaluation_ns(self) -> int:
        """How long evaluations lasted up to now."""
        return self._phases.evaluation_ns

    def saved(self) -> None:
        """Record that a checkpoint of the present state is complete."""
        self.saved_steps = self.step

    def current_step(self) -> tuple[int, int | None]:
        """Return the number of the current step and when it began (monotonic ns; None before the first)."""
        return self.step, self._timer.start_ns

    def wake(self) -> None:
        """Make the next boundary a full one; may be called from any thread."""
        self.is_plain = False
        self.counted_until = 0


def raw_step(plain: PlainStep) -> RawStep:
    """Return the RawStep of a plain step."""
    _, start_ns, end_ns, _, events, own_ns, _, _, device = plain
    return RawStep(start_ns, end_ns, events, own_ns, was_marked=False, absorbed=None, device=device)


def take_inputs(phases: PhaseHooks, vitals: UtilizationMeter) -> tuple[StepInputs, bool]:
    """Return the ending step's inputs and whether a forward of it was counted; begin the next step."""
    was_counted = phases.tells_inputs and vitals.is_counted
    inputs, guess, drawn = phases.inputs, phases.forward_samples, phases.drawn_samples
    if not inputs and not phases.has_looked:
        phases.saw_no_call()
    for shape, _ in inputs[: phases.once_inputs]:
        if shape:
            guess = (guess or 0) + shape[0]
    flops = vitals.take_flops(inputs)
    rest = phases.batches.rest
    samples = phases.batches.spend(drawn, guess)
    is_guess = samples is None and guess is not None
    is_usual = not (phases.has_looked or vitals.wants_count or rest or phases.batches.rest)
    elements = phases.looked_elements
    for shape, _ in inputs:
        elements = plus(elements, math.prod(shape))
    known = guess if samples is None else samples
    found = StepInputs(inputs[:] if is_usual else None, drawn, known, is_guess, flops, elements)
    inputs.clear()
    phases.has_looked = False
    phases.forward_samples = phases.once_inputs = phases.drawn_samples = phases.looked_elements = None
    return found, was_counted


class Like(NamedTuple):
    """The measured step whose proportions counted steps are given."""

    wall_ns: int
    phases: Mapping[str, int]
    samples: int | None
    knobs: Knobs


class CountedSteps:
    """Adds counted steps to `totals` and their cost to `budget`; the caller holds the records' lock."""

    def __init__(self, totals: Totals, budget: OverheadBudget, calibrations: Calibrations, stops: StopDetector) -> None:
        self._totals = totals
        self._budget = budget
        self._calibrations = calibrations
        self._stop_detector = stops
        self.last: Like | None = None
        """The last measured step."""

    def add(self, passed: CountedSums, like: Like, end_ns: int, price_ns: int) -> list[Stop]:
        """Add the steps up to `end_ns`, each of which costs `price_ns` outside the hooks.

        Return the stops of the process during them.
        """
        passed.cost_ns += passed.steps * price_ns
        self._budget.passed(passed.wall_ns, passed.cost_ns)
        stops = self._stop_detector.stops(end_ns - passed.wall_ns, end_ns) if passed.wall_ns >= LATE_NS_MIN else []
        stopped_ns = sum(stop.end_ns - stop.start_ns for stop in stops)
        phases = {
            name: duration * (passed.wall_ns - stopped_ns) // like.wall_ns if like.wall_ns else 0
            for name, duration in like.phases.items()
            if name not in ("overhead", "checkpoint", STOPPED)
        }
        if stopped_ns:
            phases[STOPPED] = stopped_ns
        ledger = estimate(passed.wall_ns, phases, self._calibrations.find(like.knobs))
        samples, tokens = passed.samples, passed.tokens
        if samples is None and like.samples is not None:
            samples = like.samples * passed.steps
        self._totals.add(ledger, samples, tokens, steps=passed.steps)
        return stops

    def add_rest(self, boundary: StepBoundary, price_ns: int) -> list[Stop]:
        """Add the steps after the last measured one, when the job ends; return the stops of the process during them."""
        passed, boundary.passed = boundary.passed, None
        _, end_ns = boundary.current_step()
        if passed is None or not passed.steps or self.last is None or end_ns is None:
            return []
        return self.add(passed, self.last, end_ns, price_ns)

    def goodbye(self, hello: JobHello, reason: str, wall_ns: int) -> Goodbye:
        """Return the last record, with the totals if there was a step."""
        totals, has_any = self._totals, self._totals.steps > 0
        return Goodbye(
            job=hello.job,
            rank=hello.rank,
            reason=reason,
            wall_ns=wall_ns,
            totals=totals.ledger if has_any else None,
            total_steps=totals.steps if has_any else None,
            total_samples=totals.samples,
            total_tokens=totals.tokens,
            total_overhead_ns=self._budget.cost_ns if has_any else None,
        )
