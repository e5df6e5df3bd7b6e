"""Determines how many samples a batch of torch's DataLoader has, from the indices that its batch sampler yields for it.

No dimension of the batch is certain.  But the loader gets the indices of each batch from its batch sampler, in one
method shared by all its iterators, and this method is observed.  The lengths wait in order, because with worker
processes indices are drawn several batches ahead.  Each epoch begins without any: an iterator with persistent workers
is reused, even after an epoch that the loop left early.  The script's loaders, iterators and samplers are not changed.

A batch of one index may have many samples if the data set yields whole batches, as DLRM's does, so its length is
unknown.  So are lengths from loaders without a batch sampler (`batch_size=None`) and loaders that are not torch's.  The
last batch of an iterable data set may be shorter than requested.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from pacecar.torch_internals import find

__all__ = ["BatchLengths"]

AHEAD_MAX = 4096
"""The most batches whose indices are drawn but that have not arrived; workers prefetch two each."""

_log = logging.getLogger(__name__)

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
