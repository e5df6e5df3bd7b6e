"""Generates the manual pages of all commands from their click help, arguments, options and defaults.

click-man (PyPI) does this too, but it cuts the summary, which `apropos` searches, at 45 characters, and does not escape
backslashes and leading dots, which groff interprets.

Pure: commands in, name and text of each page out (roff with the macros of man(7)).  There is no date, so that one
version gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import cleandoc

import click

from pacecar import __version__
from pacecar.config import SYSTEM_FILE

__all__ = ["man_pages"]

EXIT_STATUS = (
    ("0", "Success."),
    ("1", "Failure; the reason is on standard error."),
    ("2", "Wrong usage or configuration."),
    ("130", "Interrupted."),
)
"""For all commands whose help does not name others; on the first page only."""


def man_pages(root: click.Group, name: str = "pacecar") -> dict[str, str]:
    """Return file name -> page for `root` and all its visible commands, at every depth."""
    return {f"{title}.1": text for title, text in _pages(root, _context(root, name, None))}


def _pages(command: click.Command, context: click.Context) -> Iterator[tuple[str, str]]:
    yield _title(context), "\n".join(_page(command, context)) + "\n"
    for name, below in _below(command):
        yield from _pages(below, _context(below, name, context))


def _context(command: click.Command, name: str, parent: click.Context | None) -> click.Context:
    return click.Context(command, info_name=name, parent=parent, **command.context_settings)


def _title(context: click.Context) -> str:
    """Return the names of the command and those above it, without a group's arguments, as in "pacecar-job-show"."""
    above = "" if context.parent is None else f"{_title(context.parent)}-"
    return f"{above}{context.info_name}"


def _below(command: click.Command) -> list[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        return []
    return [(name, below) for name, below in sorted(command.commands.items()) if not below.hidden]


def _page(command: click.Command, context: click.Context) -> Iterator[str]:
    path = context.command_path
    title = _title(context)
    paragraphs = cleandoc(command.help or "").split("\n\n")
    summary = _one_line(paragraphs[0]).rstrip(".")
    yield f'.TH "{_escaped(title.upper())}" 1 "" "pacecar {_escaped(__version__)}" "pacecar"'
    yield from (".SH NAME", f"{_escaped(title)} \\- {_escaped(summary)}")
    yield from (".SH SYNOPSIS", f"\\fB{_escaped(path)}\\fR {_escaped(' '.join(command.collect_usage_pieces(context)))}")
    yield ".SH DESCRIPTION"
    for paragraph in paragraphs:
        yield from _paragraph(paragraph)
    # Arguments are in the synopsis, and described in the help.
    records = [one.get_help_record(context) for one in command.get_params(context) if isinstance(one, click.Option)]
    options = [record for record in records if record is not None]
    if options:
        yield ".SH OPTIONS"
        for names, text in options:
            yield from (".TP", f"\\fB{_escaped(names)}\\fR", _escaped(_one_line(text)) or "\\&")
    below = _below(command)
    if below:
        yield ".SH COMMANDS"
        for name, one in below:
            page = f"{title}-{name}"
            text = _one_line(cleandoc(one.help or "").split("\n\n")[0])
            yield from (".TP", f"\\fB{_escaped(page)}\\fR(1)", _escaped(text) or "\\&")
    if any(option.name == "config_file" for option in command.params):
        yield from (".SH FILES", ".TP", f"\\fI{_escaped(str(SYSTEM_FILE))}\\fR")
        yield _escaped("Configuration, unless --config or $PACECAR_CONFIG names another file.")
    if context.parent is None:
        yield from (".SH EXIT STATUS", "Unless the help of a command names others:")
        for code, text in EXIT_STATUS:
            yield from (".TP", f"\\fB{code}\\fR", _escaped(text))
    related = [] if context.parent is None else [_title(context.parent)]
    related += [f"{title}-{name}" for name, _ in below]
    if related:
        yield from (".SH SEE ALSO", ",\n".join(f"\\fB{_escaped(page)}\\fR(1)" for page in related))


def _paragraph(text: str) -> Iterator[str]:
    r"""Yield a paragraph of help; click's mark \b at its start keeps its line breaks."""
    kept = text.startswith("\b")
    lines = text.removeprefix("\b").strip("\n").split("\n")
    yield ".PP"
    if kept:
        yield from (".nf", *map(_escaped, lines), ".fi")
    else:
        yield _escaped(_one_line(" ".join(lines)))


def _one_line(text: str) -> str:
    return " ".join(text.replace("\b", "").split())


def _escaped(text: str) -> str:
    """Escape `text` for roff: backslashes, a leading dot or quote, and hyphens, so that they can be copied."""
    plain = text.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return f"\\&{plain}" if plain.startswith((".", "'")) else plain
