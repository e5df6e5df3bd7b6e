"""Writes a page: its frame with style and content security policy, its sections, and the small pieces of them.

A page is sent by mail, kept with a paper and opened in ten years.  So style and drawings stand in it, its own content
security policy forbids it to load anything, and all figures are text and tables that a keyboard and a screen reader
reach.  A page whose tables can be sorted has the one script `sort_tables.js` inside, which the policy allows by its
hash; without scripts it shows the same.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import metadata

from markupsafe import Markup, escape

from .template import NOTHING, file_text, part

__all__ = [
    "POLICY", "Section", "Tile", "box", "definitions", "figure", "legend", "numbered", "paragraph", "script_policy",
    "subheading", "tiles", "unbroken", "whole_page",
]  # fmt: skip

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Nothing is fetched; style stands in the page itself."""

Section = tuple[str, str, list[Markup]]
"""Anchor, title, pieces of the page."""

Tile = tuple[str, str, str]
"""What a figure is, the figure, and a word about it."""


def whole_page(title: str, top: Sequence[Markup], sections: Sequence[Section], *, is_sortable: bool = False) -> str:
    """Return the page: `top` stands above the sections.  With `is_sortable` it has the script that sorts tables."""
    script = file_text("sort_tables.js") if is_sortable else ""
    policy = script_policy(script) if is_sortable else POLICY
    needs = "needs no network" + ("; its script only sorts tables" if is_sortable else " and has no script")
    said = f"pacecar {metadata.version('pacecar')}. This file {needs}."
    return str(part("page", title, policy, Markup(file_text("style.css")), top, sections, said, Markup(script)))


def script_policy(script: str) -> str:
    """Return the policy of a page that may run this script and no other."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"{POLICY}; script-src 'sha256-{digest}'"


def figure(caption: str, drawing: str) -> Markup:
    """Return a drawing, which is markup, under its caption; nothing where there is no drawing."""
    return part("figure", caption, Markup(drawing)) if drawing else NOTHING


def legend(entries: Sequence[tuple[str, str]]) -> Markup:
    """Return what colours mean: the style's class of each, and its words."""
    return part("legend", entries) if entries else NOTHING


def tiles(found: Sequence[Tile]) -> Markup:
    """Return the most important figures, each on a card."""
    return part("tiles", [(name, value, unbroken(more)) for name, value, more in found])


def definitions(classes: str, rows: Sequence[tuple[str, str]]) -> Markup:
    """Return names and what is so."""
    return part("definitions", classes, rows)


def box(classes: str, title: str, lines: Sequence[str]) -> Markup:
    """Return a list of remarks in a frame; nothing without lines."""
    return part("box", classes, title, lines) if lines else NOTHING


def numbered(rows: Sequence[tuple[int, str]]) -> Markup:
    """Return a list with the numbers that its lines have elsewhere; nothing without lines."""
    return part("reasons", rows) if rows else NOTHING


def paragraph(text: str, classes: str = "") -> Markup:
    """Return a paragraph."""
    return part("paragraph", text, classes)


def subheading(text: str) -> Markup:
    """Return a heading within a section."""
    return part("heading", text)


def unbroken(text: str) -> Markup:
    """Return text whose lines do not end between a figure and its per cent."""
    return escape(text).replace(" %", Markup("&nbsp;%"))
