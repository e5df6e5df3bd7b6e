"""What `make gpu` says and does where something is missing, hangs or is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.gpu.__main__ import ROOT, end, run, tell
from tests.kit.waiting import until

HANGING = """
import subprocess, sys, time
job = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(job.pid, flush=True)
time.sleep(600)
"""


def test_a_machine_without_torch_gets_one_line() -> None:
    bare = [sys.executable, "-S", "-m", "tests.gpu", "--parts", "windows"]  # -S: what is installed is not seen
    said = subprocess.run(bare, cwd=ROOT, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, timeout=60)
    assert (said.returncode, said.stderr) == (2, "")
    (line,) = said.stdout.splitlines()
    assert "torch (`make gpu-carry` gathers wheels); it would run windows in at most 8 minutes" in line


def test_a_part_that_hangs_is_ended_with_the_jobs_that_it_started() -> None:
    part = subprocess.Popen([sys.executable, "-c", HANGING], stdout=subprocess.PIPE, start_new_session=True)
    assert part.stdout is not None
    with part.stdout:
        job = psutil.Process(int(part.stdout.readline()))
        end(part)
    assert part.returncode == -signal.SIGKILL
    until(lambda: not job.is_running() or job.status() == psutil.STATUS_ZOMBIE, "the job lives on", 10.0)


@pytest.mark.slow
def test_a_part_that_is_killed_says_by_what(tmp_path: Path) -> None:
    (tmp_path / "test_killed.py").write_text("import os\ndef test_it():\n    os.kill(os.getpid(), 9)\n")
    words = ["--rootdir", str(tmp_path), str(tmp_path / "test_killed.py")]
    assert run(words, 60.0, tmp_path, "killed", {}) == "killed by SIGKILL"


def test_the_exit_code_says_whether_every_claim_held(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = tmp_path / "findings.jsonl"
    assert tell(findings, 1.0) == 1, "nothing was found"
    one = {"part": "nvml", "test": "test_uuid", "claim": "One UUID.", "detail": "they differ"}
    lines = [{"machine": {}}, {**one, "outcome": "held"}, {**one, "outcome": "not run"}]
    findings.write_text("\n".join(map(json.dumps, lines)))
    assert tell(findings, 1.0) == 0
    findings.write_text("\n".join(map(json.dumps, [*lines, {**one, "outcome": "did not hold"}])))
    assert tell(findings, 1.0) == 1
    assert "nvml, test_uuid: One UUID.\n    they differ\n" in capsys.readouterr().out
