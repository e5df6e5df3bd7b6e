"""Real ranks for the controller's tests: processes that join one gloo group and say on stdout what they saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RANKS_SECONDS_MAX = 120
"""Some hundred tiny steps take seconds, importing torch takes more on a busy machine; this is only against hangs."""

SETTINGS = {"OMP_NUM_THREADS": "1", "PACECAR_HOOK_OVERHEAD_BUDGET": "0.2"}
"""Short runs of short steps: with the usual budget a slow machine measures every second one, and they end too early."""


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return run(script, world_size, jobs): for each of `jobs` (options for the script) what each rank said.

    The jobs run one after the other in the same processes: starting torch takes longer than they do.  Fails with the
    stderr of the ranks when one of them does not exit 0 in time; leaves no process behind.
    """

    def run(script: str, world_size: int, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        store = tmp_path_factory.mktemp("ranks") / "store"
        environment = {**os.environ, **SETTINGS, "WORLD_SIZE": str(world_size), "STORE": str(store)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), json.dumps(jobs)],
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]
        outputs: list[tuple[str, str]] = []
        try:
            outputs.extend(process.communicate(timeout=RANKS_SECONDS_MAX) for process in ranks)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{script} did not end within {RANKS_SECONDS_MAX} s: {_tails(ranks)}")
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        codes = [process.returncode for process in ranks]
        if any(codes):
            pytest.fail(f"{script} exited {codes}:\n" + "\n".join(err[-3000:] for _, err in outputs))
        answers = [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]
        return [list(ranks_of_job) for ranks_of_job in zip(*answers, strict=True)]

    return run


def _tails(ranks: list[subprocess.Popen[str]]) -> list[str]:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    return [(process.communicate()[1] or "")[-2000:] for process in ranks]
