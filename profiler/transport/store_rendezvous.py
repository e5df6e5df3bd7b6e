"""Checks through the job's store, before any collective, that all ranks are present with the same configuration.

A collective that one rank does not join hangs the others.  So ranks must find out by other means if one of them does
not attach or is configured differently.  A store does not block: a key exists or it does not.

A store may outlive its ranks: torchrun's agent keeps its store while it restarts failed workers (torch 2.13,
dynamic_rendezvous.py), so it still has the keys of the previous life, with verdict and addresses.  So every key
contains `life`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["MEET_SECONDS", "RendezvousError", "consult", "life", "meet"]

MEET_SECONDS = 30.0
"""How long ranks wait for each other.  All attach after building the same model, so a later rank does not attach."""

MEET_POLL_SECONDS = 0.002
MEET_POLL_SECONDS_MAX = 0.02
"""Pauses between two polls of the store: short at first, because all ranks usually arrive at the same time."""


def life(world_size: int) -> str:
    """Return a name for this life of the job's ranks: the same on all of them, and a new one after a restart."""
    return f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}of{world_size}"


class RendezvousError(RuntimeError):
    """Not all ranks arrived, or they are configured differently; nothing was started."""


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
    """Return once all ranks have arrived with the same `claim`; other arguments are as for `consult`.

    Raises:
        RendezvousError: a rank did not arrive in time, or has a different claim.
    """

    def judge(claims: Sequence[str]) -> str:
        other = next((r for r, c in enumerate(claims) if c != claim), None)
        if other is not None:
            raise RendezvousError(f"rank {other} has {claims[other]}, rank 0 has {claim}")
        return ""

    consult(store, rank, world_size, claim, judge, name=name, seconds=seconds, absent="did not attach", rest=rest)


def consult(
    store: Any,  # noqa: ANN401  as above
    rank: int,
    world_size: int,
    said: str,
    judge: Callable[[Sequence[str]], str],
    *,
    name: str,
    seconds: float,
    absent: str,
    rest: Callable[[float], object] = time.sleep,
) -> str:
    """Tell the other ranks what this one `said`; return rank 0's conclusion, `judge` of what all ranks said.

    The verdict is one key, written by compare-and-set: a rank that waited too long writes "no" unless "go" is already
    there.  So either all ranks that arrived go on or none does, whatever the order of arrival.
    `name` must be the same on all ranks and used once; `absent` says what ranks missing after `seconds` did not do.
    `rest` waits between two polls, and may raise to end the rendezvous for this rank.

    Raises:
        RendezvousError: a rank did not arrive in time, or `judge` raised it on rank 0; all ranks raise the same.
    """
    prefix = f"pacecar/{life(world_size)}/{name}"
    store.set(f"{prefix}/rank{rank}", said)
    deadline = time.monotonic() + seconds
    keys = [f"{prefix}/rank{r}" for r in range(world_size)]
    if not store.check([keys[rank]]):  # torch's FileStore after its file was removed; other calls then never return
        raise RendezvousError("the job's store forgets what is written to it")
    pause = MEET_POLL_SECONDS
    while not store.check([f"{prefix}/verdict"]):
        if rank == 0 and store.check(keys):
            try:
                verdict = "go: " + judge([store.get(key).decode() for key in keys])
            except RendezvousError as error:
                verdict = f"no: {error}"
            store.compare_set(f"{prefix}/verdict", "", verdict)
        elif time.monotonic() > deadline:
            missing = [r for r, key in enumerate(keys) if not store.check([key])]
            reason = f"ranks {missing[:8]} {absent}" if missing else "rank 0 did not answer"
            store.compare_set(f"{prefix}/verdict", "", f"no: {reason} within {seconds:g} s")
        else:
            rest(pause)
            pause = min(2 * pause, MEET_POLL_SECONDS_MAX)
    verdict = store.get(f"{prefix}/verdict").decode()
    if not verdict.startswith("go: "):
        raise RendezvousError(verdict.removeprefix("no: "))
    return str(verdict.removeprefix("go: "))
