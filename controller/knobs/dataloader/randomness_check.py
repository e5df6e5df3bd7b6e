"""Checks whether loading a batch draws random numbers, so that other workers would make other batches.

torch seeds each worker with a base seed plus its number, so an augmentation's draws depend on which worker handles the
sample and what it handled before.  With another number of workers every crop is another crop: as good, but not the same
run.  No dataset declares that it draws.  So the state of the global generators (torch, random, numpy) is compared after
each batch, behind the collate function: if it changed, something drew.

Runs in worker processes, whatever their start method: everything here can be pickled, and the finding is a byte in
shared memory.  A worker that is not forked imports this module again, perhaps hours after the job did.  If it cannot
(pacecar was upgraded or removed meanwhile), it uses the user's own functions in place of ours.

Generators of the dataset's own cannot be seen from outside (each worker has a copy).
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Draws", "SamplerWatch", "WatchedCollate", "WatchedInit", "fingerprint"]

BATCHES_EACH = 64
"""A worker checks its first batches up to this number (20 us each), then one in BATCHES_EVERY, for rare draws."""

BATCHES_EVERY = 256

LISTS_MAX = 16
"""Number of index lists during whose making the generators are compared."""


def fingerprint(*, with_torch: bool = True) -> int:
    """Return a hash of the global generators' states, which changes when one of them is drawn from."""
    numpy = sys.modules.get("numpy")
    states: list[object] = [random.getstate()]
    if with_torch:
        state = torch.get_rng_state()
        states.append(state.numpy().tobytes() if numpy else tuple(state.tolist()))
    if numpy is not None:  # whichever bit generator the script has set
        states.append(pickle.dumps(numpy.random.get_state(legacy=False)))
    return hash(tuple(states))


_MAKE = """
try:
    from pacecar.controller.knobs.dataloader import randomness_check
    made = getattr(randomness_check, kind)(*state)
except Exception:
    made = instead
"""


def _pickled(kind: str, state: tuple[Any, ...], *, instead: object) -> tuple[Any, ...]:
    """Return what pickle rebuilds as `kind(*state)`, or as `instead` in a process that cannot import this module.

    Pickle names a function to call, and only python's own are certain to exist.
    """
    scope = {"kind": kind, "state": state, "instead": instead}
    return eval, ("(exec(source, scope), scope['made'])[1]", {"source": _MAKE, "scope": scope})


class Draws:
    """Records whether anything drew between `begin` and `end`, in any process."""

    def __init__(self, seen: torch.Tensor | None = None) -> None:
        if seen is None:
            seen = torch.zeros(1, dtype=torch.uint8)
            seen.share_memory_()  # type: ignore[no-untyped-call]
        self._seen = seen
        self._before: int | None = None
        self._batches = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled("Draws", (self._seen,), instead=None)

    @property
    def were_seen(self) -> bool:
        """Whether a batch changed a global generator, in any worker."""
        return bool(self._seen.item())

    @property
    def is_due(self) -> bool:
        """Whether the next batch should be checked."""
        return self._batches < BATCHES_EACH or self._batches % BATCHES_EVERY == 0

    def begin(self) -> None:
        """Keep the state of the generators."""
        self._before = fingerprint() if self.is_due else None

    def end(self, *, goes_on: bool) -> None:
        """Compare with the last `begin`; `goes_on`: check what follows too, as nothing else draws in a worker."""
        is_due = self.is_due
        self._batches += 1
        if not is_due:
            return
        now = fingerprint()
        if self._before is not None and self._before != now:
            self._seen.fill_(1)
        self._before = now if goes_on else None


class SamplerWatch:
    """Records whether the sampler draws from a global generator as it goes, in its first lists; see `IndexFeed`."""

    def __init__(self) -> None:
        self.saw_draws = False
        self._lists = 0
        self._before: int | None = None

    def begin(self) -> None:
        """Keep the state of the generators before a list is made."""
        self._before = fingerprint() if self._lists < LISTS_MAX else None

    def end(self) -> None:
        """Compare after the list was made."""
        if self._before is not None:
            self._lists += 1
            self.saw_draws = self.saw_draws or self._before != fingerprint()


class WatchedCollate:
    """The user's collate function, with a check of the generators after it."""

    def __init__(self, collate: Callable[[Any], Any], draws: Draws) -> None:
        self._collate = collate
        self._draws = draws

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled("WatchedCollate", (self._collate, self._draws), instead=self._collate)

    def __call__(self, samples: Any) -> Any:  # noqa: ANN401  the user's
        """Return what the user's function returns."""
        batch = self._collate(samples)
        self._draws.end(goes_on=torch.utils.data.get_worker_info() is not None)
        return batch


class WatchedInit:
    """The user's worker_init_fn, if any, followed by recording the first state."""

    def __init__(self, init: Callable[[int], None] | None, draws: Draws) -> None:
        self._init = init
        self._draws = draws

    def __reduce__(self) -> tuple[Any, ...]:
        return _pickled("WatchedInit", (self._init, self._draws), instead=self._init)

    def __call__(self, worker: int) -> None:
        """Prepare the worker as the user wants it."""
        if self._init is not None:
            self._init(worker)
        self._draws.begin()
