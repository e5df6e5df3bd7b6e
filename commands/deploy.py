"""Defines `pacecar deploy`: shows or writes the files that an installation of this version needs.

    show, export    the files of deploy/, with dashboards and rules
    man             manual pages
    completion      shell completions

It installs nothing: the administrator decides what to do with the files.
"""

from __future__ import annotations

from pathlib import Path

import click

from .shared_options import fail

__all__ = ["deploy"]


@click.group()
def deploy() -> None:
    """Unit files, manifests, manual pages and completions that belong to this version."""


def _files(_context: click.Context, _parameter: click.Parameter, begun: str) -> list[str]:
    """Complete a topic or file of `show`."""
    from pacecar.deploy import listing

    return [word for topic, paths in listing().items() for word in (topic, *paths) if word.startswith(begun)]


@deploy.command()
@click.argument("what", required=False, shell_complete=_files)
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
@click.option("--force", is_flag=True, help="Replace existing files that differ.")
def export_(directory: Path, force: bool) -> None:
    """Write all files, with dashboards and rules, below DIRECTORY."""
    from pacecar.deploy import DeployError, export

    try:
        written = export(directory, force=force)
    except DeployError as error:
        fail(str(error))
    except OSError as error:
        fail(f"{error.filename or directory}: cannot be written: {error.strerror}")
    for path in written:
        click.echo(str(path))


@deploy.command()
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
def man(directory: Path) -> None:
    """Write the manual pages of all commands into DIRECTORY/man1, as MANPATH and manpath(1) want them."""
    from pacecar.safe_files import FOLDER_MODE, replacing

    from .man_pages import man_pages

    root = click.get_current_context().find_root().command
    assert isinstance(root, click.Group)
    try:
        for name, text in man_pages(root).items():
            file = directory / "man1" / name
            with replacing(file, mode=0o644, keep_mode=True, make_mode=FOLDER_MODE) as stream:
                stream.write(text.encode())
            click.echo(str(file))
    except OSError as error:
        fail(f"{error.filename or directory}: cannot be written: {error.strerror}")


@deploy.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for SHELL, to be sourced or put into its completions folder."""
    from click.shell_completion import get_completion_class

    completing = get_completion_class(shell)
    assert completing is not None, "click knows all three"
    root = click.get_current_context().find_root()
    click.echo(completing(root.command, {}, "pacecar", "_PACECAR_COMPLETE").source())
