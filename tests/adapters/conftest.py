"""Libraries in an environment of their own: the adapters' jobs run there, on two gloo ranks; the tests run here."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import adapters_python, environment

RANKS_SECONDS_MAX = 400
"""Importing transformers takes ten seconds on a busy machine, a job some seconds; this is only against hangs."""


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return run(script, jobs): for each of `jobs` ([name, options]) what each of two ranks said."""

    def run(script: str, jobs: list[tuple[str, dict[str, Any]]]) -> list[list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("ranks")
        python = adapters_python()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        # Into files: a rank whose full pipe nobody reads yet stands still, and the other waits for it in a collective.
        out, err = ([folder / f"{kind}{rank}" for rank in range(2)] for kind in ("out", "err"))
        ranks = []
        for rank in range(2):
            with out[rank].open("w") as stdout, err[rank].open("w") as stderr:
                process = subprocess.Popen(
                    [python, str(Path(__file__).with_name(script)), json.dumps(jobs)],
                    env=environment(**world, STORE=str(folder / "store"), RANK=str(rank), LOCAL_RANK=str(rank)),
                    cwd=folder,
                    stdout=stdout,
                    stderr=stderr,
                )
                ranks.append(process)
        deadline = time.monotonic() + RANKS_SECONDS_MAX
        try:
            for process in ranks:
                process.wait(timeout=max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            errors = [path.read_text()[-3000:] for path in err]
            pytest.fail(f"{script} did not end within {RANKS_SECONDS_MAX} s: " + "\n".join(errors))
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        codes = [process.returncode for process in ranks]
        if any(codes):
            pytest.fail(f"{script} exited {codes}:\n" + "\n".join(path.read_text()[-4000:] for path in err))
        answers = [json.loads(path.read_text().strip().splitlines()[-1]) for path in out]
        return [list(ranks_of_job) for ranks_of_job in zip(*answers, strict=True)]

    return run
