"""Joins the process group of commands that every rank of a job runs: `pacecar bench net` and `pacecar preflight`."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from .shared_options import fail

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

__all__ = ["JoinError", "choose_backend", "first_line", "join_ranks", "require_rank_variables"]

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Set by torchrun, read by torch.distributed's env://."""

ABSENT_NAMED_MAX = 32

LOOK_SECONDS = 0.05


class JoinError(RuntimeError):
    """This rank cannot join; the message says why and what to do."""


def require_rank_variables(how: str, environ: Mapping[str, str] = os.environ) -> None:
    """Exit with code 2 unless a launcher has set what ranks need to meet; `how` says how to start several."""
    if all(name not in environ for name in ("RANK", "WORLD_SIZE")):
        fail(how, code=2)
    for name in RANK_VARIABLES:
        if not environ.get(name):
            fail(
                f"{name} is not set, unlike others of {', '.join(RANK_VARIABLES)}: use torchrun, or set all four",
                code=2,
            )
        if not name.startswith("MASTER_ADDR") and not environ[name].isdecimal():
            fail(f"{name}={environ[name]} is not a number", code=2)
    if int(environ["WORLD_SIZE"]) < 2:
        fail(how, code=2)


def choose_backend(chosen: str | None) -> str:
    """Return the backend: `chosen`, else NCCL where there are GPUs."""
    import torch
    import torch.distributed as dist

    return chosen or ("nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo")


def join_ranks(
    chosen: str | None,
    timeout_seconds: float,
    environ: Mapping[str, str],
    *,
    prefix: str = "",
    meet_seconds: float | None = None,
) -> tuple[Store, torch.device, str]:
    """Join the group; return its store, this rank's device and the backend.

    `prefix` sets its keys apart if other processes of the same ranks use the store too.  `timeout_seconds` is the limit
    of one operation between ranks and, without `meet_seconds`, for all to come.

    Raises:
        JoinError: there is no such device, or not all ranks came in time.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    backend = choose_backend(chosen)
    device = torch.device("cpu")
    if backend == "nccl":
        if not (torch.cuda.is_available() and dist.is_nccl_available()):
            raise JoinError("backend nccl needs NVIDIA GPUs and a torch built with it; otherwise use --backend gloo")
        local = int(environ.get("LOCAL_RANK", "0"))
        if local >= torch.cuda.device_count():
            raise JoinError(
                f"LOCAL_RANK is {local}, but there are {torch.cuda.device_count()} GPUs: start fewer ranks here"
            )
        device = torch.device("cuda", local)
        torch.cuda.set_device(device)
    timeout, meet_seconds = timedelta(seconds=timeout_seconds), meet_seconds or timeout_seconds
    try:
        store, rank, ranks = next(iter(rendezvous("env://", timeout=timedelta(seconds=meet_seconds))))
        store = PrefixStore(prefix, store) if prefix else store
        _await_all(store, rank, ranks, meet_seconds)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise JoinError(
            f"not all of {environ.get('WORLD_SIZE')} ranks met at {environ.get('MASTER_ADDR')}:"
            f"{environ.get('MASTER_PORT')} within {meet_seconds:g} s: {first_line(error)}"
        ) from error
    return store, device, backend


def _await_all(store: Store, rank: int, ranks: int, seconds: float) -> None:
    """Wait until all ranks are here: a backend waits less long, and does not say who is absent.

    Raises:
        RuntimeError: some are not; it names them.
    """
    keys = [f"pacecar/here/{other}" for other in range(ranks)]
    store.set(keys[rank], "")
    if store.add("pacecar/here", 1) == ranks:
        store.set("pacecar/all", "")
    end = time.monotonic() + seconds
    while not store.check(["pacecar/all"]):
        if time.monotonic() > end:
            absent = [other for other, key in enumerate(keys) if not store.check([key])]
            named = ", ".join(map(str, absent[:ABSENT_NAMED_MAX])) + ", ..." * (len(absent) > ABSENT_NAMED_MAX)
            raise RuntimeError(f"no sign of rank {named}")
        time.sleep(LOOK_SECONDS)


def first_line(error: BaseException) -> str:
    """Return the first line of what it says, or its type."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
