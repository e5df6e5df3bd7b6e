"""An import of ours that fails, of whatever module and at whatever moment, costs the measuring and nothing else."""

from __future__ import annotations

import json
import os
import subprocess
from itertools import cycle
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.job_unimportable import MOMENTS, modules
from tests.kit.forking_python import TORCH, forking_python

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("job_unimportable.py")
ROOT = JOB.parents[1]
WITHOUT_PACECAR = tuple(name for name in TORCH if not name.startswith("pacecar"))

WAYS = ("attach", "run")
ALL = ("*", "=*")
"""All of pacecar and msgspec are gone; all are there, and another version."""


class Ended(NamedTuple):
    code: int
    losses: str
    errors: str


def run(cases: list[tuple[str, str, str]]) -> list[Ended]:
    done = subprocess.run(
        [forking_python(modules=WITHOUT_PACECAR), str(JOB), json.dumps([("plain", "-", "never"), *cases])],
        capture_output=True, text=True, timeout=1500, check=False,
        env={name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
        | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PACECAR_TUNE_REMEMBER": "false"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [Ended(*answer) for answer in json.loads(done.stdout)]


def check(cases: list[tuple[str, str, str]]) -> list[Ended]:
    """Run `cases` and see that each ended and trained as without pacecar, and said one line at the most."""
    plain, *ended = run(cases)
    assert plain.code == 0, plain.errors
    assert len(plain.losses.split()) == 20
    for case, one in zip(cases, ended, strict=True):
        assert (one.code, one.losses) == (0, plain.losses), (case, one)
        assert len(one.errors.splitlines()) <= 1, (case, one)
    return ended


def is_named(way: str, module: str, moment: str) -> bool:
    """Whether the script itself imports it after it went: then there is nobody of ours to bear it."""
    return way == "attach" and moment == "begun" and module in ALL


def test_with_all_of_it_gone_or_upgraded_at_any_moment_the_job_trains_on() -> None:
    cases = [
        (way, module, moment)
        for way in WAYS
        for module in ALL
        for moment in (MOMENTS if module == "*" else ("begun", "imported", "stepped"))
        if not is_named(way, module, moment)
    ]
    cases += [(way, module, moment) for way, moment in (("held", "imported"), ("off", "attached")) for module in ALL]
    said = dict(zip(cases, check(cases), strict=True))
    assert "ModuleNotFoundError" in said["run", "*", "imported"].errors
    assert "does not measure" in said["attach", "*", "imported"].errors
    for moment in MOMENTS[2:]:
        assert said["attach", "*", moment].errors == "", "what was attached needs no import any more"


def test_each_module_may_be_missing_from_some_moment_on() -> None:
    """An eighth of the modules; ways and moments take turns.  All of them with each other: below."""
    names = [*modules(), "msgspec", "numpy", "pacecar.handle", "pacecar.pacer", "pacecar.zerocode.saying"]
    turns = cycle((way, moment) for moment in ("begun", "imported") for way in WAYS)
    cases = [(way, name, moment) for name, (way, moment) in zip(names, turns, strict=False)]
    check([case for case in cases if not is_named(*case)][::8])


@pytest.mark.full
@pytest.mark.parametrize("moment", MOMENTS)
def test_each_module_may_be_missing_from_each_moment_on(moment: str) -> None:
    cases = [(way, name, moment) for way in WAYS for name in [*modules(), "msgspec", "numpy"]]
    check([case for case in cases if not is_named(*case)])


def test_without_handle_the_pacer_has_what_any_pacer_has() -> None:
    import pacecar
    from pacecar.handle import Pacer

    theirs = {name for name in dir(Pacer) if not name.startswith("_")} - {"batcher"}
    said = {"inert_because"}
    assert {name for name in dir(pacecar.UnloadedPacer) if not name.startswith("_")} | said >= theirs
