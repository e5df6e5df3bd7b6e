"""The command `pacecar run`: it becomes what it starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pacecar.commands.run import without_startup

pytestmark = pytest.mark.slow

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


PATHS = [":/opt/libs", "/opt/libs:", "/a::/b", ":", "::", ".", "lib:.", "/opt/libs", ""]


@pytest.mark.parametrize("path", [*PATHS, None])
def test_the_path_of_the_script_is_what_it_is_without_pacecar(path: str | None, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import sys; print(sys.path)")
    environ = {} if path is None else {"PYTHONPATH": path}
    source = str(Path(__file__).resolve().parents[3])

    def run(*command: str, **more: str) -> str:
        env = PLAIN | environ | more
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True, cwd=tmp_path)
        return done.stdout

    bare = run(sys.executable, "train.py")
    start = [
        sys.executable,
        "-c",
        f"import sys; sys.path.append({source!r}); from pacecar.commands.main import main; main()",
    ]
    once = run(*start, "run", "--", sys.executable, "train.py")
    twice = run(*start, "run", "--", *start, "run", "--", sys.executable, "train.py")
    printed = run(*start, "run", "--print-env")
    by_shell = run("sh", "-c", f'{printed}\n"{sys.executable}" train.py')
    assert once == twice == by_shell == bare


def test_the_path_of_a_command_is_left_alone() -> None:
    environ = {"PYTHONSTARTUP": "x", "PYTHONSAFEPATH": "1", "LD_PRELOAD": "", "PATH": f":{os.environ['PATH']}"}
    show = "import os, sys; print({n: os.environ.get(n) for n in sys.argv[1:]})"
    assert pacecar_run(sys.executable, "-c", show, *environ, **environ).stdout == f"{environ}\n"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["-I"], "-I"), (["-uE", "-c"], "-E"), (["-X", "dev", "-S"], "-S"), (["-W", "error", "-BI"], "-I"),
        (["-u", "-c", "-I"], None), (["-mE"], None), (["-Ximporttime", "-u"], None), (["x.py", "-I"], None), ([], None),
    ],
)  # fmt: skip
def test_a_python_that_does_not_read_the_environment_is_named(options: list[str], named: str | None) -> None:
    assert without_startup(["/usr/bin/python3.12", *options]) == named
    assert without_startup(["torchrun", *options]) is None


def test_one_that_reads_no_environment_runs_all_the_same_and_one_line_says_that_nothing_is_measured() -> None:
    done = pacecar_run(sys.executable, "-I", "-c", "print(1)")
    assert (done.returncode, done.stdout) == (0, "1\n")
    assert done.stderr.startswith(f"pacecar: {sys.executable} -I ignores PYTHONPATH")
    assert done.stderr.count("\n") == 1


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
