"""A failing import of pacecar's, of any module and at any moment, costs the measurements and nothing else."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.job.autoattach.scripts import END
from tests.job.job_unimportable import MOMENTS, modules
from tests.job.job_unimportable_ranks import MOMENTS as RANKS_MOMENTS
from tests.kit.forking_python import TORCH, forking_python

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("job_unimportable.py")
RANKS_JOB = Path(__file__).with_name("job_unimportable_ranks.py")
ROOT = JOB.parents[2]
WITHOUT_PACECAR = tuple(name for name in TORCH if not name.startswith("pacecar"))

WAYS = ("attach", "run")
ALL = ("*", "=*")
"""All of pacecar and msgspec are gone; all are there, and another version."""

ENVIRON = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")} | {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PACECAR_TUNE_REMEMBER": "false"
}  # fmt: skip


class Ended(NamedTuple):
    code: int
    losses: str
    errors: str


Case = tuple[str, str, str]
"""How pacecar comes to the job, the module, and the moment from which on it is missing."""


def answers(job: Path, cases: list[Case]) -> Any:
    """Return what `job` reports for a job without pacecar, and for `cases`."""
    done = subprocess.run(
        [forking_python(modules=WITHOUT_PACECAR), str(job), json.dumps([("plain", "-", "never"), *cases])],
        capture_output=True, text=True, timeout=1500, check=False, env=ENVIRON,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def run(cases: list[Case]) -> list[Ended]:
    return [Ended(*answer) for answer in answers(JOB, cases)]


def check(cases: list[Case]) -> list[Ended]:
    """Run `cases`; check that each trained and ended as without pacecar, and printed at most one line."""
    plain, *ended = run(cases)
    assert plain.code == 0, plain.errors
    assert len(plain.losses.split()) == 20
    for case, one in zip(cases, ended, strict=True):
        assert (one.code, one.losses) == (0, plain.losses), (case, one)
        assert len(said_lines(one.errors)) <= 1, (case, one)
    return ended


def said_lines(errors: str) -> list[str]:
    """Return the lines of stderr without the final one about what was measured."""
    return [line for line in errors.splitlines() if not END.match(line)]


def is_named(way: str, module: str, moment: str) -> bool:
    """Return whether the script's own `import pacecar` fails, as if pacecar were not installed."""
    return way == "attach" and moment == "begun" and module in (*ALL, "pacecar.job.handle")


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


@pytest.mark.full
def test_each_module_may_be_missing_from_some_moment_on() -> None:
    """An eighth of the modules; ways and moments alternate.  All combinations: below."""
    names = [
        *modules(),
        "msgspec",
        "numpy",
        "pacecar.job.handle",
        "pacecar.job.attach",
        "pacecar.job.autoattach.stderr_lines",
    ]
    turns = cycle((way, moment) for moment in ("begun", "imported") for way in WAYS)
    cases = [(way, name, moment) for name, (way, moment) in zip(names, turns, strict=False)]
    check([case for case in cases if not is_named(*case)][::8])


ASKED = [("attach", "?", "attached"), ("off", "?", "attached"), ("run", "?", "window")]


def test_what_was_attached_asks_for_no_module_any_more() -> None:
    """So it costs nothing if any of them is missing later, in a window or at the end; the test above removes all."""
    for case, one in zip(ASKED, run(ASKED)[1:], strict=True):
        assert (one.code, len(one.losses.split())) == (0, 20), (case, one)
        assert said_lines(one.errors)[-1] == "asked for []", (case, one)


def is_of_ours(kind: ast.expr) -> bool:
    """Return whether the annotation names a class; builtin types have small letters."""
    return any(isinstance(node, ast.Name) and node.id.lstrip("_")[0].isupper() for node in ast.walk(kind))


def test_what_runs_in_a_job_makes_its_decoders_when_it_is_imported() -> None:
    """A decoder looks for the types of its fields in their modules, which an upgrade may have replaced later."""
    calls = [
        (path.name, node.lineno, keyword.value)
        for path in modules().values()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "decode"
        for keyword in node.keywords
        if keyword.arg == "type"
    ]
    assert calls
    assert [call for call in calls if is_of_ours(call[2])] == []


def check_ranks(cases: list[Case]) -> list[list[Ended]]:
    """Run `cases` on two ranks; check that each trained as without pacecar as far as it went, in at most one line."""
    plain, *ended = [[Ended(*rank) for rank in ranks] for ranks in answers(RANKS_JOB, cases)]
    for case, ranks in zip(cases, ended, strict=True):
        lines = [line for rank in ranks for line in said_lines(rank.errors) if not line.startswith("asked for")]
        assert len(lines) <= 1, (case, lines)
        for one, bare in zip(ranks, plain, strict=True):
            losses = one.losses.split()
            assert (one.code, bare.code) == (0, 0), (case, one, bare)
            assert len(losses) > 12, case
            assert losses == bare.losses.split()[: len(losses)], case
    return ended


@pytest.mark.full
@pytest.mark.distributed
def test_ranks_train_on_where_all_of_it_goes_in_a_trial_and_they_ask_for_no_module() -> None:
    _, asked = check_ranks([("attach", "*", "trial"), ("attach", "?", "vote")])
    assert [one.errors for one in asked] == ["asked for []\n"] * 2


@pytest.mark.full
@pytest.mark.distributed
@pytest.mark.parametrize("moment", RANKS_MOMENTS)
def test_ranks_train_on_with_all_of_it_gone_or_upgraded_from_any_moment_on(moment: str) -> None:
    """What the tuner, the rank monitor and windows do among ranks; on both ranks at nearly the same time."""
    cases = [(way, "*", moment) for way in WAYS] + [("attach", "=*", moment)]
    check_ranks(cases)


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
def test_a_process_ends_as_ever_with_all_of_it_gone_before_its_end(way: str) -> None:
    """To python's own end, with the remaining threads; the jobs above leave it out."""
    case = json.dumps([(way, "*", "exiting")])
    done = subprocess.run(
        [sys.executable, str(JOB), case, "here"], capture_output=True, text=True, timeout=300, check=False, env=ENVIRON
    )
    assert (done.returncode, len(done.stdout.split())) == (0, 20), done
    assert len(said_lines(done.stderr)) <= 1, done.stderr


@pytest.mark.full
@pytest.mark.parametrize("moment", ["begun", "imported"])
def test_each_module_may_be_missing_from_each_moment_on(moment: str) -> None:
    """Later moments are left out: once attached, a job imports no module any more, as is shown above."""
    cases = [(way, name, moment) for way in WAYS for name in [*modules(), "msgspec", "numpy"]]
    check([case for case in cases if not is_named(*case)])
