"""Real jobs of two ranks, killed three times: headings sum to the whole life, and the steps lost are those planted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from click.testing import CliRunner

from pacecar.commands.report.command import report as command
from pacecar.ledger.attempts import GOOGLE_NAMES, LIFE_HEADINGS, JobLife
from pacecar.records import Goodbye, JobHello
from pacecar.records.rank_file import RankFile, decode, rank_files
from tests.kit.forking_python import forking_python
from tests.kit.ranks import ROOT, SETTINGS, finish, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

SCRIPT = Path(__file__).with_name("job_restarted.py")
STEPS, EVERY, KILLS = 36, 8, (13, 21, 30)
LOST = [13 - 8, 21 - 16, 30 - 24, 0]
DOWN_SECONDS = 0.2


class Life(NamedTuple):
    """A job that ran to its end: its run folder, and when it began and ended."""

    folder: Path
    began_ns: int
    ended_ns: int


def arguments(folder: Path) -> list[str | Path]:
    return [SCRIPT, folder, str(STEPS), str(EVERY), json.dumps(KILLS)]


def by_loop(folder: Path, environ: Callable[[int], dict[str, str]], runs: Callable[[int], Path]) -> None:
    """Start the job again until it ends well, as a shell's `until` does."""
    for attempt in range(len(KILLS) + 1):
        if attempt:
            time.sleep(DOWN_SECONDS)
        given = {"PACECAR_JOB": "restarted", "RUN_DIR": str(runs(attempt)), "ATTEMPT": str(attempt)}
        given |= environ(attempt)
        ended = finish(start_ranks(arguments(folder), 2, environ=given))
        assert ended[1].code == (0 if attempt == len(KILLS) else -signal.SIGKILL), ended[1].err[-3000:]
        assert "Timeout (" not in ended[0].err, ended[0].err[-5000:]


def by_torchrun(folder: Path) -> None:
    """Have torchrun's agent restart the ranks."""
    command = [
        forking_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3",
        "--monitor-interval=0.1", *map(str, arguments(folder)),
    ]  # fmt: skip
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_")}
    given = {"PACECAR_JOB": "restarted", "RUN_DIR": str(folder / "run"), "PYTHONPATH": str(ROOT), **SETTINGS}
    ran = subprocess.run(
        command, env=environ | given, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def by_slurm(folder: Path) -> None:
    """Give the job what Slurm gives one that it requeues, with a run folder for each attempt."""

    def environ(attempt: int) -> dict[str, str]:
        return {"SLURM_JOB_ID": "77", **({"SLURM_RESTART_COUNT": str(attempt)} if attempt else {})}

    by_loop(folder, environ, lambda attempt: folder / "run" / f"attempt-{attempt}")


LAUNCHERS: dict[str, Callable[[Path], None]] = {
    "loop": lambda folder: by_loop(folder, lambda _: {}, lambda _: folder / "run"),
    "torchrun": by_torchrun,
    "slurm": by_slurm,
}


@pytest.fixture(scope="module", params=LAUNCHERS)
def life(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Life]:
    folder = tmp_path_factory.mktemp(request.param)
    began_ns = time.time_ns()
    LAUNCHERS[request.param](folder)
    return request.param, Life(folder / "run", began_ns, time.time_ns())


def report(folder: Path, *options: str) -> str:
    """Return what `pacecar report` prints."""
    answer = CliRunner().invoke(command, [str(folder), *options])
    assert answer.exit_code == 0, answer.output
    return answer.stdout


def life_of(folder: Path) -> JobLife:
    return msgspec.convert(json.loads(report(folder, "--json"))["life"], JobLife)


def records_of(folder: Path) -> Iterator[JobHello | Goodbye]:
    for place in (folder, *(each for each in folder.iterdir() if each.is_dir())):
        for path in rank_files(place).values():
            for _, line in RankFile(path).lines():
                record = decode(line or b"")
                if isinstance(record, JobHello | Goodbye):
                    yield record


def test_the_lost_steps_are_those_planted(life: tuple[str, Life]) -> None:
    launcher, lived = life
    found = life_of(lived.folder)
    assert [one.lost_steps for one in found.attempts] == LOST
    assert found.lost_steps == sum(LOST)
    assert not found.lost_is_partial
    assert [(one.first_step, one.last_step) for one in found.attempts] == [(1, 13), (9, 21), (17, 30), (25, STEPS)]
    assert [one.is_failed for one in found.attempts] == [True, True, True, False]
    told = {"loop": [None] * 4, "torchrun": [0, 1, 2, 3], "slurm": [0, 1, 2, 3]}[launcher]
    assert [one.number for one in found.attempts] == told


def test_headings_sum_to_the_wall_time_of_the_whole_life(life: tuple[str, Life]) -> None:
    _, lived = life
    found = life_of(lived.folder)
    records = list(records_of(lived.folder))
    began = min(one.process_wall_ns or 0 for one in records if isinstance(one, JobHello))
    ended = max(one.wall_ns for one in records if isinstance(one, Goodbye))
    assert sum(found.headings_ns.values()) == found.wall_ns == ended - began
    assert lived.began_ns - 20_000_000 <= began, "the kernel counts in ticks of 10 ms"
    assert ended <= lived.ended_ns
    assert sum(found.google_ns.values()) == sum(one.wall_ns for one in found.intervals) == found.wall_ns
    headings = found.headings_ns
    assert headings.keys() == LIFE_HEADINGS.keys()
    # Each step slept: what was kept and lost is at least that, and the first of each attempt is start-up.
    assert headings["lost_steps"] >= sum(LOST) * 0.02e9
    assert headings["productive"] + headings["exposed_communication"] >= (STEPS - 4) * 0.02e9
    assert headings["start_up_first_step"] > 0
    assert headings["start_up_rendezvous"] > 0
    assert headings["start_up_preparation"] > 0
    assert headings["start_up"] == 0
    assert headings["checkpoint_save"] > 0
    assert headings["down"] > 0
    assert found.jumps_ns == ()


def test_page_and_tables_show_every_attempt(life: tuple[str, Life]) -> None:
    _, lived = life
    text = report(lived.folder, "--markdown")
    assert text.count("failed or killed") == 3
    assert f"Lost steps: {sum(LOST)}." in text
    assert all(name.replace("_", "\\_") in text for name in GOOGLE_NAMES)
    page = Path(report(lived.folder).strip()).read_text()
    assert "productive_time_ratio" in page
    assert page.count("failed or killed") == 3
