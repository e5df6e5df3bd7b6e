"""Finds the commands and examples in the pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

__all__ = ["PAGES", "ROOT", "SHELLS", "Command", "Example", "commands", "examples"]

ROOT = Path(__file__).resolve().parents[2]

PAGES = sorted(
    page
    for pattern in ("README.md", "CONTRIBUTING.md", "bench/README.md", "deploy/README.md", "docs/**/*.md")
    for page in ROOT.glob(pattern)
)

SHELLS = frozenset({"sh", "bash", "shell", "console"})

_FENCE = re.compile(r"^ *```(.*)$")
_SETS = re.compile(r"export \w+=|\w+=\S*(\(.*\))?$")


class Example(NamedTuple):
    """A fenced block: the line of its fence, its language ("" for none) and its lines."""

    page: str
    line: int
    language: str
    lines: tuple[str, ...]

    @property
    def text(self) -> str:
        """Return the block's text."""
        return "\n".join(self.lines) + "\n"


class Command(NamedTuple):
    """A command with continued lines joined and without comments; `before` sets variables in the same block."""

    page: str
    line: int
    text: str
    before: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        """Return path and line, as editors and terminals understand them."""
        return f"{self.page}:{self.line}"


def examples(page: str, text: str) -> list[Example]:
    """Return the fenced blocks of a page; raises ValueError for one that never ends."""
    found: list[Example] = []
    begun: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        fence = _FENCE.match(line)
        if fence is None:
            if begun is not None:
                begun[2].append(line)
        elif begun is None:
            begun = (number, fence[1].strip().lower(), [])
        else:
            found.append(Example(page, begun[0], begun[1], tuple(begun[2])))
            begun = None
    if begun is not None:
        raise ValueError(f"{page}:{begun[0]}: this block never ends")
    return found


def commands(example: Example) -> list[Command]:
    """Return the commands of a block in one of SHELLS; in `console`, the lines with a prompt."""
    found: list[Command] = []
    before: list[str] = []
    held, held_at = "", 0
    for number, line in enumerate(example.lines, start=example.line + 1):
        bare = line.strip()
        if example.language == "console" and not held:
            if not bare.startswith("$ "):
                continue
            bare = bare[2:]
        if not held:
            held_at = number
        held += _without_comment(bare)
        if held.endswith("\\"):
            held = held[:-1]
            continue
        if held:
            found.append(Command(example.page, held_at, held, tuple(before)))
            if _SETS.match(held):
                before.append(held)
        held = ""
    if held:
        raise ValueError(f"{example.page}:{held_at}: continued with a backslash, and then nothing comes")
    return found


def _without_comment(line: str) -> str:
    """Return the line without a comment: from a `#` that begins a word outside of quotes."""
    quote = ""
    for at, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip()
    return line.rstrip()
