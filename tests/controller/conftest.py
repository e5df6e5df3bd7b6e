"""Real ranks for the controller's tests: processes that join one gloo group and print what they saw."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.kit import ranks

SETTINGS = {"PACECAR_HOOK_OVERHEAD_BUDGET": "0.2"}
"""Short runs of short steps: with the usual budget a slow machine measures every second one, and they end too early."""

HERE = Path(__file__).parent

Ranks = Callable[[str, int, list[str], Mapping[str, str]], list[str]]


@pytest.fixture(scope="session")
def fork_ranks() -> Ranks:
    """Return run(script, world_size, arguments, environment): each rank's stdout; fails if one does not exit 0."""

    def run(script: str, world_size: int, arguments: list[str], environment: Mapping[str, str]) -> list[str]:
        return ranks.run_ranks([HERE / script, *arguments], world_size, environ={**SETTINGS, **environment})

    return run


@pytest.fixture(scope="session")
def run_ranks(fork_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return run(script, world_size, jobs): for each of `jobs` (options for the script) each rank's answer.

    The jobs run one after the other in the same processes, which meet at the file STORE.
    """

    def run(script: str, world_size: int, jobs: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        store = tmp_path_factory.mktemp("ranks") / "store"
        outputs = fork_ranks(script, world_size, [json.dumps(jobs)], {"STORE": str(store)})
        answers = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
        return [list(ranks_of_job) for ranks_of_job in zip(*answers, strict=True)]

    return run
