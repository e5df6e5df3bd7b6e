"""Defines `pacecar deploy`: `show` prints a file that came with this version, `export` writes all of them."""

from __future__ import annotations

from pathlib import Path

import click

from .shared_options import fail

__all__ = ["deploy"]


@click.group()
def deploy() -> None:
    """Unit files, manifests and configurations that belong to this version."""


@deploy.command()
@click.argument("what", required=False)
def show(what: str | None) -> None:
    """Print the files of a topic (systemd, compose, kubernetes, slurm, ...) or one file; alone, their list."""
    from pacecar.deploy import DeployError, listing
    from pacecar.deploy import show as text_of

    if what is None:
        for topic, paths in listing().items():
            click.echo(topic)
            for path in paths:
                click.echo(f"  {path}")
        return
    try:
        click.echo(text_of(what), nl=False)
    except DeployError as error:
        fail(str(error), code=2)


@deploy.command("export")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--force", is_flag=True, help="Replace files that are there and differ.")
def export_(directory: Path, force: bool) -> None:
    """Write all of them, with dashboards and rules, below DIRECTORY."""
    from pacecar.deploy import DeployError, export

    try:
        written = export(directory, force=force)
    except DeployError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or directory}: cannot be written: {error.strerror}")
    for path in written:
        click.echo(str(path))
