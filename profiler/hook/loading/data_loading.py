"""Lets the user's loop report data waits, batch sizes and checkpoints, which hooks cannot see.

All of it is optional: anything not reported is guessed from forward's input or charged to `unknown`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from pacecar.profiler.timing.failure_guard import FailureGuard
from pacecar.profiler.timing.sample_counts import StepCounts
from pacecar.profiler.timing.step_timer import EVENTS_MAX, StepTimer
from pacecar.profiler.utilization.model_flops_utilization import UtilizationMeter

from ..phase_hooks import PhaseHooks
from .batch_lengths import BatchLengths
from .job_length import JobLength
from .timed_loader import TimedLoader, guess_samples

__all__ = ["DataLoading"]

T = TypeVar("T")


class DataLoading:
    """The hook's interface for the user's loop; on the training thread."""

    def __init__(
        self,
        timer: StepTimer,
        guard: FailureGuard,
        counts: StepCounts,
        phases: PhaseHooks,
        vitals: UtilizationMeter,
        *,
        now_ns: Callable[[], int],
        batch_samples: Callable[[Any], int | None] | None,
        batch_tokens: Callable[[Any], int | None] | None,
        job_length: JobLength,
    ) -> None:
        self._timer = timer
        self._guard = guard
        self._counts = counts
        self._phases = phases
        self._utilization = vitals
        self._now_ns = now_ns
        self._batch_samples = batch_samples
        self._job_length = job_length
        self._lengths = BatchLengths()
        self._batch_tokens = batch_tokens
        self.checkpoint_depth = 0
        """The number of nested `checkpoint` bodies that are running."""
        self._checkpointed_ns: int | None = None

    def data(self, loader: Iterable[T]) -> Iterable[T]:
        """Return `loader` with its waits timed and its batches counted; it can be iterated as often as the loader."""
        self.watch_loaders()
        return TimedLoader(
            loader,
            now_ns=self._now_ns,
            waits=self._timer.waits,
            waited=self._guard.wrap(self._timer.waited),
            drawn=self._guard.wrap(self._drawn),
        )

    def watch_loaders(self) -> None:
        """Start recording the lengths of torch loaders' batches; `drew` is called for those not from `data`."""
        if self._guard.is_alive:  # a script may iterate its loader again after the hook has ended
            self._lengths.install()

    def drew(self, iterator: object) -> None:
        """Record that the loop got a batch from `iterator`, not through `data`."""
        self._guard.wrap(self._drew)(iterator)

    def exhausted(self, iterator: object) -> None:
        """Record that `iterator` is exhausted."""
        self._phases.batches.end(id(iterator))

    def _drew(self, iterator: object) -> None:
        self._job_length.drew(iterator)
        length = self._lengths.take(iterator)
        if length is not None:
            self._phases.batches.draw(id(iterator), length)

    def close(self) -> None:
        """Note no more."""
        self._lengths.remove()

    def waits(self) -> None:
        """Record that the loop begins to wait for a batch that does not come through `data`."""
        if self._guard.is_alive:  # a forked child must not mark a device
            self._timer.waits()

    def waited(self, start_ns: int, end_ns: int) -> None:
        """Record that the loop has the batch; whether it trains on it is not known here."""
        self._guard.wrap(self._waited)(start_ns, end_ns)

    def _waited(self, start_ns: int, end_ns: int) -> None:
        self._timer.waited(start_ns, end_ns)
        if len(self._timer.events) >= EVENTS_MAX:  # an evaluation ends no step
            self._phases.absorb()

    def count(self, *, samples: int | None = None, tokens: int | None = None) -> None:
        """Add to this step's samples and tokens; overrides what the hook would guess."""
        self._counts.add(samples, tokens)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Charge the time of the body, which fetches a batch, to the ledger's `data_wait`."""
        self._timer.waits()
        start = self._now_ns()
        try:
            yield
        finally:
            self._guard.wrap(self._timer.waited)(start, self._now_ns())

    @contextlib.contextmanager
    def checkpoint(self) -> Iterator[None]:
        """Charge the body, which saves a checkpoint, to the ledger's `checkpoint`; nested calls count once."""
        start, self.checkpoint_depth = self._now_ns(), self.checkpoint_depth + 1
        try:
            yield
        finally:
            self.checkpoint_depth -= 1
            if not self.checkpoint_depth:
                self._guard.wrap(self._checkpointed)(start, self._now_ns())

    def was_paused(self, since_ns: int) -> bool:
        """Return whether the loop has saved a checkpoint or evaluated the model since then."""
        pauses = (self._checkpointed_ns, self._phases.evaluated_ns)
        return any(pause_ns is not None and pause_ns >= since_ns for pause_ns in pauses)

    def _checkpointed(self, start_ns: int, end_ns: int) -> None:
        self._checkpointed_ns = end_ns
        self._timer.events.append(("checkpoint", start_ns, end_ns))
        self._utilization.checkpointed(end_ns - start_ns)

    def _drawn(self, batch: object, iterator: object) -> None:
        self._job_length.drew(iterator)
        is_guess = False
        if self._batch_samples is not None:
            samples = self._batch_samples(batch)
        else:
            samples = self._lengths.take(iterator)
            if samples is None:
                samples, is_guess = guess_samples(batch), True
        if samples is not None:
            self._phases.guesses_samples = False
        tokens = None if self._batch_tokens is None else self._batch_tokens(batch)
        self._counts.draw(samples, tokens, is_guess=is_guess)
