"""Defines `pacecar health`: says by its exit code whether the daemon of this machine has fresh numbers.

It is for supervisors that ask by starting a program: HEALTHCHECK of a container image, an `exec` probe.  The request
goes through the daemon's socket.  By HTTP it would need what a check has not: with TLS the certificate's name, with
passwords one in clear (the configuration has hashes only), with client certificates a key.

Left out: whether a client reaches the port.  `/-/healthy` says that to whoever may read the numbers.
"""

from __future__ import annotations

from pathlib import Path

import click

from pacecar.formatting.plain_text import clean

from .shared_options import config_option, fail, load

__all__ = ["health"]

TIMEOUT_SECONDS = 4.0
"""The daemon answers in milliseconds; less than the 10 s after which the image's HEALTHCHECK is ended."""


@click.command()
@config_option
@click.option("--socket", help="The daemon's socket.  [default: as configured]")
@click.option("--timeout-seconds", type=click.FloatRange(min=0.1), default=TIMEOUT_SECONDS, show_default=True)
def health(config_file: Path | None, socket: str | None, timeout_seconds: float) -> None:
    """Print ok and exit with 0 where the daemon here has fresh numbers, else say why not and exit with 1."""
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
