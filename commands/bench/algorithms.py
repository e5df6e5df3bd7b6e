"""Runs `pacecar bench net --algorithms` in one rank: measures under one setting of NCCL after another.

NCCL reads its settings when a process makes its first communicator.  So each is measured by new processes, one a rank,
which meet at the job's own store under a prefix of their own.  This process is in no group; it starts them, and on rank
0 takes what they print.  NCCL's own choice is measured first and last, so that a link that changes meanwhile shows.

A setting that this machine does not have (NVLS without NVSwitch) fails on all ranks, and the others go on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click
import msgspec
from torch.distributed.distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from pacecar.safe_files import output

from ..joining_ranks import JoinError, choose_backend
from ..shared_options import complain, print_json
from .document import AlgorithmsBench, NetBench, SettingBench
from .text import winner_lines
from .tuner_csv import DEFAULT, NcclSetting, find_winners, tuner_csv

__all__ = ["run_algorithms"]

ENDED = "pacecar-bench/ended/"

PROGRAM = (sys.executable, "-m", "pacecar", "bench", "net")

END_SECONDS = 60.0
"""The ranks' processes end within milliseconds of each other; a lost rank's never does."""


def run_algorithms(  # the command's options
    settings: Sequence[NcclSetting],
    operations: Sequence[str],
    arguments: Sequence[str],
    *,
    backend: str | None,
    timeout_seconds: float,
    csv: Path | None,
    as_json: bool,
    environ: Mapping[str, str] = os.environ,
) -> int:
    """Measure as one of the ranks and return the exit code; `arguments` are those of `pacecar bench net` for each run.

    0: NCCL's own choice was measured, and at least one setting.  1: not.

    Raises:
        JoinError: the backend has no algorithms, or the ranks do not meet.
        OSError: the file cannot be written.
    """
    if choose_backend(backend) != "nccl":
        raise JoinError("--algorithms does not apply to gloo, which has no algorithms to choose from, only to nccl")
    store = _open_store(timeout_seconds, environ)
    is_first = environ["RANK"] == "0"
    runs: list[tuple[str, NcclSetting | None]] = [
        (DEFAULT, None), *((str(setting), setting) for setting in settings), (DEFAULT, None),
    ]  # fmt: skip
    done: list[SettingBench] = []
    for number, (name, setting) in enumerate(runs):
        own = operations if setting is None else [one for one in operations if one in setting.operations]
        variables = {} if setting is None else setting.environment()
        if own:
            if is_first and not as_json:
                click.echo(f"# {name}: {' '.join(f'{key}={value}' for key, value in variables.items())}".rstrip(": "))
            bench, failure = _measure([*arguments, *_prefix(number), *_each("--op", own)], {**environ, **variables})
        else:
            bench, failure = None, f"NCCL has it for none of {', '.join(operations)}"
        done.append(SettingBench(setting=name, environment=variables, bench=bench, failure=failure))
    result = AlgorithmsBench(settings=tuple(done), winners=find_winners(done))
    if is_first:
        _report(result, csv, as_json=as_json)
    _leave(store, environ)
    measured = {one.setting for one in done if one.failure is None}
    return 0 if DEFAULT in measured and len(measured) > 1 else 1


def _open_store(timeout_seconds: float, environ: Mapping[str, str]) -> Store:
    """Return the job's store, which rank 0 hosts unless torchrun does."""
    try:
        store: Store = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))[0]
    except (RuntimeError, ValueError) as error:
        raise JoinError(f"no store at {environ['MASTER_ADDR']}:{environ['MASTER_PORT']}: {error}") from error
    return store


def _prefix(number: int) -> list[str]:
    return ["--store-prefix", f"pacecar-bench/{number}"]


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


def _measure(arguments: Sequence[str], environ: Mapping[str, str]) -> tuple[NetBench | None, str | None]:
    """Run one process of this rank; return what it printed (rank 0 only), or why it failed."""
    # As with torchrun: the store is there already.
    given = {**environ, "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with _ended_with_us(subprocess.Popen(
        [*PROGRAM, *arguments, "--json"], env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )) as process:  # fmt: skip
        out, err = process.communicate()
    if process.returncode == 0 and not out:
        return None, None
    try:
        bench = msgspec.json.decode(out, type=NetBench)
    except msgspec.DecodeError:
        lines = err.strip().splitlines()
        return None, lines[-1] if lines else f"exit code {process.returncode}"
    return bench, bench.failure


@contextmanager
def _ended_with_us(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """Kill the process if this one is asked to end."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        process.kill()
        process.wait()


def _report(result: AlgorithmsBench, csv: Path | None, *, as_json: bool) -> None:
    if as_json:
        print_json(result)
    else:
        for line in winner_lines(result):
            click.echo(line)
    if csv is not None and any(one.bench is not None for one in result.settings):
        with output(csv) as file:
            file.write(tuner_csv(result).encode())


def _leave(store: Store, environ: Mapping[str, str]) -> None:
    """Tell rank 0 that this rank is done; rank 0 waits for all, because it may host the store."""
    ranks = range(int(environ["WORLD_SIZE"]))
    with suppress(RuntimeError):
        store.set(f"{ENDED}{environ['RANK']}", "1")
        if environ["RANK"] == "0":
            try:
                store.wait([f"{ENDED}{rank}" for rank in ranks], timedelta(seconds=END_SECONDS))
            except RuntimeError:
                complain("bench net: not all ranks came to the end")
