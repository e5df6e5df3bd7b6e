"""Makes a gloo group of pacecar's own between all ranks of a job, without a collective of the job.

`torch.distributed.new_group` will not do: it is a collective that all ranks must call in the same order as the job's
own groups, so the call would be matched with another call of a rank that does not attach.  This group is built from its
class, beside torch's registry: it takes no group name, `destroy_process_group` does not know it, and its collectives
cannot be confused with the job's, nor the other way round.  Its addresses are exchanged through the job's store.

The ranks must have met (`store_rendezvous`).  A lazy group connects when its ranks first send something, and only with
the two neighbours that a gather needs, where torch offers that (since 2.7).  Else every rank connects with every other,
and `make_group` waits until all ranks have called it.

Left out: what is sent.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pacecar.torch_internals import find, need, own_has

from ..windows import recording_switch
from .store_rendezvous import life

__all__ = ["CONNECT_TIMEOUT", "OPERATION_TIMEOUT", "failure", "gather", "is_lost", "job_store", "make_group"]

_GONE = ("closed by peer", "reset by peer", "Broken pipe", "Connection refused", "Socket closed", "remote worker")
"""Texts in gloo's errors when a rank's process ended, and in torch's when the store's rank did."""

WORDS_MAX = 200

CONNECT_TIMEOUT = timedelta(seconds=60)
"""All ranks have met, so they make their group within moments; if one died in between, the job ends anyway."""

OPERATION_TIMEOUT = timedelta(hours=6)
"""A rank may be stopped for hours while a gather is under way.  A gather that times out aborts gloo's connections."""


def failure(error: BaseException) -> str:
    """Return what went wrong between the ranks, in one line that a person need not look up."""
    if is_lost(error):
        return "the connection to another rank has ended"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:WORDS_MAX]}"


def is_lost(error: BaseException) -> bool:
    """Return whether `error` says that another rank's process ended, or closed its end."""
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _GONE)


def job_store() -> Any:  # noqa: ANN401  dist.Store; its methods are untyped
    """Return the job's store, on a connection of its own where it can be cloned, so that a wait does not block the job.

    Torch before 2.7 cannot clone one: there short requests go over the job's own connection.
    """
    store: Any = need("torch.distributed.distributed_c10d._get_default_store")()
    return store.clone() if hasattr(store, "clone") else store


def make_group(store: Any, name: str, rank: int, world_size: int, *, is_lazy: bool) -> Any:  # noqa: ANN401  untyped
    """Return the group called `name`, the same on all ranks and used once; `is_lazy`: without waiting, if possible.

    Raises:
        RuntimeError: it could not be made, or not all ranks came within CONNECT_TIMEOUT.
    """
    places = dist.distributed_c10d.PrefixStore(f"pacecar/{life(world_size)}/{name}/gloo", store)
    kind: Any = need("torch.distributed.ProcessGroupGloo")
    options = _lazy_options() if is_lazy else None
    group = kind(places, rank, world_size, CONNECT_TIMEOUT if options is None else options)
    if own_has(group, "torch.distributed.ProcessGroupGloo._set_default_timeout"):
        group._set_default_timeout(OPERATION_TIMEOUT)
    return group


def gather(group: Any, gathered: Any, mine: Any) -> Any:  # noqa: ANN401  dist.ProcessGroupGloo, tensors, dist.Work
    """Launch a gather of `mine` into `gathered`, which no profiler records; return its work.

    Gloo's thread closes the profiler's record of a collective when it is done.  A long collective is done after the
    profiler's session has ended, which has freed the record by then.
    """
    recording_switch.pause()
    try:
        return group._allgather_base(gathered, mine)
    finally:
        recording_switch.resume()


def _lazy_options() -> Any:  # noqa: ANN401  dist.ProcessGroupGloo._Options, private in name
    """Return the options of a group that connects late, on one thread of its own; None where this torch cannot."""
    kind, parts = "torch.distributed.ProcessGroupGloo", ("", "._devices", "._threads", "._timeout")
    device = find(f"{kind}.create_default_device")
    if device is None or any(find(f"{kind}._Options{part}") is None for part in parts):
        return None
    options = need(f"{kind}._Options")()
    try:
        options._devices = [device(lazy_init=True)]
    except TypeError:  # before torch 2.7
        return None
    options._threads = 1
    options._timeout = OPERATION_TIMEOUT
    return options
