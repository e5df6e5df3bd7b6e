"""Writes a self-contained HTML page: its frame with style and content security policy, and its sections.

People mail a page, keep it with a paper and open it in ten years.  So style and drawings are inside, the content
security policy forbids loading anything, and all figures are text and tables, accessible by keyboard and screen reader.
A page with sortable tables contains the script `sort_tables.js`, which the policy allows by its hash; without scripts
it shows the same.

The macros of `page.html.jinja` make the parts and escape everything that they print, so names and reasons from records
and traces are never markup.  Only drawings, and parts that the template made, are passed in as markup.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from functools import cache
from importlib import metadata, resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from ..tables import Table

__all__ = [
    "POLICY", "Section", "Tile", "box", "definitions", "figure", "folded", "legend", "numbered", "paragraph",
    "script_policy", "subheading", "table_html", "tiles", "unbroken", "whole_page",
]  # fmt: skip

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is fetched; the style is in the page itself."""

NOTHING = Markup()

Section = tuple[str, str, list[Markup]]
"""Anchor, title, content."""

Tile = tuple[str, str, str]
"""The name of a figure, the figure, and a remark."""


def whole_page(title: str, top: Sequence[Markup], sections: Sequence[Section], *, is_sortable: bool = False) -> str:
    """Return the page with `top` above the sections; with `is_sortable` it has the script that sorts tables."""
    script = _file_text("sort_tables.js") if is_sortable else ""
    policy = script_policy(script) if is_sortable else POLICY
    needs = "needs no network" + ("; its script only sorts tables" if is_sortable else " and has no script")
    footer = f"pacecar {metadata.version('pacecar')}. This file {needs}."
    return str(_part("page", title, policy, Markup(_file_text("style.css")), top, sections, footer, Markup(script)))


def script_policy(script: str) -> str:
    """Return the policy of a page that may run only this script."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def figure(caption: str, drawing: str) -> Markup:
    """Return a drawing, which is markup, under its caption; nothing for an empty drawing."""
    return _part("figure", caption, Markup(drawing)) if drawing else NOTHING


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return a legend of (CSS class, words); nothing without entries."""
    return _part("legend", entries) if entries else NOTHING


def tiles(found: Sequence[Tile]) -> Markup:
    """Return the most important figures, each on a card."""
    return _part("tiles", [(name, value, unbroken(more)) for name, value, more in found])


def definitions(classes: str, rows: Sequence[tuple[str, str]]) -> Markup:
    """Return a list of (name, value)."""
    return _part("definitions", classes, rows)


def box(classes: str, title: str, lines: Sequence[str]) -> Markup:
    """Return a list of remarks in a frame; nothing without lines."""
    return _part("box", classes, title, lines) if lines else NOTHING


def numbered(rows: Sequence[tuple[int, str]]) -> Markup:
    """Return a list with the given numbers; nothing without rows."""
    return _part("reasons", rows) if rows else NOTHING


def paragraph(text: str, classes: str = "") -> Markup:
    """Return a paragraph."""
    return _part("paragraph", text, classes)


def subheading(text: str) -> Markup:
    """Return a heading within a section."""
    return _part("heading", text)


def unbroken(text: str) -> Markup:
    """Return `text` without line breaks between a figure and its percent sign."""
    return escape(text).replace(" %", Markup("&nbsp;%"))


def table_html(table: Table | None) -> Markup:
    """Return the table in a region that scrolls sideways, with its notes; nothing for None."""
    if table is None:
        return NOTHING
    cut = f"{table.cut[:1].upper()}{table.cut[1:]}; --json has all." if table.cut else ""
    note = " ".join(words for words in (table.caption, table.note, cut) if words)
    split = len(table.cells) - table.sums
    return _part("table", table, table.cells[:split], table.cells[split:], note)


def folded(title: str, table: Table | None) -> Markup:
    """Return the table behind a title that opens it; nothing for None."""
    return NOTHING if table is None else _part("folded", title, table_html(table))


def _part(name: str, *values: Any) -> Markup:  # noqa: ANN401  a macro takes what it prints
    """Return the output of the macro `name`, which escapes `values`."""
    return Markup(getattr(_template(), name)(*values))


def _file_text(name: str) -> str:
    return (resources.files("pacecar.formatting.page") / name).read_text(encoding="utf-8")


@cache
def _template() -> Any:  # noqa: ANN401  its macros are attributes that only the template knows
    environment = Environment(loader=FunctionLoader(_file_text), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html.jinja").module
