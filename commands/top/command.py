"""Defines the options of `pacecar top`: the daemon's address, the period, and `--once` for scripts."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import click

from ..shared_options import config_option, fail, load

__all__ = ["top"]


@click.command()
@config_option
@click.argument("where", required=False, metavar="[ADDRESS]")
@click.option("--once", is_flag=True, help="Print everything once, as plain text into a pipe, and exit.")
@click.option(
    "--period-seconds",
    type=click.FloatRange(0.2, 60.0),
    default=1.0,
    show_default=True,
    help="Time between two updates.",
)
def top(config_file: Path | None, where: str | None, once: bool, period_seconds: float) -> None:
    """Show GPUs, links, jobs and decisions of the daemon at ADDRESS, live.

    ADDRESS is host:port or http[s]://[user:password@]host:port/prefix.  The default is this node's daemon.
    """
    if find_spec("rich") is None:
        fail("the terminal view is drawn with rich, and rich is not installed: pip install 'pacecar[top]'")
    config = load(config_file, {}).daemon
    host = "127.0.0.1" if config.host in ("", "0.0.0.0") else config.host
    from .daemon_poller import FetchError
    from .run_top import run_live, run_once

    where = where or f"{f'[{host}]' if ':' in host else host}:{config.port}"
    if not once and not (sys.stdin.isatty() and sys.stdout.isatty()):
        fail("not a terminal; --once prints everything once", code=2)
    try:
        if once:
            run_once(where)
        else:
            run_live(where, period_seconds)
    except FetchError as error:
        fail(str(error))
