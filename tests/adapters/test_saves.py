"""What is saved, copied and pickled under transformers, Lightning, Accelerate and DeepSpeed is as without pacecar."""

from __future__ import annotations

import json
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from world import python_with, settings

from tests.job.autoattach.scripts import run

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.full]

JOB = Path(__file__).with_name("job_saves.py")

LIBRARIES = ("transformers", "lightning", "accelerate", "deepspeed 1", "deepspeed 3")

CASES = [
    (library, way) for library in LIBRARIES for way in ("attach", "run") if (library, way) != ("deepspeed 3", "run")
]
"""ZeRO steps optimizers of parameters that no module holds, so `run` does not find the model; one such job will do."""

SAYS = {"deepspeed 1": "does not attach: no module that the loop calls holds the optimizer's parameters"}
"""Under `run`, where it is not that the job is measured."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of every job: the libraries write its name into some of their files."""
    return tmp_path_factory.mktemp("saves") / "here"


@cache
def said(library: str, way: str, folder: Path) -> dict[str, dict[str, Any]]:
    """Return {moment: {operation: outcome}} of a job of two ranks."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    watched = ("--job", "saves") if way == "run" else None
    python = python_with(library.partition(" ")[0])
    done = run(JOB, library, way, str(folder), ranks=2, watched=watched, python=python, is_torchrun=False, **settings())
    assert done.code == 0, done.errors[-15:]
    if way == "run":
        assert any(SAYS.get(library, "measures job saves") in line for line in done.pacecar), done.pacecar
    found: dict[str, dict[str, Any]] = json.loads(done.out.strip().splitlines()[-1])
    return found


@pytest.mark.parametrize(("library", "way"), CASES)
def test_every_operation_has_the_outcome_that_it_has_without_pacecar(library: str, way: str, folder: Path) -> None:
    bare, seen = said(library, "bare", folder), said(library, way, folder)
    assert {"losses", "step 1", "step 4", "step 10", "closed"} <= bare.keys()
    assert seen.keys() == bare.keys()
    other = [
        f"{operation} at {moment}:\n  {outcome}\n  {seen[moment].get(operation)}"
        for moment, outcomes in bare.items()
        for operation, outcome in outcomes.items()
        if seen[moment].get(operation) != outcome
    ]
    assert not other, "\n".join(other)
