"""Makes a gloo group of pacecar's own between all ranks of a job, without using a collective of the job.

`torch.distributed.new_group` is unsuitable: it is a collective that all ranks must call in the same order as the job's
own groups, so it would be matched with a different call of a rank that does not attach.  This group is built directly
from its class, outside torch's registry: it takes no group name, `destroy_process_group` does not know it, and its
collectives cannot be confused with the job's.  Its addresses are exchanged through the job's store.

The ranks must have met and proven their addresses (`rendezvous`).  Making a group ends with a first gather, so that
all ranks learn here, and not on the step path, if the group cannot work.  Since torch 2.7 a rank connects only to the
two neighbors that a gather needs; earlier versions connect every rank to every other.

A `SideGroup` has one gather at a time, which is never waited for.  Code with several at once (the votes of
`controller/consensus`) uses `make_group`, `gather` and `release`.
"""

from __future__ import annotations

import ctypes
import time
from array import array
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pacecar.torch_internals import find, need, own_has

from ..windows import recording_switch
from ..windows.session_pause import without_sessions
from .rendezvous import ADVICE, all_succeeded, consult, innermost, life

__all__ = [
    "CONNECT_TIMEOUT",
    "OPERATION_TIMEOUT",
    "SideGroup",
    "failure",
    "gather",
    "is_lost",
    "job_store",
    "make_group",
    "release",
]

_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed", "remote worker")
"""Texts in gloo's errors when a rank's process ended, and in torch's when the store's rank did."""

WORDS_MAX = 200

CONNECT_TIMEOUT = timedelta(seconds=60)
"""All ranks have met, so they make their group within moments; if one dies in between, the job ends anyway."""

OPERATION_TIMEOUT = timedelta(hours=6)
"""A rank may be stopped for hours while a gather is pending, and a gather that times out aborts gloo's connections."""

FIRST_GATHER_SECONDS = 5.0
"""The longest the first gather of a group may take; it takes milliseconds for ranks that can reach each other."""

FIRST_GATHER_POLL_SECONDS = 0.001

CLOSE_POLL_SECONDS = 0.005


def failure(error: BaseException) -> str:
    """Return what went wrong between the ranks, in one self-explanatory line."""
    if is_lost(error):
        return "the connection to another rank has ended"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:WORDS_MAX]}"


def is_lost(error: BaseException) -> bool:
    """Return whether `error` says that another rank's process ended, or closed its end."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GONE)


def job_store() -> Any:  # noqa: ANN401  dist.Store; its methods are untyped
    """Return the job's store, on its own connection if it can have one, so that a wait does not block the job.

    Torch before 2.7 cannot clone a store, so short requests go over the job's own connection.  A FileStore has no
    connection, and freeing a clone of it writes to the file.  If the process exits in the middle of that, every other
    rank's next call of its store reads the unfinished entry forever (torch 2.13, FileStore.cpp, `File::read`).
    """
    store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
    is_file = isinstance(innermost(store), dist.FileStore)  # type: ignore[attr-defined]
    return store.clone() if hasattr(store, "clone") and not is_file else store


def make_group(
    store: Any,  # noqa: ANN401  untyped, as what is returned
    name: str,
    rank: int,
    world_size: int,
    *,
    address: str,
    rest: Callable[[float], object] = time.sleep,
    members: Sequence[int] | None = None,
) -> Any:  # noqa: ANN401
    """Return the group called `name`, the same on all ranks and used once, in which this rank is at `address`.

    Waits until all ranks have made it and a first gather is complete, at most FIRST_GATHER_SECONDS for the latter;
    `rest` is as for `consult`.  `members` are the job's numbers of its ranks if it is not of the whole job.

    Raises:
        RendezvousError: a rank could not make the group, or the gather failed; all ranks raise the same.
    """
    places = dist.distributed_c10d.PrefixStore(f"pacecar/{life(world_size)}/{name}/gloo", store)
    kind: Any = need("torch.distributed.ProcessGroupGloo")
    options = _options(address)
    group: Any = None
    work: Any = None
    reason = ""
    try:
        with without_sessions():
            group = kind(places, rank, world_size, CONNECT_TIMEOUT if options is None else options)
        mine = torch.tensor([rank], dtype=torch.int64)
        work = gather(group, torch.empty(world_size, dtype=torch.int64), mine)
        reason = _first_gather(work, rest)
    except Exception as error:  # noqa: BLE001  whatever gloo raises: the other ranks wait to hear of it
        reason = failure(error)
    if reason:
        number = rank if members is None else members[rank]
        reason = f"rank {number}, at {address}, made no gloo group with its neighbours: {reason}; {ADVICE}"
    absent = "did not gather" if members is None else f"of {len(members)} from rank {members[0]} on did not gather"
    try:
        consult(
            store, rank, world_size, reason, all_succeeded, name=f"{name}/first",
            seconds=2 * FIRST_GATHER_SECONDS, absent=absent, rest=rest,
        )  # fmt: skip
    except BaseException:
        if group is not None:
            release(group, [] if work is None else [work])
        raise
    _keep_for_ever(work)  # see there
    if own_has(group, "torch.distributed.ProcessGroupGloo._set_default_timeout"):
        group._set_default_timeout(OPERATION_TIMEOUT)
    return group


def _first_gather(work: Any, rest: Callable[[float], object]) -> str:  # noqa: ANN401  dist.Work
    """Wait for `work`; return why it failed, or ""."""
    deadline = time.monotonic() + FIRST_GATHER_SECONDS
    while not work.is_completed():
        if time.monotonic() > deadline:
            return f"no answer within {FIRST_GATHER_SECONDS:g} s"
        rest(FIRST_GATHER_POLL_SECONDS)
    work.wait()
    return ""


def gather(group: Any, gathered: Any, mine: Any) -> Any:  # noqa: ANN401  dist.ProcessGroupGloo, tensors, dist.Work
    """Launch a gather of `mine` into `gathered`, which no profiler records; return its work.

    Gloo's thread closes the profiler's record of a collective when it is done, and a long collective may outlive the
    profiler's session, which frees the record.
    """
    recording_switch.pause()
    try:
        return group._allgather_base(gathered, mine)
    finally:
        recording_switch.resume()


def _keep_for_ever(*things: object) -> None:
    """Keep `things` alive forever, even at interpreter exit.

    gloo's worker thread drops its reference to a work some time after the work completed or failed.  If that is the
    last reference, it frees tensors known to Python and needs the GIL for it.  If the interpreter is just exiting, the
    process aborts ("terminate called without an active exception", pytorch issues 38228 and 190489).  The worker never
    frees a work to which Python keeps a reference.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def release(group: Any, works: Sequence[Any]) -> None:  # noqa: ANN401  dist.ProcessGroupGloo, dist.Work
    """Give up `group` and its latest gathers, so that the caller can safely drop its references.  Never waits.

    Freeing a group waits for its gathers, forever if another rank never joins one, so a group with an incomplete work
    in `works` is kept forever.  Freeing also waits for the group's threads, with the GIL held.  A thread that still
    holds one of the latest gathers must not be the one to free it: this needs the GIL, and both would wait forever.  So
    `works` are kept forever, complete or not.
    """
    _keep_for_ever(*works)
    if not all(work.is_completed() for work in works):
        _keep_for_ever(group)


class SideGroup:
    """A group with one gather at a time, which is polled and never waited for.  All calls come from one thread.

    `close_seconds`: how long `close` waits for a pending gather.  `members` is as for `make_group`.
    """

    def __init__(
        self, rank: int, world_size: int, *, close_seconds: float = 0.0, members: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._members = members
        self._world_size = world_size
        self._close_seconds = close_seconds
        self._group: Any = None
        self._work: Any = None
        self._last: Any = None
        self._words, self._heard = array("q"), array("q")
        self._mine: Any = None
        self._all: Any = None

    def open(
        self,
        store: Any,  # noqa: ANN401  dist.Store
        name: str,
        address: str,
        rest: Callable[[float], object] = time.sleep,
    ) -> None:
        """Make the group; each of its ranks must call this, after all of the job have met."""
        self._group = make_group(
            store, name, self._rank, self._world_size, address=address, rest=rest, members=self._members
        )

    @property
    def is_busy(self) -> bool:
        """Whether a gather is pending."""
        return self._work is not None

    def post(self, words: Sequence[int]) -> None:
        """Send `words` to all ranks, which send as many; the previous gather must have been taken."""
        assert self._work is None, "one gather at a time"
        if len(words) != len(self._words):
            self._make_room(len(words))
        self._words[:] = array("q", words)
        self._work = gather(self._group, self._all, self._mine)

    def _make_room(self, length: int) -> None:
        """Make the tensors, once per length: no gather follows an incomplete one.

        They are views of Python arrays, because reading and writing through a tensor's own methods costs ten times as
        much.
        """
        self._words = array("q", bytes(8 * length))
        self._heard = array("q", bytes(8 * length * self._world_size))
        self._mine = torch.frombuffer(self._words, dtype=torch.int64)
        self._all = torch.frombuffer(self._heard, dtype=torch.int64)

    def receive(self) -> list[list[int]] | None:
        """Return every rank's words if the gather is complete, else None.

        Raises:
            RuntimeError: the gather failed.
        """
        if self._work is None or not self._work.is_completed():
            return None
        work, self._work = self._work, None
        self._last = work  # for `close`
        work.wait()  # complete: returns or raises at once
        heard, length = self._heard.tolist(), len(self._words)
        return [heard[start : start + length] for start in range(0, len(heard), length)]

    def close(self) -> None:
        """Free the group, which ends its threads; a gather that is still incomplete is abandoned (`release`)."""
        deadline = time.monotonic() + self._close_seconds
        while self._work is not None and not self._work.is_completed() and time.monotonic() < deadline:
            time.sleep(CLOSE_POLL_SECONDS)
        group, self._group = self._group, None
        work, self._work = self._work, None
        last, self._last = self._last, None
        release(group, [gather for gather in (work, last) if gather is not None])


def _options(address: str) -> Any:  # noqa: ANN401  dist.ProcessGroupGloo._Options, private in name
    """Return the options of a group at `address`, with lazy connections if supported; None: torch has no options."""
    kind, parts = "torch.distributed.ProcessGroupGloo", ("", "._devices", "._threads", "._timeout")
    device = find(f"{kind}.create_device")
    if device is None or any(find(f"{kind}._Options{part}") is None for part in parts):
        return None
    options = need(f"{kind}._Options")()
    try:
        options._devices = [device(hostname=address, lazy_init=True)]
    except TypeError:  # before torch 2.7
        options._devices = [device(hostname=address)]
    options._threads = 1
    can_wait_longer = find(f"{kind}._set_default_timeout") is not None
    options._timeout = CONNECT_TIMEOUT if can_wait_longer else OPERATION_TIMEOUT
    return options
