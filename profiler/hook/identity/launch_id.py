"""Agrees on the launch: a random number that all ranks of one start of a job share with no other start.

A name does not identify a job, because launchers use the port, the script or nothing, and users reuse names.  So the
first rank that attaches puts a random number into the job's store by compare-and-set, and all others read it.  No rank
waits for another: a rank that attaches late reads the same number, and one that never attaches is not missed.

    store of torch.distributed    the number in it; without its prefixes, so that a restart by torchrun's agent, which
                                  keeps its store, is the same launch
    a launcher, no store (MPI)    a digest of the user and of what the launcher gave to all ranks
    one process                   a random number, the same for everything attached in this process

A store may not answer: it is asked on a separate thread, and after AGREE_SECONDS the job goes on without it.

Two starts that share a store (a reused file, a TCPStore kept by a service) are not told apart: torch's own keys collide
there too.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import threading
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from pacecar.records.job_identity import LAUNCH, LAUNCH_DIGITS
from pacecar.torch_internals import need

__all__ = ["AGREE_SECONDS", "agree", "launch_of"]

AGREE_SECONDS = 5.0
"""A store answers within a few milliseconds even over a network; a job whose store is gone is about to fail."""

KEY = "pacecar/launch"

PREFIXES_MAX = 16
"""The most prefixes around the store itself; torch adds one or two."""

_JOB = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "LSB_JOBID", "PBS_JOBID")
_OF_MPI = (*_JOB, "PMIX_NAMESPACE")
"""Slurm's step is not included: mpirun starts the ranks of its own node outside of one."""

_OF_OTHERS = (*_JOB, "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")

_log = logging.getLogger(__name__)

_own: tuple[int, str] | None = None


def launch_of(name: str, world_size: int, environ: Mapping[str, str] = os.environ) -> str:
    """Return the launch of this process's job; `name` is the job's name.

    A job of several ranks with neither a store nor a launcher that distinguishes starts gets a digest of its user and
    name; users should name such jobs.
    """
    if dist.is_available() and dist.is_initialized():
        try:
            agreed = agree(need("torch.distributed.distributed_c10d._get_default_store")(), _of_process())
        except Exception as error:  # noqa: BLE001  the outer boundary: no job may fail for lack of a launch id
            agreed = None
            _log.warning("pacecar: cannot read the launch from the job's store: %s: %s", type(error).__name__, error)
        if agreed is not None:
            return agreed
    if world_size == 1:
        return _of_process()
    facts = _OF_MPI if environ.get("PMIX_NAMESPACE") else _OF_OTHERS
    said = [name, str(os.getuid()), str(world_size), *(f"{fact}={environ.get(fact, '')}" for fact in facts)]
    return hashlib.sha256("\n".join(said).encode()).hexdigest()[:LAUNCH_DIGITS]


def agree(store: Any, proposal: str, *, seconds: float = AGREE_SECONDS) -> str | None:  # noqa: ANN401  dist.Store
    """Return the launch in `store`, `proposal` if there is none yet; None: the store does not answer in time."""
    said: list[str | Exception] = []

    def ask() -> None:
        try:
            said.append(_exchange(store, proposal))
        except Exception as error:  # noqa: BLE001  raised on the caller's thread
            said.append(error)

    asking = threading.Thread(target=ask, name="pacecar-launch", daemon=True)
    asking.start()
    asking.join(seconds)
    if not said:
        _log.warning("pacecar: the job's store did not answer within %g s; the launch is unknown", seconds)
        return None
    if isinstance(said[0], Exception):
        raise said[0]
    return said[0]


def _exchange(store: Any, proposal: str) -> str:  # noqa: ANN401
    for _ in range(PREFIXES_MAX):
        inner = getattr(store, "underlying_store", None)
        if inner is None:
            break
        store = inner
    launch: str = store.compare_set(KEY, "", proposal).decode()
    if not store.check([KEY]):  # torch's FileStore after its file was removed
        raise LookupError("it forgets what is written to it")
    if not launch or not LAUNCH.fullmatch(launch):
        raise ValueError(f"{KEY!r} holds {launch[:40]!r}")
    return launch


def _of_process() -> str:
    """Return this process's own number; a forked child has a different one."""
    global _own
    if _own is None or _own[0] != os.getpid():
        _own = (os.getpid(), secrets.token_hex(LAUNCH_DIGITS // 2))
    return _own[1]
