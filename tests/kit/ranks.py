"""Start the ranks of a job as torchrun would, each in the hands of the test, and collect how they ended.

torchrun itself takes seconds to start and to notice an end; it is started only where it is what a test is about.
Output goes to files: a rank whose full pipe nobody reads stands still, and its peers wait for it in a collective.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

import pytest

from tests.kit.forking_python import forking_python
from tests.kit.net import free_port

__all__ = ["LATENESS_WORDS", "Ended", "Rank", "finish", "run_ranks", "start_ranks"]

ROOT = Path(__file__).resolve().parents[2]

RANKS_SECONDS_MAX = 300.0
"""Against hangs: some hundred tiny steps take seconds, a minute where the host takes half of the processors."""

LATENESS_WORDS = (" is late since step ", " is no longer late ")
"""What is logged of a rank that a busy machine makes late: true, and nothing that a test of something else asks for."""

SETTINGS = {"OMP_NUM_THREADS": "1", "PACECAR_TUNE_REMEMBER": "false"}


@dataclass(frozen=True)
class Rank:
    """A rank that was started."""

    process: subprocess.Popen[str]
    out: IO[str]
    err: IO[str]


class Ended(NamedTuple):
    """How a rank ended: its exit code as `subprocess` tells it, None if it was killed after the limit; what it said."""

    code: int | None
    out: str
    err: str


def start_ranks(
    program: Sequence[str | Path],
    ranks: int,
    *,
    python: str | None = None,
    environ: Mapping[str, str | None] = {},
    folder: Path | None = None,
    address: str = "127.0.0.1",
    prefixes: Sequence[Sequence[str]] | None = None,
    present: Sequence[int] | None = None,
) -> list[Rank]:
    """Start the ranks in `present` (all, unless said) of a job of `ranks`, each as `PREFIX PYTHON PROGRAM...`.

    `python` is a forked one with torch loaded, unless said.  `environ` goes over this process's environment, from which
    pacecar's own variables are taken; None takes one away.  `folder` is where they run.
    """
    if python is None:
        python = forking_python()
    port = free_port()
    started = []
    for rank in range(ranks) if present is None else present:
        given: dict[str, str | None] = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")},
            "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": address, "MASTER_PORT": str(port), **SETTINGS, "PYTHONPATH": str(ROOT), **environ,
        }  # fmt: skip
        out, err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115  closed by finish
        process = subprocess.Popen(
            [*(prefixes[rank] if prefixes else ()), python, *map(str, program)],
            env={name: value for name, value in given.items() if value is not None},
            cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=err, text=True,
        )  # fmt: skip
        started.append(Rank(process, out, err))
    return started


def finish(started: Sequence[Rank], seconds: float = RANKS_SECONDS_MAX) -> list[Ended]:
    """Wait for the ranks; kills those that have not ended after `seconds`."""
    deadline = time.monotonic() + seconds
    codes: list[int | None] = []
    try:
        for rank in started:
            try:
                codes.append(rank.process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    finally:
        for rank in started:
            if rank.process.poll() is None:
                rank.process.kill()
                rank.process.wait()
    ended = []
    for rank, code in zip(started, codes, strict=True):
        texts = []
        for stream in (rank.out, rank.err):
            stream.seek(0)
            texts.append(stream.read())
            stream.close()
        ended.append(Ended(code, *texts))
    return ended


def run_ranks(
    program: Sequence[str | Path],
    ranks: int = 2,
    *,
    python: str | None = None,
    environ: Mapping[str, str | None] = {},
    folder: Path | None = None,
    seconds: float = RANKS_SECONDS_MAX,
) -> list[str]:
    """Run a job to its end and return what each rank said; fails, with their stderr, where one did not exit 0."""
    ended = finish(start_ranks(program, ranks, python=python, environ=environ, folder=folder), seconds)
    if any(rank.code != 0 for rank in ended):
        errors = "\n".join(rank.err[-3000:] for rank in ended)
        codes = [rank.code for rank in ended]
        pytest.fail(f"{program[0]} exited {codes} (None: not within {seconds:.0f} s):\n{errors}")
    return [rank.out for rank in ended]
