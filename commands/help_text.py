"""Restores the help of commands when Python drops docstrings (`python -OO`, PYTHONOPTIMIZE=2).

click takes a command's help from the docstring of its function, which is still in the source.  An install without
sources has commands without descriptions.
"""

from __future__ import annotations

import ast
import inspect
from functools import cache
from pathlib import Path

import click

__all__ = ["restore_help"]


def restore_help(command: click.Command) -> None:
    """Set the missing help of `command` and its subcommands from their source."""
    if command.help is None and command.callback is not None:
        code = inspect.unwrap(command.callback).__code__
        command.help = _docstrings(Path(code.co_filename)).get(code.co_name)
    if isinstance(command, click.Group):
        for below in command.commands.values():
            restore_help(below)


@cache
def _docstrings(source: Path) -> dict[str, str]:
    """Return the docstrings of a module's functions by name; empty if its source cannot be read."""
    try:
        tree = ast.parse(source.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    found = {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, ast.FunctionDef)}
    return {name: text for name, text in found.items() if text is not None}
