"""Real ranks for the controller's tests: processes that join one gloo group and say on stdout what they saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

RANKS_SECONDS_MAX = 300
"""Some hundred tiny steps take seconds, a minute where the host takes half of the processors; this is against hangs."""

SETTINGS = {"OMP_NUM_THREADS": "1", "PACECAR_HOOK_OVERHEAD_BUDGET": "0.2"}
"""Short runs of short steps: with the usual budget a slow machine measures every second one, and they end too early."""

HERE = Path(__file__).parent

Ranks = Callable[[str, int, list[str], Mapping[str, str]], list[str]]


@pytest.fixture(scope="session")
def fork_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Return run(script, world_size, arguments, environment): the stdout of each rank.

    Fails with the stderr of the ranks when one of them does not exit 0 in time; leaves no process behind.
    """
    server = subprocess.Popen(
        [sys.executable, str(HERE / "forkserver.py")],
        env=os.environ | SETTINGS,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdin is not None
    assert server.stdout is not None
    ask, hear = server.stdin, server.stdout

    def run(script: str, world_size: int, arguments: list[str], environment: Mapping[str, str]) -> list[str]:
        folder = tmp_path_factory.mktemp("said")
        ranks = [
            {
                "environment": {**environment, "RANK": str(r), "LOCAL_RANK": str(r), "WORLD_SIZE": str(world_size)},
                "output": str(folder / f"output{r}"),
                "errors": str(folder / f"errors{r}"),
            }
            for r in range(world_size)
        ]
        request = {"script": str(HERE / script), "arguments": arguments, "seconds": RANKS_SECONDS_MAX, "ranks": ranks}
        print(json.dumps(request), file=ask, flush=True)
        codes = json.loads(hear.readline() or "[null]")
        if any(code != 0 for code in codes):
            errors = "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("errors*")))
            pytest.fail(f"{script} exited {codes} (None: not within {RANKS_SECONDS_MAX} s):\n{errors}")
        return [Path(rank["output"]).read_text() for rank in ranks]

    yield run
    ask.close()
    hear.close()
    server.wait(10)


@pytest.fixture(scope="session")
def run_ranks(fork_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return run(script, world_size, jobs): for each of `jobs` (options for the script) what each rank said.

    The jobs run one after the other in the same processes, which meet at the file STORE.
    """

    def run(script: str, world_size: int, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        store = tmp_path_factory.mktemp("ranks") / "store"
        outputs = fork_ranks(script, world_size, [json.dumps(jobs)], {"STORE": str(store)})
        answers = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
        return [list(ranks_of_job) for ranks_of_job in zip(*answers, strict=True)]

    return run
