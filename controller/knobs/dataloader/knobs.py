"""Implements the knobs "loader_workers" and "loader_prefetch": which loader is tuned, to which values, and whether.

The first loader that goes through `pacer.data` counts as the training loader, unless another is named
(`pacer.data(loader, tune=True)`).  An evaluation's loader rarely limits a job, and tuning two at once measures neither.

Exact means the same batches in the same order with the same values.  `switchable_loader` keeps order and number.
Values are kept by refusing loaders whose values would depend on the workers: random augmentation, and, if the user
never had two workers, datasets that two processes must not share.  A user who accepts another draw of the augmentation
sets `loader_redraw = true`.

A sampler that can save its position is a special case, since the position in a checkpoint counts what is in flight.
The number of batches in flight then stays that of the user's own setting, and more workers keep fewer ready each.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable
from typing import TypeVar

from pacecar.config import TuneConfig

from ..actuator import Actuator, ActuatorError, powers_of_two
from ..batch.work_share import WorkShareActuator
from .switchable_loader import SwitchableLoader, unfit
from .worker_limits import WorkerRoom, entangled, read_room, workers_max
from .worker_set import WorkerSetting

__all__ = ["LoaderKnobs", "LoaderPrefetchActuator", "WorkersActuator"]

T = TypeVar("T")

NO_LOADER = "the data loader is not known: iterate over pacer.data(loader)"


class LoaderKnobs:
    """Both knobs of one loader, and the choice of the loader."""

    def __init__(self, config: TuneConfig, *, room: Callable[[tuple[int, ...]], WorkerRoom] = read_room) -> None:
        self._config = config
        self._room = room
        self._reason = NO_LOADER
        self.share: WorkShareActuator | None = None
        """The knob that shares work among ranks, if it may be turned: it needs the loader too."""
        self._is_named = False
        self.is_offered = False
        self.loader: SwitchableLoader | None = None
        names = [name for name in config.knobs if name.startswith("loader_")]
        self.actuators: list[Actuator] = []
        if "loader_workers" in names:
            self.actuators.append(WorkersActuator(self, config))
        if "loader_prefetch" in names:
            self.actuators.append(LoaderPrefetchActuator(self, config))

    def wrap(self, loader: Iterable[T], tune: bool | None) -> Iterable[T]:
        """Return what to iterate instead of `loader`: `loader` itself, unless it is the one to tune.

        `tune`: True names it, False rules it out, None takes the first.  Once the knobs are offered, the choice stays.
        """
        present = self.loader
        if present is not None and present.user_loader is loader:
            return present
        if (not self.actuators and self.share is None) or self.is_offered or tune is False or self._is_named:
            return loader
        if tune is None and (present is not None or self._reason is not NO_LOADER):
            return loader  # a first one was passed; even if it was unfit, a second one rarely limits the job
        self._is_named = tune is True
        self.loader = None
        reason = unfit(loader)
        if reason is not None:
            self._reason = reason
            return loader
        self.loader = SwitchableLoader(loader, self.share)  # type: ignore[arg-type]  # `unfit` checked its type
        return self.loader

    def close(self, timeout_seconds: float) -> None:
        """Wait for workers that are ending, at most this long; what is being iterated goes on."""
        if self.loader is not None:
            self.loader.close(timeout_seconds)

    def known(self) -> SwitchableLoader:
        """Return the loader.

        Raises:
            ActuatorError: there is none, or it cannot be tuned.
        """
        if self.loader is None:
            raise ActuatorError(self._reason)
        return self.loader

    def refusal(self) -> str | None:
        """Return why this job's loader must keep its workers, or None."""
        self.is_offered = True
        loader = self.loader
        if loader is None:
            return self._reason
        if loader.batches == 0:
            return "no batch came from the loader yet"
        reason = loader.failed or (None if self._config.loader_redraw else loader.random_reason())
        if reason is not None:
            return reason
        if loader.keeps_position and loader.home.in_flight == 0:
            return "the sampler can save its position, and workers would draw ahead of the checkpoint"
        if loader.home.workers <= 1:
            tied = entangled(loader.user_loader.dataset, loader.user_loader.collate_fn)
            if tied is not None:
                return f"the dataset never had two workers, and {tied}"
        # Without workers a loader has no start method of its own; this call does not set one.  Python 3.14: forkserver.
        method = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
        if loader.home.workers == 0 and method != "fork":
            return f"a first worker would run the script's top level again (start method {method}); try num_workers=1"
        return None

    def room(self) -> WorkerRoom:
        """Return what this machine has for the workers."""
        return self._room(self.known().pids)

    def workers_max(self) -> int:
        """Return the largest number of workers that this machine has room for."""
        loader = self.known()
        most = workers_max(
            self.room(),
            present=loader.agreed.workers,
            prefetch=loader.agreed.prefetch,
            batch_bytes=loader.batch_bytes,
        )
        return min(most, loader.home.in_flight) if loader.keeps_position else most

    def turn(self, *, workers: int | None = None, prefetch: int | None = None) -> None:
        """Use another number of workers or of batches ready.

        Raises:
            ActuatorError: it is refused; nothing was changed.
        """
        loader = self.known()
        setting = WorkerSetting(
            loader.agreed.workers if workers is None else workers,
            loader.agreed.prefetch if prefetch is None else prefetch,
        )
        if loader.keeps_position and workers:
            setting = WorkerSetting(workers, max(1, loader.home.in_flight // workers))
        loader.turn(setting, may_redraw=self._config.loader_redraw)


class _LoaderActuator(Actuator):
    def __init__(self, knobs: LoaderKnobs, config: TuneConfig) -> None:
        self._knobs = knobs
        self._config = config


class WorkersActuator(_LoaderActuator):
    """The knob "loader_workers"; a value takes effect with the next batch that the loop requests."""

    knob = "loader_workers"

    def value(self) -> int:
        """Return the number that all ranks turned to.

        Raises:
            ActuatorError: there is no loader to tune.
        """
        return self._knobs.known().agreed.workers

    def domain(self) -> tuple[int, ...]:
        """Return the powers of two within bounds that there is room for, and the present value."""
        most = min(self._config.loader_workers_max, self._knobs.workers_max())
        return powers_of_two(max(1, self._config.loader_workers_min), most, self.value())

    def refusal(self) -> str | None:
        """Return why the workers must stay as they are, or None."""
        reason = self._knobs.refusal()
        if reason is None and len(self.domain()) == 1:
            return "there is no room for another number of workers within the bounds"
        return reason

    def apply(self, value: int) -> None:
        """Load with `value` processes from the next batch on.

        Raises:
            ActuatorError: see `SwitchableLoader.turn`.
        """
        self._knobs.turn(workers=value)


class LoaderPrefetchActuator(_LoaderActuator):
    """The knob "loader_prefetch": batches that each worker keeps ready."""

    knob = "loader_prefetch"

    def value(self) -> int:
        """Return the number that all ranks turned to.

        Raises:
            ActuatorError: there is no loader to tune.
        """
        return self._knobs.known().agreed.prefetch

    def domain(self) -> tuple[int, ...]:
        """Return the powers of two within bounds that fit with all possible workers, and the present value."""
        loader = self._knobs.known()
        most = self._config.loader_prefetch_max
        if loader.batch_bytes:
            workers = max(1, self._knobs.workers_max())
            while most > loader.agreed.prefetch and workers_max(
                self._knobs.room(), present=0, prefetch=most, batch_bytes=loader.batch_bytes
            ) < min(workers, self._config.loader_workers_max):
                most //= 2
        return powers_of_two(self._config.loader_prefetch_min, most, self.value())

    def refusal(self) -> str | None:
        """Return why it must stay as it is, or None."""
        reason = self._knobs.refusal()
        if reason is not None:
            return reason
        loader = self._knobs.known()
        if loader.home.workers == 0:
            return "the loader has no worker processes that could keep batches ready"
        if loader.keeps_position:
            return "the sampler can save its position, which counts the batches that are ready"
        return "there is no room for another number within the bounds" if len(self.domain()) == 1 else None

    def apply(self, value: int) -> None:
        """Let each worker keep `value` batches ready, from the next batch on.

        Raises:
            ActuatorError: see `SwitchableLoader.turn`.
        """
        self._knobs.turn(prefetch=value)
