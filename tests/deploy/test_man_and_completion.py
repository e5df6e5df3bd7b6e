"""Manual pages and shell completion: made of the commands themselves, and taken by man and bash."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pacecar.commands.main import cli
from pacecar.commands.man_pages import man_pages


def deploy(*words: str) -> str:
    done = CliRunner().invoke(cli, ["deploy", *words])
    assert done.exit_code == 0, done.output
    return done.stdout


def commands(group: click.Group, path: str = "pacecar") -> dict[str, click.Command]:
    """Return path -> command, of all that are not hidden."""
    found: dict[str, click.Command] = {path: group}
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            found |= commands(command, f"{path} {name}")
        elif not command.hidden:
            found[f"{path} {name}"] = command
    return found


def words(page: str) -> str:
    """Return what a page prints, roughly: without macros and escapes."""
    text = re.sub(r"\\f[BIR]|\\&", "", page.replace("\\-", "-").replace("\\(dq", '"').replace("\\e", "\\"))
    return " ".join(line for line in text.splitlines() if not line.startswith("."))


def test_each_command_has_a_page_with_its_options_and_what_they_mean():
    pages = man_pages(cli)
    all_commands = commands(cli)
    assert pages.keys() == {f"{path.replace(' ', '-')}.1" for path in all_commands}
    for path, command in all_commands.items():
        page = words(pages[f"{path.replace(' ', '-')}.1"])
        assert f"{path.replace(' ', '-')} - " in page, f"{path}: the line that apropos reads"
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert max(option.opts, key=len) in page, f"{path} {option.opts}"
                assert " ".join((option.help or "").split()) in page, f"{path} {option.opts}"


def test_a_page_is_the_same_each_time_and_says_its_version():
    assert man_pages(cli) == man_pages(cli)
    assert re.match(r'\.TH "PACECAR" 1 "" "pacecar \d+\.\d+', man_pages(cli)["pacecar.1"])


def test_what_roff_would_obey_is_printed():
    @click.group()
    def root() -> None:
        """Do it."""

    @root.command(help="First - one.\n\n.SH no heading \\fBno bold\n\n\b\n  kept  as\n  it is\n")
    @click.option("--a-b", help='A \\ and a "word".')
    def odd() -> None: ...

    page = man_pages(root, "x")["x-odd.1"]
    assert "\n\\&.SH no heading \\efBno bold\n" in page
    assert "\n.nf\n" in page
    assert "kept  as\n" in page
    assert "A \\e and a \\(dqword\\(dq." in page
    assert "\\fB\\-\\-a\\-b TEXT\\fR" in page


def test_pages_are_written_where_man_looks_and_a_bad_place_is_named(tmp_path):
    written = deploy("man", str(tmp_path)).split()
    assert str(tmp_path / "man1/pacecar-tune-set.1") in written
    assert (tmp_path / "man1/pacecar.1").stat().st_mode & 0o777 == 0o644
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(cli, ["deploy", "man", str(tmp_path / "file/below")])
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


@pytest.mark.slow
def test_groff_and_mans_own_indexer_have_no_complaint(tmp_path):
    groff, lexgrog = shutil.which("groff"), shutil.which("lexgrog")
    if groff is None or lexgrog is None:
        pytest.skip("groff and man-db are not here")
    deploy("man", str(tmp_path))
    pages = sorted((tmp_path / "man1").iterdir())
    done = subprocess.run([groff, "-man", "-ww", "-z", "-Tutf8", *pages], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run([lexgrog, *pages], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(done.stdout.splitlines()) == len(pages)


# --- completion ---------------------------------------------------------------------------------------------------

ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}


def completed(shell: str, typed: str) -> list[str]:
    """Ask pacecar itself, as the shell's function does, what may follow."""
    split = typed.split(" ")
    environ = ENVIRONMENT | {
        "_PACECAR_COMPLETE": f"{shell}_complete", "COMP_WORDS": " ".join(split) if shell != "fish" else typed,
        "COMP_CWORD": str(len(split) - 1) if shell != "fish" else split[-1],
    }  # fmt: skip
    done = subprocess.run(["pacecar"], env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    return done.stdout.splitlines()


@pytest.mark.slow
def test_commands_options_and_files_are_completed_in_each_shell():
    assert completed("bash", "pacecar da") == ["plain,daemon", "plain,dashboards"]
    assert "plain,--web-config-file" in completed("bash", "pacecar daemon --w")
    assert completed("bash", "pacecar deploy show systemd/pacecar.se") == ["plain,systemd/pacecar.service"]
    assert completed("zsh", "pacecar heal")[:2] == ["plain", "health"]
    assert completed("fish", "pacecar heal")[0].startswith("plain,health")


@pytest.mark.slow
def test_bash_completes_with_the_script_that_is_printed(tmp_path):
    bash = shutil.which("bash")
    assert bash is not None, "make needs it too"
    script = tmp_path / "script"
    script.write_text(deploy("completion", "bash"))
    typed = "source ./script; COMP_WORDS=(pacecar tu); COMP_CWORD=1; _pacecar_completion pacecar; echo ${COMPREPLY[@]}"
    done = subprocess.run(
        [bash, "--norc", "-c", typed], cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("tune\n", "")
    registered = subprocess.run(
        [bash, "--norc", "-c", "source ./script; complete -p pacecar"], cwd=tmp_path, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert "-F _pacecar_completion pacecar" in registered.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_other_shells_accept_theirs(shell, tmp_path):
    text = deploy("completion", shell)
    assert f"_PACECAR_COMPLETE={shell}_complete" in text
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not here to read its script")
    (tmp_path / "script").write_text(text)
    assert subprocess.run([program, "-n", tmp_path / "script"], check=False).returncode == 0
