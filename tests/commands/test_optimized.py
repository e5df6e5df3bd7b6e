"""`python -OO` and PYTHONOPTIMIZE=2: no docstrings and no assertions, and the commands and a training say the same."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
import pytest

from pacecar.commands.help_text import restore_help
from pacecar.commands.main import cli
from tests.kit.selection import decisive

ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in {"COLUMNS", "PYTHONOPTIMIZE"}}


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT | environ,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    decisive(
        [["--help"], ["tune", "set", "--help"], ["knobs", "--help"], ["run", "--help"]], ["tune", "set", "--help"]
    ),
)
def test_help_is_the_same(arguments: list[str]) -> None:
    usual = python("-m", "pacecar", *arguments)
    for optimized in (
        python("-OO", "-m", "pacecar", *arguments),
        python("-m", "pacecar", *arguments, PYTHONOPTIMIZE="2"),
    ):
        assert (optimized.returncode, optimized.stdout, optimized.stderr) == (0, usual.stdout, "")


def commands_below(command: click.Command) -> list[click.Command]:
    below = command.commands.values() if isinstance(command, click.Group) else ()
    return [command, *(one for each in below for one in commands_below(each))]


def test_every_command_gets_back_what_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = commands_below(cli)
    before = [cleandoc(one.help or "") for one in commands]
    assert len(commands) > 20
    assert all(before)
    for one in commands:
        monkeypatch.setattr(one, "help", None)
    restore_help(cli)
    assert [one.help for one in commands] == before


def test_a_command_without_its_source_has_no_help_and_works(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"click": click}
    exec(compile("@click.command()\ndef gone(): click.echo('works')", tmp_path / "gone.py", "exec"), namespace)
    restore_help(namespace["gone"])
    assert namespace["gone"].help is None


TRAINING = """
import sys, torch, pacecar
from tests.kit.hook_inspection import hook_of, inspect
assert False, "not under -OO"
net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
opt = torch.optim.AdamW(net.parameters())
with pacecar.attach(net, opt, run_dir=sys.argv[1], overhead_budget=1.0) as pacer:
    for step in range(40):
        if step == 20: opt = torch.optim.AdamW(net.parameters())
        for part in pacer.microbatches(torch.ones(4, 8)):
            pacer.backward(net(part).mean())
        opt.step(); opt.zero_grad()
    print(pacer.is_active, hook_of(pacer).step, inspect(pacer).failures)
"""


@pytest.mark.full  # the first time python compiles all of torch once more, without docstrings
def test_a_training_is_measured_and_reported(tmp_path: Path) -> None:
    done = python("-OO", "-c", TRAINING, str(tmp_path))
    assert done.stdout == "True 40 0\n", done.stderr
    report = python("-OO", "-m", "pacecar", "report", str(tmp_path), "--markdown", "--output", "-")
    assert report.returncode == 0, report.stderr
    assert report.stdout.startswith("# Run")
