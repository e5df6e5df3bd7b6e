"""Holds what all commands share: the `--config` option, loading the configuration, and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pacecar.formatting.plain_text import clean

if TYPE_CHECKING:
    from pacecar.config import Config

__all__ = ["complain", "config_option", "fail", "load"]

config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file; default $PACECAR_CONFIG."
)


def load(file: Path | None, flags: dict[str, Any]) -> Config:
    """Return the configuration, `flags` being of [daemon]; ends the command when it cannot be used."""
    from pacecar.config import ConfigError, load_config

    # An option that may be repeated and was not given is an empty tuple.
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    try:
        return load_config(file, flags={"daemon": given})
    except ConfigError as error:
        fail(str(error), code=2)


def complain(message: str) -> None:
    """Print `message` on stderr; each line is cleaned, for it may quote a file or another process."""
    click.echo("\n".join(map(clean, f"pacecar: {message}".split("\n"))), err=True)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Print `message` on stderr and exit."""
    complain(message)
    sys.exit(code)
