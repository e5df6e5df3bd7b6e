"""Ends a step in ten microseconds: a plain boundary only notes that the step ended, all others go to the full one.

Between two boundaries the job evicts everything of ours from the processor's caches.  So a boundary costs by the number
of objects that it touches and not by the work done there: a call is a microsecond or two, an attribute of one more
object another half.  Most steps are *plain*: their inputs are those of the last step, and there is no listener, window,
trace, count or record due.  For these `optimizer_stepped` appends one tuple and does a few stores; whoever writes the
records (`step_records`) evaluates them.  All other steps, and all doubtful ones, go through `care`, the hook's full
boundary.

    is_plain      set by `care` when it finds nothing pending, cleared by whatever becomes pending, on any thread
    full_boundary_step     a step that `care` must see before it begins: a window may be due

Left out: every rule about what is to be done (`hook`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from pacecar.records import Knobs

from ..timing.cuda_timer import DeviceStep
from ..timing.failure_guard import FailureGuard
from ..timing.sample_counts import StepCounts, plus
from ..timing.step_timer import Event, RawStep, StepTimer
from ..timing.torch_compile import is_tracing, step_out_of_graph
from ..utilization.model_flops_utilization import UtilizationMeter
from .phase_hooks import InputKey, PhaseHooks

__all__ = [
    "UNUSUAL",
    "WAITING_MAX",
    "CountedStep",
    "CountedSums",
    "PlainStep",
    "StepBoundary",
    "StepInputs",
    "raw_step",
    "take_inputs",
]

WAITING_MAX = 512
"""The most steps that wait for their records; with more, the training thread writes the records itself."""

PlainStep = tuple[int, int, int, int, list[Event], int, Knobs, "StepInputs", DeviceStep | None]
"""Step, start, end, wall clock at the end, events, pacecar's own time, knobs, inputs, device."""


class StepInputs(msgspec.Struct, frozen=True):
    """Samples and FLOPs of a step with these inputs; `inputs` None: not valid for any other step.

    `drawn` are the samples of what the step drew from loaders that were seen; `is_guess`: `samples` are the first
    dimension of a tensor.
    """

    inputs: list[InputKey] | None
    drawn: int | None
    samples: int | None
    is_guess: bool
    flops: int | None


UNUSUAL = StepInputs(None, None, None, False, None)


class CountedStep(msgspec.Struct, frozen=True):
    """A step that was counted and not measured: when it was, and the settings in force.

    `disturbed`: it was traced, so that its pace says nothing about the settings.
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
    """The sums over steps that were counted and not measured."""

    def __init__(self) -> None:
        self.steps = 0
        self.wall_ns = 0
        self.cost_ns = 0
        self.samples: int | None = None
        self.tokens: int | None = None

    def said(self, samples: int | None, tokens: int | None) -> None:
        """Add what the user or the loader reported for one of them."""
        self.samples = plus(self.samples, samples)
        self.tokens = plus(self.tokens, tokens)


class StepBoundary:
    """The optimizer's post-hook with all that a plain step needs, in one object."""

    __slots__ = (
        "_care",
        "_counts",
        "_guard",
        "_now_ns",
        "_phases",
        "_timer",
        "_wall_ns",
        "counted_until",
        "full_boundary_step",
        "is_plain",
        "knobs",
        "passed",
        "step",
        "usual",
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
        care: Callable[[int], None],
    ) -> None:
        self._phases = phases
        self._timer = timer
        self._guard = guard
        self._counts = counts
        self._now_ns = now_ns
        self._wall_ns = wall_ns
        self._care = care
        self.is_plain = False
        self.full_boundary_step = 0
        self.counted_until = 0
        """Boundaries before that of this step are only counted."""
        self.passed: CountedSums | None = None
        """The steps that were only counted since the last measured one."""
        self.step = 0
        """The number of the step under way: how many were finished."""
        self.usual = UNUSUAL
        """The inputs of the last step, with its samples and FLOPs."""
        self.knobs = Knobs()
        self.waiting: deque[Any] = deque()
        """Finished steps without a record, each a PlainStep or what `care` appended: WAITING_MAX, plus one."""

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
                # Inline, not by `count_step`: the shorter the steps, the larger the share of this.
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
                self._care(now_ns)
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
        events.clear()  # the same list: others hold it
        timer.start_ns = now_ns
        ended_ns = self._now_ns()
        events.append(("overhead", now_ns, ended_ns))
        timer.overhead_ns = ended_ns - now_ns

    def count_step(self, now_ns: int) -> CountedSums:
        """Count the step that is over and return the sums; the next measured step brings them to the records."""
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

    def begun(self) -> tuple[int, int | None]:
        """Return the number of the step under way, and when it began (monotonic ns; None before the first)."""
        return self.step, self._timer.start_ns

    def wake(self) -> None:
        """Send the next boundary through `care`; from any thread."""
        self.is_plain = False
        self.counted_until = 0


def raw_step(plain: PlainStep) -> RawStep:
    """Return the RawStep of a plain step."""
    _, start_ns, end_ns, _, events, own_ns, _, _, device = plain
    return RawStep(start_ns, end_ns, events, own_ns, was_marked=False, absorbed=None, device=device)


def take_inputs(phases: PhaseHooks, vitals: UtilizationMeter) -> tuple[StepInputs, bool]:
    """Return the inputs of the step that ends, and whether a forward of it was counted; begin the next one."""
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
    found = StepInputs(inputs[:] if is_usual else None, drawn, guess if samples is None else samples, is_guess, flops)
    inputs.clear()
    phases.has_looked = False
    phases.forward_samples = phases.once_inputs = phases.drawn_samples = None
    return found, was_counted
