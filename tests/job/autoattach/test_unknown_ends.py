"""A script under `pacecar run` that fails, is interrupted or killed ends as without it, on one rank and on two."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.job.autoattach.scripts import FRESH, NANOGPT, PLAIN, bare_run, command, run, run_both
from tests.kit.ours import shows_our_files

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SHORT = ("--steps", "10")

MEASURES = "pacecar: measures job nanogpt_like-"


@pytest.mark.parametrize(("end", "code"), [("raise", 1), ("interrupt", -2)])
def test_a_script_that_fails_or_is_interrupted_says_so_in_the_same_words(tmp_path: Path, end: str, code: int) -> None:
    bare, seen = run_both(NANOGPT, *SHORT, "--end", end, ranks=1, watched=("--run-dir", str(tmp_path)))
    assert seen.ended == bare.ended
    assert seen.code == code
    assert [line.startswith(MEASURES) for line in seen.pacecar] == [True]
    assert seen.of(0, "hello")[0]["world_size"] == 1, "what was measured is written at python's exit"


@pytest.mark.parametrize(("end", "code"), [("exit", 3), ("os_exit", 4), ("terminate", -15), ("kill", -9)])
def test_a_script_that_ends_itself_or_is_killed_ends_with_its_own_code(tmp_path: Path, end: str, code: int) -> None:
    whole = bare_run(NANOGPT, *SHORT, ranks=1)
    seen = run(NANOGPT, *SHORT, "--end", end, ranks=1, watched=("--run-dir", str(tmp_path)))
    assert (seen.code, seen.errors) == (code, [])
    assert seen.out, "it ended after most of its lines"
    assert whole.out.startswith(seen.out)
    assert [line.startswith(MEASURES) for line in seen.pacecar] == [True]


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_job_of_two_ranks_that_ends_badly_while_it_is_tuned_ends_in_the_same_way(tmp_path: Path, end: str) -> None:
    arguments = (*SHORT, "--end", end)
    bare, seen = run_both(NANOGPT, *arguments, watched=("--tune", "exact", "--run-dir", str(tmp_path)))
    assert (seen.code, seen.out) == (bare.code, bare.out)
    assert seen.code == 1
    # Which rank's end torchrun saw first, and whether it ended the other, is in its report, and chance.
    assert not [line for line in seen.errors if shows_our_files(line)]


FORKED = None


@pytest.mark.parametrize(
    ("number", "said", "bare", "seen"),
    [
        pytest.param(signal.SIGINT, "KeyboardInterrupt", FORKED, FORKED, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, "SignalException", FORKED, FORKED, id="cancelled"),
        pytest.param(signal.SIGINT, "KeyboardInterrupt", FRESH, FRESH, id="Ctrl-C, all fresh", marks=pytest.mark.full),
        pytest.param(
            signal.SIGTERM, "SignalException", FRESH, FRESH, id="cancelled, all fresh", marks=pytest.mark.full
        ),
    ],
)
def test_a_signal_to_the_whole_job_ends_all_ranks(
    tmp_path: Path, number: signal.Signals, said: str, bare: str | None, seen: str | None
) -> None:
    """Ctrl-C at a terminal, and a scheduler that cancels the job.

    It comes while the script sleeps: a KeyboardInterrupt that comes while the hook runs has the hook's lines in its
    traceback, and rightly so.
    """
    jobs = [
        subprocess.Popen(
            command(NANOGPT, "--steps", "500", "--hold", "10", ranks=2, watched=watched, python=python),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=PLAIN | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        )
        for python, watched in ((bare, None), (seen, ("--tune", "exact", "--run-dir", str(tmp_path))))
    ]
    for job in jobs:
        while "iter 10:" not in job.stdout.readline():
            assert job.poll() is None
    begun = time.monotonic()
    for job in jobs:
        os.killpg(job.pid, number)
    for job in jobs:
        _, errors = job.communicate(timeout=60)
        assert said in errors
        assert not shows_our_files(errors)
    assert time.monotonic() - begun < 45
    assert jobs[0].returncode == jobs[1].returncode
