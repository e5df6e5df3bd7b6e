"""Starts the scripts of these tests, each in a process group of its own with a time limit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import Any

import torch

from tests.kit.forking_python import forking_python
from tests.kit.net import free_port

__all__ = ["Ended", "run", "run_json"]


class Ended(Exception):  # noqa: N818  it may have ended well, with something else than what was asked for
    """A script that did not do what it should; the message holds the end of what it wrote."""


def run(
    *command: str, seconds: float, ranks: int = 1, environ: dict[str, str] | None = None, may_fork: bool = True
) -> list[subprocess.CompletedProcess[str]]:
    """Run `python -m command` once for each rank and return what they wrote, by rank.

    `may_fork`: the process may come from one that has imported torch, whose objects are frozen.

    Raises:
        Ended: one took longer than `seconds`; all are ended.
    """
    base = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks),
            "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", **(environ or {})}  # fmt: skip
    started = [
        subprocess.Popen(
            [_python() if may_fork else sys.executable, "-m", *command],
            env={**base, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    found = []
    try:
        for process in started:
            out, err = process.communicate(timeout=seconds)
            found.append(subprocess.CompletedProcess(process.args, process.returncode, out, err))
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"")[-1500:]
        raise Ended(f"{' '.join(command)} took more than {seconds:g} s: {said!r}") from error
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return found


def _python() -> str:
    """Return a python that starts faster where there is no GPU: what is forked from another cannot use CUDA."""
    return sys.executable if torch.cuda.is_available() else forking_python()


def run_json(
    *command: str, seconds: float, ranks: int = 1, environ: dict[str, str] | None = None, may_fork: bool = True
) -> dict[str, Any]:
    """Run a script as `run` does and return the JSON object in the last line of rank 0's stdout.

    Raises:
        Ended: it failed, or wrote no such line.
    """
    ended = run(*command, seconds=seconds, ranks=ranks, environ=environ, may_fork=may_fork)
    for rank, process in enumerate(ended):
        if process.returncode:
            raise Ended(f"{' '.join(command)}, rank {rank}: exit code {process.returncode}: {process.stderr[-1500:]}")
    lines = ended[0].stdout.strip().splitlines()
    if not lines:
        raise Ended(f"{' '.join(command)} wrote nothing: {ended[0].stderr[-1500:]}")
    said: dict[str, Any] = json.loads(lines[-1])
    return said
