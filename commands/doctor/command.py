"""Defines `pacecar doctor`: what to read besides the machine, how to print the findings, and when to fail.

0  no findings at or above --fail-on    1  findings at or above it    2  wrong usage
3  no findings at or above --fail-on, but something could not be read, so the answer is partial
"""

from __future__ import annotations

import json
import math
import os
import platform
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ..shared_options import fail

__all__ = ["PARTIAL", "doctor"]

FOUND, PARTIAL = 1, 3

PIPED_COLUMNS = 120
"""Width of piped text, which has no terminal."""

_MS = 1_000_000


@click.command()
@click.option("--run", "run_dir", type=click.Path(path_type=Path), metavar="DIR", help="A run folder (rank<r>.jsonl).")
@click.option(
    "--script", type=click.Path(path_type=Path), metavar="FILE", help="The training script, which is parsed, not run."
)
@click.option("--pid", type=click.IntRange(min=1), help="A training process, for its environment, limits and affinity.")
@click.option("--nccl-log", type=click.Path(path_type=Path), metavar="FILE", help="NCCL's log, from NCCL_DEBUG=INFO.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--fail-on",
    type=click.Choice(["info", "warning", "critical", "never"]),
    default="warning",
    show_default=True,
    help="Exit with 1 if a finding is at least this severe.",
)
@click.option(
    "--round-trip-ms",
    type=click.FloatRange(0.001, 10_000.0),
    help="Round trip between nodes under load, to judge TCP's buffers.  [default: 1, with findings only as info]",
)
def doctor(
    run_dir: Path | None,
    script: Path | None,
    pid: int | None,
    nccl_log: Path | None,
    as_json: bool,
    fail_on: str,
    round_trip_ms: float | None,
) -> None:
    """Find what this machine, driver, network and job could do better, with evidence and the command to apply.

    Nothing is changed: the commands are printed for you to run.
    """
    for path, is_right, what in (
        (run_dir, os.path.isdir, "folder"),
        (script, os.path.isfile, "file"),
        (nccl_log, os.path.isfile, "file"),
    ):
        if path is not None and not is_right(path):
            fail(f"{path}: no such {what}", code=2)
    if pid is not None and not Path(f"/proc/{pid}").is_dir():
        fail(f"--pid {pid}: no such process", code=2)
    if round_trip_ms is not None and math.isnan(round_trip_ms):  # NaN passes range checks
        fail("--round-trip-ms nan: not a number", code=2)
    if not as_json and find_spec("rich") is None:
        fail(
            "printing findings needs rich, which is not installed: pip install 'pacecar[doctor]', or use --json",
            code=2,
        )
    from pacecar.monitor.gpu.known_gpus import known_gpus_path
    from pacecar.monitor.gpu.nvml import PyNvml
    from pacecar.nccl_ras import ask_ras_twice, ras_address

    from .collect_facts import collect_facts
    from .document import as_document
    from .findings import Severity
    from .host_access import HostAccess
    from .rules.registry import judge

    facts = collect_facts(
        HostAccess(
            home=_home(),
            nvml=PyNvml(),
            pid=pid,
            known_gpus=known_gpus_path(_recordings(), platform.node()),
            ras=lambda: ask_ras_twice(ras_address()),
        ),
        host=socket.gethostname(),
        round_trip_ns=None if round_trip_ms is None else round(round_trip_ms * _MS),
        run=run_dir,
        script=script,
        log=nccl_log,
    )
    judgement = judge(facts)
    if as_json:
        click.echo(json.dumps(as_document(facts, judgement), indent=2))
    else:
        from rich.console import Console

        from .terminal_report import render

        render(facts, judgement, Console(width=None if sys.stdout.isatty() else PIPED_COLUMNS))
    if fail_on != "never" and any(f.severity.rank >= Severity(fail_on).rank for f in judgement.findings):
        sys.exit(FOUND)
    sys.exit(PARTIAL if facts.unreadable or judgement.failed else 0)


def _recordings() -> str:
    """Return the daemon's folder according to this user's configuration."""
    from pacecar.config import ConfigError, default_recordings, load_config

    try:
        return load_config().daemon.recordings
    except ConfigError:  # the daemon and the job report it
        return default_recordings()


def _home() -> Path | None:
    try:
        return Path.home()
    except RuntimeError:  # a user without an entry and without $HOME
        return None
