"""The command `pacecar run`: it becomes what it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PLAIN = {name: value for name, value in os.environ.items() if not name.startswith("PACECAR_") and name != "PYTHONPATH"}


def pacecar_run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pacecar", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=PLAIN | environ, check=False)


def test_the_command_runs_in_the_same_process_with_its_own_exit_code_and_options() -> None:
    done = pacecar_run("--", "sh", "-c", "echo --help $0; exit 5", "x")
    assert (done.returncode, done.stdout, done.stderr) == (5, "--help x\n", "")
    assert pacecar_run("sh", "-c", "kill -TERM $$").returncode == -15


def test_options_become_variables_and_the_mode_is_off_unless_said() -> None:
    show = "import os; print(*(os.environ.get(n) for n in ('PACECAR_RUN', 'PACECAR_TUNE_MODE', 'PACECAR_JOB')))"
    assert pacecar_run(sys.executable, "-c", show).stdout == "1 off None\n"
    assert pacecar_run("--tune", "exact", "--job", "j", sys.executable, "-c", show).stdout == "1 exact j\n"
    assert pacecar_run(sys.executable, "-c", show, PACECAR_TUNE_MODE="advise").stdout == "1 advise None\n"


def test_printed_variables_work_in_a_shell(tmp_path: Path) -> None:
    printed = pacecar_run("--print-env", "--run-dir", str(tmp_path / "a b")).stdout
    script = f'{printed}\n"{sys.executable}" -c "import sys; print([type(f).__name__ for f in sys.meta_path][0])"'
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, timeout=60, env=PLAIN, check=True)
    assert done.stdout == "Finder\n"
    assert "'" + str(tmp_path / "a b") + "'" in printed


@pytest.mark.parametrize(
    ("arguments", "environ", "code", "named"),
    [
        ((), {}, 2, "which command?"),
        (("--tune", "wildly", "true"), {}, 2, "wildly"),
        (("--config", "/no/such/file", "true"), {}, 2, "/no/such/file: cannot be read"),
        (("true",), {"PACECAR_TUNE_WARMUP": "1"}, 2, "no key 'warmup'"),
        (("no-such-command",), {}, 127, "no-such-command: not found"),
        (("/etc/passwd",), {}, 126, "/etc/passwd: Permission denied"),
    ],
)
def test_what_cannot_be_started_ends_in_one_line(
    arguments: tuple[str, ...], environ: dict[str, str], code: int, named: str
) -> None:
    done = pacecar_run(*arguments, **environ)
    assert done.returncode == code
    assert named in done.stderr
    assert "Traceback" not in done.stderr
