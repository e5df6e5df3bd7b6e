"""Watches what the training loop draws from its loaders: the waits, the samples of each batch, and how much is left.

All that the loop may report (`DataLoading`) is optional: anything not reported is guessed or charged to `unknown`.

The wait is the time inside the loader's `next()`, measured from outside, for any kind of loader: torch's DataLoader, a
generator, a streaming reader.  Batches are read and passed on, never kept.

The number of samples in a batch comes from the indices that torch's DataLoader gets from its batch sampler, in one
method shared by all its iterators, which is observed.  The lengths wait in order, because with worker processes indices
are drawn several batches ahead.  Each epoch begins without any: an iterator with persistent workers is reused, even
after an epoch that the loop left early.  The script's loaders, iterators and samplers are not changed.  A batch of one
index may have many samples if the data set yields whole batches, as DLRM's does, so its length is unknown.  So are
lengths from loaders without a batch sampler (`batch_size=None`) and loaders that are not torch's.  The last batch of an
iterable data set may be shorter than requested.  An unknown length is guessed: the first dimension of the first tensor
is right for most batches; for others the user passes a function or calls `DataLoading.count`.

A job that is expected to end within a minute (`JobLength`) is not worth an early exact window.  Sources, in this order:
the seconds or steps expected by the configuration, and the length of the loader that the loop trains from.  The number
of epochs is unknown, so a job in its first epoch is expected to end with it, and a job in a later one to go on.  If
nothing is known, the job is expected to be long.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import default_collate

from pacecar.torch_internals import find

from ..timing.failure_guard import FailureGuard
from ..timing.sample_counts import StepCounts
from ..timing.step_timer import EVENTS_MAX, StepTimer
from ..utilization.model_flops_utilization import UtilizationMeter
from .module_calls import guess_samples
from .phase_hooks import PhaseHooks

__all__ = ["SHORT_JOB_NS", "BatchLengths", "DataLoading", "JobLength", "TimedLoader"]

_log = logging.getLogger(__name__)

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
        saved: Callable[[], None],
    ) -> None:
        self._timer = timer
        self._guard = guard
        self._counts = counts
        self._phases = phases
        self._utilization = vitals
        self._now_ns = now_ns
        self._batch_samples = batch_samples
        self._job_length = job_length
        self._saved = saved
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
            if self.checkpoint_depth == 1:
                self._saved()
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
        if self._phases.evaluation_start_ns is not None:
            self._phases.evaluation_start_ns += end_ns - start_ns
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


def _nothing() -> None:
    """Do nothing."""


class TimedLoader(Generic[T]):
    """`loader` with its waits reported; it can be iterated as often as the loader; `len()` and attributes pass through.

    `waits()` is called before each `next()`, `waited(start_ns, end_ns)` after it, even if the loader is exhausted, and
    `drawn(batch, iterator)` for each batch.  None of them may raise.
    """

    def __init__(
        self,
        loader: Iterable[T],
        *,
        now_ns: Callable[[], int],
        waited: Callable[[int, int], None],
        waits: Callable[[], None] = _nothing,
        drawn: Callable[[T, Iterator[T]], None],
    ) -> None:
        self._loader = loader
        self._now_ns = now_ns
        self._waits = waits
        self._waited = waited
        self._drawn = drawn

    def __iter__(self) -> Iterator[T]:
        self._waits()
        start = self._now_ns()
        iterator = iter(self._loader)  # starts worker processes, which counts as waiting for data too
        while True:
            try:
                batch = next(iterator)
            except StopIteration:
                self._waited(start, self._now_ns())
                return
            self._waited(start, self._now_ns())
            self._drawn(batch, iterator)
            yield batch
            del batch  # otherwise the generator keeps it while the loader makes the next one
            self._waits()
            start = self._now_ns()

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]  # a loader without length raises its own TypeError

    # Pickled and copied as the loader alone: our part belongs to this process.
    def __reduce__(self) -> tuple[Any, ...]:
        return cast, (None, self._loader)  # a standard-library function that returns its argument

    def __copy__(self) -> Iterable[T]:
        return copy.copy(self._loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> Iterable[T]:
        return copy.deepcopy(self._loader, memo)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the loader has
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._loader, name)


AHEAD_MAX = 4096
"""The most batches whose indices are drawn but that have not arrived; workers prefetch two each."""

_ITERATORS = "torch.utils.data.dataloader._BaseDataLoaderIter"
_INDICES = "torch.utils.data.dataloader._BaseDataLoaderIter._next_index"
_SENT, _RECEIVED = "_send_idx", "_rcvd_idx"
_COLLATE = "_collate_fn"
_OWN_NAME = "pacecar_batch_length"


class _Lengths:
    """The lengths of one iterator's batches, in order; the first `unseen` ones were drawn before `install`."""

    def __init__(self, unseen: int) -> None:
        self.ahead: deque[int | None] = deque(maxlen=AHEAD_MAX)
        self._unseen = unseen

    def begin_epoch(self) -> None:
        self.ahead.clear()
        self._unseen = 0

    def take(self) -> int | None:
        if self._unseen and self.ahead:
            self._unseen -= 1
            return self.ahead[0]
        return self.ahead.popleft() if self.ahead else None


class BatchLengths:
    """The lengths of coming batches, by iterator, from `install` to `remove`; on the thread that made it."""

    def __init__(self) -> None:
        self._waiting: weakref.WeakKeyDictionary[Any, _Lengths] = weakref.WeakKeyDictionary()
        self._thread = threading.get_ident()
        self._original: Callable[[Any], Any] | None = None
        self._ours: Callable[[Any], Any] | None = None

    def install(self) -> None:
        """Start observing; in a torch without that method all lengths are unknown."""
        original = find(_INDICES)
        if original is None or self._original is not None:
            return
        note = self._note

        def _next_index(iterator: Any) -> Any:  # noqa: ANN401  whatever the sampler names
            indices = original(iterator)
            if type(indices) is list:
                try:
                    note(iterator, _length(iterator, len(indices)))
                except Exception:  # noqa: BLE001  the script asked for a batch and must get it
                    _log.debug("the length of a batch was not recorded", exc_info=True)
            return indices

        self._original, self._ours = original, _next_index
        find(_ITERATORS)._next_index = _next_index

    def remove(self) -> None:
        """Restore torch's own method, unless it has been replaced since."""
        iterators = find(_ITERATORS)
        if self._original is not None and vars(iterators).get("_next_index") is self._ours:
            iterators._next_index = self._original
        self._original = self._ours = None

    def take(self, iterator: object) -> int | None:
        """Return the number of samples in the batch that `iterator` has just yielded; None if unknown."""
        own = getattr(type(iterator), _OWN_NAME, None)  # of the loader whose workers are tuned
        if isinstance(own, property):
            length: int | None = own.__get__(iterator)
            return length
        try:
            waiting = self._waiting.get(iterator)
        except TypeError:  # an object without weak references
            return None
        return None if waiting is None else waiting.take()

    def _note(self, iterator: object, length: int | None) -> None:
        if threading.get_ident() == self._thread:
            waiting = self._waiting.get(iterator)
            sent = getattr(iterator, _SENT, 0)  # without workers no batch is drawn ahead
            if waiting is None:
                # The batch that comes in this call counts as received already.
                unseen = sent - getattr(iterator, _RECEIVED, 0) + 1 if sent else 0
                waiting = self._waiting[iterator] = _Lengths(unseen)
            elif not sent:
                waiting.begin_epoch()
            waiting.ahead.append(length)


def _length(iterator: object, indices: int) -> int | None:
    """Return the samples in a batch of this many indices; None for one index that may be a whole batch."""
    return None if indices == 1 and getattr(iterator, _COLLATE, default_collate) is not default_collate else indices


SHORT_JOB_NS = 60_000_000_000
"""The ledger of a shorter job is not worth the second that it may cost."""


class JobLength:
    """The expected length of one job; used on the training thread."""

    def __init__(self, expected_seconds: float | None = None, expected_steps: int | None = None) -> None:
        self._expected_ns = None if expected_seconds is None else int(expected_seconds * 1e9)
        self._expected_steps = expected_steps
        self._last: int | None = None  # the iterator of the last batch
        self._first: int | None = None  # the iterator in use at the first call of `is_short`
        self._batches: int | None = None
        self._drawn = 0

    def drew(self, iterator: Any) -> None:  # noqa: ANN401  of any loader
        """Record that the loop has a batch from `iterator`."""
        key = id(iterator)
        if self._first is None and key != self._last:
            self._drawn, self._batches = 0, _batches_in(iterator)
        self._last = key
        if self._first in (None, key):
            self._drawn += 1

    def is_short(self, step: int, step_ns: int) -> bool:
        """Return whether the job is expected to last at most SHORT_JOB_NS, after `step` steps that took `step_ns` each.

        Call it when a step has ended, so that the last batch was one to train on.
        """
        if self._expected_ns is not None:
            return self._expected_ns <= SHORT_JOB_NS
        if self._expected_steps is not None:
            return self._expected_steps * step_ns <= SHORT_JOB_NS
        self._first = self._last if self._first is None else self._first
        if self._batches is None or self._last != self._first or self._drawn > self._batches:
            return False  # without a known length, or in a later epoch
        batches_per_step = max(1.0, self._drawn / max(1, step))
        return self._batches / batches_per_step * step_ns <= SHORT_JOB_NS


def _batches_in(iterator: Any) -> int | None:  # noqa: ANN401  of any loader
    try:
        return len(iterator)
    except TypeError:  # a generator, a stream
        return None
