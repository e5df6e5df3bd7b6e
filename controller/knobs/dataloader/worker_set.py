"""Starts and ends one set of a data loader's workers, as a copy of the user's loader, which is never touched.

The copy has its own workers and prefetching, draws from an `IndexTap` instead of the sampler, and reports whether
random numbers are drawn.  torch waits for workers to end when their iterator goes.  A training step must not wait, so
an unneeded set ends on a thread of its own.  `switchable_loader` decides when to start a set and which is in force.
"""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from pacecar.torch_internals import find

from .index_sampler import IndexFeed, IndexTap
from .randomness_check import Draws, WatchedCollate, WatchedInit

__all__ = ["WorkerSet", "WorkerSetting", "Workers", "sampler_of"]

RETIRING_MAX = 4
"""Sets of workers that may end on threads at once; for one more the caller waits, as torch does at the end of an epoch.
"""


@dataclass(frozen=True, slots=True)
class WorkerSetting:
    """Worker processes (0: the training process loads) and the batches that each keeps ready."""

    workers: int
    prefetch: int

    @property
    def in_flight(self) -> int:
        """Index lists that torch takes from the sampler ahead of delivery."""
        return self.workers * self.prefetch


class Workers:
    """One set of workers: a copy of the user's loader with its own numbers, and the tap that it draws from."""

    def __init__(self, loader: DataLoader[Any], tap: IndexTap, setting: WorkerSetting, *, is_home: bool) -> None:
        self.loader = loader
        self.tap = tap
        self.setting = setting
        self.is_home = is_home
        self.iterator: Iterator[Any] = iter(())

    def open(self, feed: IndexFeed) -> None:
        """Begin to load from `feed`; everything requested before must have been delivered or taken back."""
        self.tap.feed, self.tap.is_open = feed, True
        self.iterator = iter(self.loader)

    def pids(self) -> tuple[int, ...]:
        """Return the worker processes."""
        return tuple(w.pid for w in getattr(self.iterator, "_workers", ()) if w.pid is not None)

    def shut_down(self) -> None:
        """End the processes and wait for them; do nothing if the training process itself loads."""
        shut_down = getattr(self.iterator, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


class WorkerSet:
    """Starts and ends sets of workers for the user's `loader`; `home` is the user's own setting."""

    def __init__(self, loader: DataLoader[Any], home: WorkerSetting, draws: Draws) -> None:
        self._loader = loader
        self._home = home
        self._draws = draws
        self._numbers = itertools.count()
        self._retiring: list[threading.Thread] = []

    def start(
        self, setting: WorkerSetting, feed: IndexFeed, generator: torch.Generator | None = None, *, is_own: bool = False
    ) -> Workers:
        """Start a set of workers.  `is_own`: it takes its seed where torch would, else from a generator of its own."""
        number = next(self._numbers)
        is_home = setting == self._home
        clone = copy.copy(self._loader)
        # A tap must not refer back to its user: in a reference cycle workers would outlive their last use.  If the
        # training process loads by itself, only the data draws from the generators after the tap.
        begin = self._draws.begin if setting.workers == 0 else _do_nothing
        tap = IndexTap(number, feed, sampler_of(self._loader), begin)
        if not is_own:
            generator = torch.Generator()
            generator.manual_seed((torch.initial_seed() + number) % 2**63)
        # Bypass __setattr__, which protects a loader in use; this copy is not in use yet.
        clone.__dict__.update(
            {
                "num_workers": setting.workers,
                "prefetch_factor": setting.prefetch if setting.workers else None,
                "persistent_workers": setting.workers > 0,  # so that `iter` wakes idle workers; see `retire`
                "timeout": self._loader.timeout if setting.workers else 0,
                "generator": generator,
                "collate_fn": WatchedCollate(self._loader.collate_fn, self._draws),
                "worker_init_fn": WatchedInit(self._loader.worker_init_fn, self._draws),
                "_iterator": None,
                ("sampler" if self._loader.batch_sampler is None else "batch_sampler"): tap,
            }
        )
        if not is_home:
            clone.__dict__["check_worker_number_rationality"] = (
                _do_nothing  # torch warns about the user's own number only
            )
        workers = Workers(clone, tap, setting, is_home=is_home)
        workers.open(feed)
        if not is_home:
            _unwatch(workers.iterator)
        return workers

    def retire(self, workers: Workers) -> None:
        """End a set of workers without waiting for it."""
        iterator, workers.iterator = workers.iterator, iter(())
        workers.loader.__dict__["_iterator"] = None
        shut_down = getattr(iterator, "_shutdown_workers", None)
        if shut_down is None:  # the training process itself
            return
        self._retiring = [thread for thread in self._retiring if thread.is_alive()]
        thread = threading.Thread(target=shut_down, name="pacecar-loader", daemon=True)
        thread.start()
        self._retiring.append(thread)
        if len(self._retiring) > RETIRING_MAX:
            self._retiring.pop(0).join()

    def close(self, timeout_seconds: float) -> None:
        """Wait for sets of workers that are ending, at most this long."""
        for thread in self._retiring:
            thread.join(timeout_seconds / max(1, len(self._retiring)))


def sampler_of(loader: DataLoader[Any]) -> Any:  # noqa: ANN401  a sampler of the user's
    """Return what the loader asks for the next batch: its batch sampler, or its sampler if it makes no batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def _do_nothing() -> None:
    pass


def _unwatch(iterator: object) -> None:
    """Have a worker's death found where its batch is waited for, instead of raised wherever the training thread is.

    torch raises from a signal handler when a process that it watches dies.  For our workers it must not: `next` then
    finds the worker gone within 5 s, and the epoch falls back to the user's own setting.
    """
    remove = find("torch.utils.data._utils.signal_handling._remove_worker_pids")
    if remove is not None and getattr(iterator, "_worker_pids_set", False):
        remove(id(iterator))
        iterator._worker_pids_set = False  # type: ignore[attr-defined]  # else the end removes them again, and raises
