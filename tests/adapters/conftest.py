"""The adapters' jobs run on two gloo ranks, in processes of their own; the tests run here."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import python_with, settings, stand_ins

from tests.kit.ranks import run_ranks

RANKS_SECONDS_MAX = 400
"""Importing a library takes ten seconds on a busy machine, a job some seconds; this is only against hangs."""

Jobs = list[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="session")
def run_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[dict[str, Any]]]]:
    """Return run(library, script, jobs, kind): for each of `jobs` ([name, options]) what each of two ranks said.

    All jobs run one after the other in the same two processes, with the "real" library or with its "stand-in".
    """
    said: dict[str, list[list[dict[str, Any]]]] = {}

    def run(library: str, script: str, jobs: Jobs, kind: str = "real") -> list[list[dict[str, Any]]]:
        key = json.dumps([library, script, jobs, kind])  # a fixture is set up again when its parameter returns
        if key not in said:
            said[key] = run_anew(library, script, jobs, kind)
        return said[key]

    def run_anew(library: str, script: str, jobs: Jobs, kind: str) -> list[list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp("ranks")
        outputs = run_ranks(
            [Path(__file__).with_name(script), json.dumps(jobs)], 2, folder=folder, seconds=RANKS_SECONDS_MAX,
            python=python_with(library if kind == "real" else "torch"),
            environ={**settings(), "STORE": str(folder / "store")}
            | ({"PYTHONPATH": stand_ins()} if kind == "stand-in" else {}),
        )  # fmt: skip
        answers = [json.loads(output.strip().splitlines()[-1]) for output in outputs]
        return [list(ranks_of_job) for ranks_of_job in zip(*answers, strict=True)]

    return run
