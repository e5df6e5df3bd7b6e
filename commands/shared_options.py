"""Holds what commands share: the `--config` option, loading the configuration, JSON output and errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from pacecar.formatting.plain_text import clean

if TYPE_CHECKING:
    from pacecar.config import Config

__all__ = [
    "complain",
    "config_option",
    "fail",
    "load",
    "need",
    "need_analysis",
    "place_of_files",
    "print_json",
    "trace_directory_option",
]

config_option = click.option(
    "--config", "config_file", type=click.Path(path_type=Path), help="TOML file; default $PACECAR_CONFIG."
)


def place_of_files(_: click.Context, __: click.Parameter, directory: str | None) -> str | None:
    """Return a URL as it is, and a folder's absolute path (a click callback)."""
    return directory if directory is None or "://" in directory else str(Path(directory).absolute())


trace_directory_option = click.option(
    "--directory", metavar="FOLDER|URL", callback=place_of_files, help="Where.  [default: the job's run folder]"
)
"""Where the job writes traces: a URL, or the absolute path of a folder."""


def load(file: Path | None, flags: dict[str, Any]) -> Config:
    """Return the configuration with `flags` for [daemon]; exits with code 2 if it is invalid."""
    from pacecar.config import ConfigError, load_config

    # A repeatable option that was not given is an empty tuple.
    given = {key: value for key, value in flags.items() if value not in (None, ())}
    try:
        return load_config(file, flags={"daemon": given})
    except ConfigError as error:
        fail(str(error), code=2)


def complain(message: str) -> None:
    """Print `message` on stderr, with each line cleaned, since it may quote a file or another process."""
    click.echo("\n".join(map(clean, f"pacecar: {message}".split("\n"))), err=True)


def fail(message: str, *, code: int = 1) -> NoReturn:
    """Print `message` on stderr and exit."""
    complain(message)
    sys.exit(code)


def need(module: str, why: str, extra: str) -> None:
    """Exit, with what to install, unless `module` can be imported."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        fail(f"{why}, and {module} is not installed: pip install 'pacecar[{extra}]'")


def need_analysis(*, as_json: bool, otherwise: str = "") -> None:
    """Exit unless traces can be analyzed here; `otherwise` says what works without that."""
    need("numpy", f"the analysis calculates with numpy{otherwise}", "analyze")
    if not as_json:
        need("rich", f"the tables are drawn with rich{otherwise or ' (--json works without)'}", "analyze")


def print_json(value: object) -> None:
    """Print `value`, anything that msgspec encodes, as JSON indented by two."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
