"""Prints a value as JSON for a person and a program alike: the keys in their order, indented by two."""

from __future__ import annotations

import click

__all__ = ["print_json"]


def print_json(value: object) -> None:
    """Print `value`, of anything that msgspec can encode."""
    import msgspec

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
