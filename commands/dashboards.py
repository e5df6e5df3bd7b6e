"""Defines `pacecar dashboards`: `export` writes the files, `push` sends them to a running Grafana."""

from __future__ import annotations

import os
import re
from pathlib import Path

import click

from pacecar import __version__

from .shared_options import fail

__all__ = ["dashboards"]


@click.group()
def dashboards() -> None:
    """Grafana dashboards, and the rules that Prometheus loads."""


@dashboards.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--runbook-url", metavar="URL", help="Address of your runbook, for the links in alerts.")
def export(directory: Path, runbook_url: str | None) -> None:
    """Write dashboards (JSON), recording rules and alert rules (YAML) as files into DIRECTORY."""
    from pacecar.dashboards import export as export_dashboards

    if runbook_url is not None and not re.fullmatch(r"https?://[^\s\"'#]+", runbook_url):
        raise click.UsageError(f"--runbook-url {runbook_url}: not an address of a page")
    try:
        written = export_dashboards(directory, runbook_url=runbook_url)
    except OSError as error:
        fail(f"{directory}: cannot be written: {error.strerror}")
    for path in written:
        click.echo(str(path))


@dashboards.command()
@click.option("--url", required=True, help="The address of Grafana: http(s)://host[:port][/path].")
@click.option("--token", envvar="GRAFANA_TOKEN", help="Service account token; safer in $GRAFANA_TOKEN.")
@click.option("--user", help="Or a user, with the password in $GRAFANA_PASSWORD or prompted for.")
@click.option("--folder", help="Title of the folder, created if missing.  [default: none]")
@click.option("--overwrite", is_flag=True, help="Replace existing dashboards and any changes made in them.")
@click.option("--timeout-seconds", type=click.FloatRange(0.1, 600.0), default=15.0, show_default=True)
def push(
    url: str, token: str | None, user: str | None, folder: str | None, overwrite: bool, timeout_seconds: float
) -> None:
    """Send the dashboards to a running Grafana (rules are files of Prometheus: see `export`)."""
    from pacecar.dashboards import committed
    from pacecar.dashboards.push import Grafana, Refused, Unreachable
    from pacecar.dashboards.push import push as push_dashboards

    try:
        # A user given explicitly overrides a token in the environment.
        grafana = Grafana(
            url, None if user else token, user, _password() if user else None, timeout_seconds=timeout_seconds
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if url.startswith("http://") and not re.match(r"http://(localhost|127\.|\[::1\])", url):
        click.echo("pacecar: http sends the credentials in clear text; use https", err=True)
    texts = committed(".json")
    done = failed = 0
    try:
        for one in push_dashboards(
            grafana, texts, folder=folder, overwrite=overwrite, message=f"pacecar {__version__}"
        ):
            done, failed = done + (one.problem is None), failed + (one.problem is not None)
            click.echo(f"{one.name}: {one.url}" if one.problem is None else f"{one.name}: refused: {one.problem}")
    except (Unreachable, Refused) as error:
        fail(f"{error} ({done} of {len(texts)} dashboards pushed)")
    if failed:
        hint = "" if overwrite else "; --overwrite replaces existing ones"
        fail(f"{done} of {len(texts)} dashboards pushed{hint}")


def _password() -> str:
    """Return the password from the environment, or ask for it at the terminal."""
    given = os.environ.get("GRAFANA_PASSWORD")
    return given if given is not None else str(click.prompt("Password", hide_input=True, err=True))
