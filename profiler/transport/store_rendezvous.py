"""Did all ranks come, and for the same thing?  Asked through the job's store, before any collective.

A collective that one rank does not join hangs the others, so ranks that were configured differently, or of which one
does not attach, must find out by other means.  A store has no such trouble: a key is there or it is not.

A store may outlive its ranks: torchrun's agent keeps its own while it starts failed workers anew (torch 2.13,
dynamic_rendezvous.py), so the keys of the life before are still there, verdict and addresses too.  Hence `life` in
every key.

Also here, because every side road needs it: how to let go of a collective that will never complete.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from typing import Any

__all__ = ["MEET_SECONDS", "RendezvousError", "keep_for_ever", "life", "meet"]

MEET_SECONDS = 30.0
"""Ranks attach after the same model was built; longer apart than this means that a rank does not attach."""

MEET_POLL_SECONDS = 0.02


def keep_for_ever(*things: object) -> None:
    """Never let `things` go, not even at the interpreter's end.

    gloo's worker thread drops its hold on a work some time after it completed or failed.  If that is the last hold it
    frees tensors that python knows, needs the GIL for it, and when the interpreter is ending just then the process
    aborts ("terminate called without an active exception", pytorch issues 38228 and 190489).  A work that python
    holds for ever is never freed by the worker.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def life(world_size: int) -> str:
    """Return a name for this life of the job's ranks, the same on all of them and another one after a restart."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}of{world_size}"


class RendezvousError(RuntimeError):
    """The ranks did not all come, or want different things; nothing was started."""


def meet(
    store: Any,  # noqa: ANN401  dist.Store; its methods are untyped
    rank: int,
    world_size: int,
    claim: str,
    *,
    name: str,
    seconds: float,
    rest: Callable[[float], object] = time.sleep,
) -> None:
    """Return when all ranks came with the same `claim`; `name` must be the same on all ranks and used once.

    The verdict is one key, written by compare-and-set: a rank that waited too long writes "no" unless "go" is there
    already.  So either all ranks that came go on or none does, whatever the order of arrival.
    `rest` waits between two looks, and may raise to end the meeting for this rank.

    Raises:
        MeetingError: some rank did not come in time, or came with another claim.
    """
    prefix = f"pacecar/{life(world_size)}/{name}"
    store.set(f"{prefix}/rank{rank}", claim)
    deadline = time.monotonic() + seconds
    keys = [f"{prefix}/rank{r}" for r in range(world_size)]
    if not store.check(
        [keys[rank]]
    ):  # torch's FileStore, once somebody removed its file; other calls then never return
        raise RendezvousError("the job's store forgets what is written to it")
    while not store.check([f"{prefix}/verdict"]):
        if rank == 0 and store.check(keys):
            claims = [store.get(key).decode() for key in keys]
            other = next((r for r, c in enumerate(claims) if c != claim), None)
            verdict = "go" if other is None else f"no: rank {other} has {claims[other]}, rank 0 has {claim}"
            store.compare_set(f"{prefix}/verdict", "", verdict)
        elif time.monotonic() > deadline:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            reason = f"ranks {missing[:8]} did not attach" if missing else "rank 0 did not answer"
            store.compare_set(f"{prefix}/verdict", "", f"no: {reason} within {seconds:g} s")
        else:
            rest(MEET_POLL_SECONDS)
    verdict = store.get(f"{prefix}/verdict").decode()
    if verdict != "go":
        raise RendezvousError(verdict.removeprefix("no: "))
