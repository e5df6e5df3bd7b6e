"""Times how long the job waits for data, and counts the samples of each batch.

The wait is the time inside the loader's `next()`, measured from outside, for any kind of loader: torch's DataLoader, a
generator, a streaming reader.  The number of samples in a batch comes from the batch sampler, if there is one
(`batch_lengths`).  Otherwise it is guessed: the first dimension of the first tensor is right for most batches; for
others the user passes a function or calls `DataLoading.count`.

Batches are read and passed on, never kept.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

import torch

__all__ = ["TimedLoader", "first_tensor", "guess_samples"]

T = TypeVar("T")

DEPTH_MAX = 4
"""Batches are tuples or dicts of tensors; deeper nesting is not searched on the step path."""


def first_tensor(batch: object, depth: int = DEPTH_MAX) -> torch.Tensor | None:
    """Return the first tensor that has a dimension in nested tuples, lists and mappings; None if there is none."""
    if isinstance(batch, torch.Tensor):
        return batch if batch.dim() else None
    if depth == 0 or isinstance(batch, str | bytes):
        return None
    parts: Iterable[object] = ()
    if isinstance(batch, Mapping):
        parts = batch.values()
    elif isinstance(batch, list | tuple):
        parts = batch
    for part in parts:
        found = first_tensor(part, depth - 1)
        if found is not None:
            return found
    return None


def guess_samples(batch: object) -> int | None:
    """Return the first dimension of the batch's first tensor; None if there is none."""
    tensor = first_tensor(batch)
    return int(tensor.shape[0]) if tensor is not None else None


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
