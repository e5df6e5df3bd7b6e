"""Gives a running DataLoader other workers between two batches; every sample comes once and in order.

torch fixes workers and prefetching when an iterator is made, and an epoch may take days.  So the user's loader is never
touched: the loop iterates copies of it that differ in these two numbers and share the sampler through an `IndexFeed`.
To switch, the tap of the present copy is shut and another copy opens its own.  What the first has in flight is
delivered before anything that the second loads, so nothing is lost, repeated or out of order:

    requested of   A A A A A A B B B B B B    batches arrive in the order of the requests, whichever copy loads them
    delivered          A A A A A A B B B B
                           ^ the switch

At most two sets of workers exist at a time.  The idle one waits for the way back (a trial goes back and forth), and is
ended on a thread of its own if it was not needed for `IDLE_BATCHES_MAX` batches.  If a set that the user did not ask
for fails (memory, a dataset that does not support it), it costs no step: what is out is loaded again by workers of the
user's own number, and only what fails there too is raised.

The job's global generators are drawn from exactly as torch would with the user's own setting.  Those of the workers
cannot be (`randomness_check`); a loader whose workers draw is refused.

Not supported: iterable datasets (their order is the workers' own) and subclasses of DataLoader (they bring their own
iteration).  `knobs` decides which numbers are worth trying.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from pacecar.torch_internals import lacking

from ..actuator import ActuatorError
from ..batch.batch_slicing import leaves
from ..batch.work_share import WorkShareActuator
from .index_sampler import IndexFeed
from .randomness_check import Draws, SamplerWatch
from .worker_set import Workers, WorkerSet, WorkerSetting, sampler_of

__all__ = ["SwitchableLoader", "unfit"]

logger = logging.getLogger(__name__)

PREFETCH_DEFAULT = 2
"""torch's own default if there are workers and prefetch_factor is not set."""

IDLE_BATCHES_MAX = 256
"""Batches after which idle workers, which keep their memory, are ended; longer than the windows of a trial."""

MEASURED_BATCHES = 8
"""Number of batches whose size is measured; the largest counts."""


def unfit(loader: object) -> str | None:
    """Return why this loader's workers cannot be changed, whatever it loads; None if they can."""
    if type(loader) is not DataLoader:
        return f"the loader is a {type(loader).__name__}, not torch's own DataLoader"
    if isinstance(loader.dataset, IterableDataset) or type(loader.dataset).__name__.startswith("_"):
        return "the dataset is iterable: which samples come, and in which order, is up to its workers"
    if not getattr(loader, "in_order", True):
        return "in_order=False: the order of batches is up to the workers"
    if get_worker_info() is not None:
        return "the loader runs in a worker process"
    return lacking("loader", {"loader": loader})


class SwitchableLoader:
    """The user's `loader`, iterated through copies.  Length and attributes are the loader's own."""

    def __init__(self, loader: DataLoader[Any], share: WorkShareActuator | None = None) -> None:
        self._loader = loader
        self._share = share
        self.home = WorkerSetting(loader.num_workers, loader.prefetch_factor or PREFETCH_DEFAULT)
        self.setting = self.home
        self.agreed = self.home  # what all ranks turned to; differs from `setting` after a failure
        self.failed: str | None = None
        self.draws = Draws()
        self._sampler = SamplerWatch()
        self.batch_bytes: int | None = None
        self.batches = 0
        self.pids: tuple[int, ...] = ()  # of the workers in force, not process objects, which must end with the epoch
        self._epochs = 0
        self._standing: dict[int, Workers] = {}
        self.workforce = WorkerSet(loader, self.home, self.draws)

    def __iter__(self) -> Iterator[Any]:
        try:
            return _Epoch(self)
        except Exception as error:  # noqa: BLE001  the user's loader raises again if the error is its own
            self.fail(error)
            return iter(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    # Pickled and copied as the user's loader, which it stands for.
    def __reduce__(self) -> tuple[Any, ...]:
        return cast, (None, self._loader)  # a function of the standard library that returns what it is given

    def __copy__(self) -> DataLoader[Any]:
        return copy.copy(self._loader)

    def __deepcopy__(self, memo: dict[int, Any]) -> DataLoader[Any]:
        return copy.deepcopy(self._loader, memo)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401  whatever the loader has
        if name.startswith("__") or name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def user_loader(self) -> DataLoader[Any]:
        """The loader as the user made it."""
        return self._loader

    @property
    def keeps_position(self) -> bool:
        """Whether a checkpoint may hold the sampler's position, which runs ahead by what is in flight."""
        samplers = (self._loader.sampler, sampler_of(self._loader))
        return any(callable(getattr(sampler, "state_dict", None)) for sampler in samplers)

    def turn(self, setting: WorkerSetting, *, may_redraw: bool = False) -> None:
        """Use another setting from the next batch on; `may_redraw`: even if other random numbers will be drawn.

        Raises:
            ActuatorError: it is refused; nothing was changed.
        """
        if setting not in (self.agreed, self.home):
            reason = self.failed or (None if may_redraw else self.random_reason())
            if reason is not None:
                raise ActuatorError(reason)
        self.agreed = setting
        self.setting = self.home if self.failed is not None else setting

    def random_reason(self) -> str | None:
        """Return what was seen to draw random numbers that depend on the workers, or None."""
        if self.draws.were_seen:
            return "loading a batch draws random numbers (augmentation), and other workers would draw others"
        if self._sampler.saw_draws:
            return "the sampler draws from a global random generator as it goes, and others would draw before it"
        return None

    def close(self, timeout_seconds: float) -> None:
        """Wait for sets of workers that are ending, at most this long."""
        self.workforce.close(timeout_seconds)

    # --- what an epoch asks for -------------------------------------------------------------------

    def begin_epoch(self) -> tuple[IndexFeed, dict[int, Workers], Workers | None]:
        """Return a new epoch's feed, the sets of workers that it may use, and the one in force if it exists already.

        Samplers and generators are asked as often, and when, torch would with the user's own setting: workers request
        the first batch when the epoch begins, a training process that loads by itself when it wants that batch
        (`begin_loading`).
        """
        loader, home = self._loader, self.home
        is_reset = loader.persistent_workers and home.workers > 0 and self._epochs > 0
        self._epochs += 1
        feed = IndexFeed(
            sampler_of(self._loader),
            asks=1 if is_reset or home.workers == 0 else 2,
            ahead=home.in_flight if self.keeps_position else None,
            watch=self._sampler,
            share=None if self._share is None else self._share.begin_epoch(self._loader.sampler),
        )
        if home.workers == 0:
            feed.begin()
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)  # torch's seed of workers
            return feed, {}, None
        sets, self._standing = self._standing, {}
        for number in [n for n, workers in sets.items() if workers.setting != self.setting]:
            self.workforce.retire(sets.pop(number))
        current = next(iter(sets.values()), None)
        try:
            if current is None:
                generator = None if is_reset else loader.generator
                current = self.workforce.start(self.setting, feed, generator, is_own=not is_reset)
            else:
                current.open(feed)
        except Exception as error:
            if self.setting == self.home:
                raise
            current = self._make_home(feed, error)
        feed.complete()
        feed.shuffle()
        sets = {current.tap.number: current}
        if loader.persistent_workers:
            self._standing = sets
        self.pids = current.pids()
        return feed, sets, current

    def begin_loading(self, feed: IndexFeed) -> Workers:
        """Return the set of workers of an epoch that began without one."""
        try:
            current = self.workforce.start(self.setting, feed)
        except Exception as error:
            if self.setting == self.home:
                raise
            current = self._make_home(feed, error)
        feed.complete()
        self.pids = current.pids()
        return current

    def _make_home(self, feed: IndexFeed, error: Exception) -> Workers:
        """Go on with the user's own setting after the one in force failed with `error`."""
        self.fail(error)
        feed.take_back()
        return self.workforce.start(self.home, feed)

    def delivered(self, batch: object) -> None:
        """Count a batch that reached the training loop, and measure the first ones."""
        self.batches += 1
        if self.batches <= MEASURED_BATCHES:
            with contextlib.suppress(Exception):  # a batch is whatever the user makes
                self.batch_bytes = max(self.batch_bytes or 0, sum(tensor.nbytes for _, tensor in leaves(batch)))

    def fail(self, error: Exception) -> None:
        """Use only the user's own setting for the rest of the run: another one failed with `error`."""
        self.failed = f"other workers failed ({type(error).__name__}: {str(error)[:120]})"
        self.setting = self.home
        logger.warning("pacecar: %s; the data loader goes on with %d workers", self.failed, self.home.workers)


class _Epoch(Iterator[Any]):
    """One iteration over a SwitchableLoader."""

    def __init__(self, owner: SwitchableLoader) -> None:
        self._owner = owner
        self._since_turn = 0
        self._feed, self._sets, self._begun = owner.begin_epoch()

    @property
    def pacecar_batch_length(self) -> int | None:
        """How many samples the last batch has, by the batch sampler; the hook asks for it by this name."""
        return self._feed.batch_length

    @property
    def _current(self) -> Workers:
        """The set of workers in force."""
        if self._begun is None:
            self._begun = self._owner.begin_loading(self._feed)
            self._sets[self._begun.tap.number] = self._begun
        return self._begun

    def __next__(self) -> Any:  # noqa: ANN401  whatever the loader makes
        owner, feed = self._owner, self._feed
        if self._current.setting != owner.setting:
            self._turn(owner.setting)
        while True:
            number = feed.holder()
            holder = self._current if number is None else self._sets[number]
            try:
                batch = next(holder.iterator)
            except StopIteration:
                self._end()
                raise
            except Exception as error:
                if holder.is_home:
                    if feed.holder() is not None:
                        feed.delivered()  # torch goes on after it too
                    raise
                self._fall_back(error)
                continue
            feed.delivered()
            owner.delivered(batch)
            self._since_turn += 1
            if self._since_turn == IDLE_BATCHES_MAX and len(self._sets) > 1:
                self._dismiss()
            return batch

    def __len__(self) -> int:
        return len(self._owner)

    def _turn(self, setting: WorkerSetting) -> None:
        """Let the other set take over, unless it still has batches out: then at a later call."""
        owner, feed = self._owner, self._feed
        others = [workers for workers in self._sets.values() if workers is not self._current]
        if any(feed.out(workers.tap.number) for workers in others):
            return
        if feed.is_ahead:  # the sampler must not run further ahead than with the user's setting: one after the other
            self._current.tap.is_open = False
            if feed.out(self._current.tap.number):
                return
        target = next((workers for workers in others if workers.setting == setting and setting.workers), None)
        try:
            if target is not None:
                target.open(feed)
            else:
                self._dismiss()
                target = owner.workforce.start(setting, feed)
        except Exception as error:  # noqa: BLE001  no memory for a process, a dead worker: the present set goes on
            for number in {number for number in self._sets if self._sets[number] is not self._current}:
                owner.workforce.retire(self._sets.pop(number))
            feed.take_back(keep=self._current.tap.number)
            owner.fail(error)
            owner.setting = self._current.setting
            if feed.is_ahead:
                self._current.open(feed)  # its iterator had ended
            return
        self._sets[target.tap.number] = target
        self._current.tap.is_open = False
        self._begun = target
        owner.pids = target.pids()
        self._since_turn = 0

    def _dismiss(self) -> None:
        """End the sets that are not in force and have nothing out."""
        for number in [n for n, workers in self._sets.items() if workers is not self._current]:
            if not self._feed.out(number):
                self._owner.workforce.retire(self._sets.pop(number))

    def _fall_back(self, error: Exception) -> None:
        """Load again what is out, with the user's own setting."""
        self._owner.fail(error)
        for workers in self._sets.values():
            self._owner.workforce.retire(workers)
        self._feed.take_back()
        self._sets.clear()
        self._begun = self._owner.workforce.start(self._owner.home, self._feed)
        self._owner.pids = self._begun.pids()
        self._sets[self._begun.tap.number] = self._begun

    def _end(self) -> None:
        """End workers that do not persist, as torch would at the end of an epoch."""
        if not self._owner.user_loader.persistent_workers:
            for workers in self._sets.values():
                workers.shut_down()
            self._owner.pids = ()
