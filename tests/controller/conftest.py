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

RANKS_SECONDS_MAX = 60
"""A job of a few hundred tiny steps takes seconds; importing torch on a busy machine takes most of it."""


@pytest.fixture
def run_ranks(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return run(script, world_size, *arguments): each rank's last line of stdout, as JSON.

    Fails with the stderr of the ranks when one of them does not exit 0 in time; leaves no process behind.
    """

    def run(script: str, world_size: int, *arguments: str, ok: bool = True) -> list[dict[str, Any]]:
        store = tmp_path / f"store{len(list(tmp_path.iterdir()))}"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(world_size), "STORE": str(store)}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name(script)), *arguments],
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
            pytest.fail(f"{script} {arguments} did not end within {RANKS_SECONDS_MAX} s: {_tails(ranks)}")
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        codes = [process.returncode for process in ranks]
        if ok and any(codes):
            pytest.fail(f"{script} {arguments} exited {codes}:\n" + "\n".join(err[-3000:] for _, err in outputs))
        return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]

    return run


def _tails(ranks: list[subprocess.Popen[str]]) -> list[str]:
    for process in ranks:
        if process.poll() is None:
            process.kill()
    return [(process.communicate()[1] or "")[-2000:] for process in ranks]
