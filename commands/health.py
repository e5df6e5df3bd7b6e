"""Defines `pacecar health`: its exit code tells whether the daemon of this machine has fresh numbers.

It is for supervisors that run a program: HEALTHCHECK of a container image, an `exec` probe.  The request goes through
the daemon's socket, because HTTP may need the certificate's name (TLS), a clear password (the configuration has only
hashes) or a client key.

Left out: whether a client reaches the port, which `/-/healthy` answers.
"""

from __future__ import annotations

from pathlib import Path

import click

from pacecar.formatting.plain_text import clean

from .shared_options import config_option, fail, load

__all__ = ["health"]

TIMEOUT_SECONDS = 4.0
"""The daemon answers in milliseconds; the image's HEALTHCHECK gives up after 10 s."""


@click.command()
@config_option
@click.option("--socket", help="The daemon's socket.  [default: as configured]")
@click.option("--timeout-seconds", type=click.FloatRange(min=0.1), default=TIMEOUT_SECONDS, show_default=True)
def health(config_file: Path | None, socket: str | None, timeout_seconds: float) -> None:
    """Print ok and exit with 0 if the daemon here has fresh numbers, else print why not and exit with 1."""
    from pacecar.records import HealthRequest

    from .daemon_client import AskError, converse

    path = load(config_file, {"socket": socket}).daemon.socket
    try:
        answer = converse(path, HealthRequest(serial=1), timeout_seconds=timeout_seconds)
    except AskError as error:
        fail(str(error))
    if answer.state != "done":
        fail(answer.detail)
    click.echo(clean(answer.detail))
