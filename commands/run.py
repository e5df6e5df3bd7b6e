"""Runs `pacecar run`: starts a training script that does not call pacecar, with environment variables that attach it.

`pacecar run` replaces itself with the given command, so signals, terminal, exit code and children are unchanged.  The
variables reach every Python process of the job through any launcher; there `job/startup` takes over.  If a launcher
cannot be wrapped, the variables can be printed and set by other means.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from .shared_options import complain, fail

__all__ = ["environment", "run"]

STARTUP = Path(__file__).resolve().parents[1] / "job" / "startup"

PTH = (
    "import os, sys; os.environ.get('PACECAR_RUN', '0') in ('', '0') or"
    " (sys.path.insert(0, {folder!r}), __import__('pacecar_startup').begin(), sys.path.remove({folder!r}))"
)
"""Python runs this line at each start from a .pth file; it does nothing unless the variable is set."""


def environment(
    environ: Mapping[str, str],
    *,
    tune: str | None = None,
    job: str | None = None,
    run_dir: Path | None = None,
    config_file: Path | None = None,
) -> dict[str, str]:
    """Return the variables to add to `environ`."""
    path = environ.get("PYTHONPATH", "")
    # An empty entry means the working directory, so it stays; an empty path has no entries.
    parts = [part for part in path.split(os.pathsep) if part != str(STARTUP)] if path else []
    found = {"PACECAR_RUN": "1", "PYTHONPATH": os.pathsep.join([str(STARTUP), *parts])}
    if tune is not None or "PACECAR_TUNE_MODE" not in environ:
        found["PACECAR_TUNE_MODE"] = tune or "off"
    if job is not None:
        found["PACECAR_JOB"] = job
    if run_dir is not None:
        found["PACECAR_HOOK_RUN_DIR"] = str(run_dir.absolute())
    if config_file is not None:
        found["PACECAR_CONFIG"] = str(config_file.absolute())
    return found


def without_startup(command: Sequence[str]) -> str | None:
    """Return the option that makes the Python in `command` ignore PYTHONPATH or `site`, or None."""
    if not re.fullmatch(r"python[\d.]*t?", os.path.basename(command[0]) if command else ""):
        return None
    left = iter(command[1:])
    for option in left:
        if not option.startswith("-") or option in ("-", "--"):
            break
        if option in ("-W", "-X", "--check-hash-based-pycs"):
            next(left, None)
        elif found := re.match("-[^-cmWX]*?([EIS])", option):  # one among several letters, as in -uE
            return f"-{found[1]}"
        elif re.match("-[^-WX]*[cm]", option):
            break
    return None


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option("--tune", type=click.Choice(["off", "advise", "exact"]), help="What the tuner may do.  [default: off]")
@click.option("--job", help="Name of the job.  [default: from the launcher]")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False), help="Folder for rank<r>.jsonl.")
@click.option("--config", "config_file", type=click.Path(path_type=Path), help="TOML file; default $PACECAR_CONFIG.")
@click.option("--print-env", is_flag=True, help="Print the variables for a shell, without starting anything.")
@click.option(
    "--print-pth", is_flag=True, help="Print a line for a .pth file in site-packages, without starting anything."
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND...")
def run(
    tune: str | None,
    job: str | None,
    run_dir: Path | None,
    config_file: Path | None,
    *,
    print_env: bool,
    print_pth: bool,
    command: tuple[str, ...],
) -> None:
    """Start an unchanged training script and measure it: pacecar run -- torchrun ... train.py."""
    from pacecar.config import ConfigError, load_config

    added = environment(os.environ, tune=tune, job=job, run_dir=run_dir, config_file=config_file)
    try:
        load_config(environ={**os.environ, **added})
    except ConfigError as error:
        fail(str(error), code=2)
    if print_pth:
        click.echo(PTH.format(folder=str(STARTUP)))
    if print_env:
        for name, value in added.items():
            click.echo(f"export {name}={shlex.quote(value)}")
    if print_pth or print_env:
        return
    if not command:
        raise click.UsageError("which command?  pacecar run -- torchrun ... train.py")
    if (option := without_startup(command)) is not None:
        complain(f"{command[0]} {option} ignores PYTHONPATH or site, so it will not be measured; see docs/run.md")
    os.environ.update(added)
    sys.stdout.flush()
    try:
        os.execvp(command[0], command)
    except FileNotFoundError:
        fail(f"{command[0]}: not found", code=127)
    except OSError as error:
        fail(f"{command[0]}: {error.strerror}", code=126)
